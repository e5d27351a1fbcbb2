"""Registers in a folder: of several changes of one version, one wins."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from mpitrain.strategy.learners import store as store_module
from mpitrain.strategy.learners.store import Folder, Register, Value


def test_a_value_is_created_once(tmp_path: Path) -> None:
    first, second = Folder(tmp_path), Folder(tmp_path)
    assert first.create("name", b"first") and not second.create("name", b"second")
    assert second.read("name") == b"first"
    second.replace("name", b"third")
    assert first.read("name") == b"third"
    first.delete("name")
    first.delete("name")
    assert second.read("name") is None and os.listdir(tmp_path) == []


def test_file_systems_that_do_not_say_that_a_name_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SFTP has one error for all reasons."""
    make_link = os.link

    def link(source: str, target: str) -> None:
        try:
            make_link(source, target)
        except OSError as error:
            raise PermissionError(errno.EPERM, "Operation not permitted") from error

    monkeypatch.setattr(os, "link", link)
    folder = Folder(tmp_path)
    assert folder.create("name", b"first") and not folder.create("name", b"second")
    assert folder.read("name") == b"first"
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    with pytest.raises(PermissionError):
        folder.create("name", b"third")


@pytest.mark.parametrize("keep", [2, 5])
def test_a_register_has_all_changes_of_several_threads(tmp_path: Path, keep: int) -> None:
    def count() -> None:
        register = Register(Folder(tmp_path), "count", keep)
        for _ in range(20):
            while True:
                value = register.read()
                if register.swap(value, str(int(value.data or b"0") + 1).encode()):
                    break

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Register(Folder(tmp_path), "count", keep).read() == Value(80, b"80")
    sizes = [path.stat().st_size for path in tmp_path.glob("count.[0-9]*")]
    assert len(sizes) == 80 and sum(map(bool, sizes)) <= keep + 4  # a slow thread may empty its version later


class Stale(Folder):
    """As over SFTP for 20 s: a new content is seen with the length that the name had before."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lengths: dict[str, int] = {}

    def read(self, name: str) -> bytes | None:
        data = super().read(name)
        if not data:
            return data
        return data[: self._lengths.setdefault(name, len(data))]


def test_a_reader_that_sees_former_lengths_sees_each_new_version(tmp_path: Path) -> None:
    writer, reader = Register(Folder(tmp_path), "x"), Register(Stale(tmp_path), "x")
    for number in range(12):
        assert writer.swap(Value(number, b""), str(number).encode())
        assert reader.changed()
        assert reader.read() == Value(number + 1, str(number).encode())


@pytest.mark.parametrize("used", [1000, 1])
def test_a_process_that_was_suspended_does_not_change_the_value(
    tmp_path: Path, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_USED", used)
    suspended, other = Register(Folder(tmp_path), "x"), Register(Folder(tmp_path), "x")
    seen = suspended.read()
    for number in range(5):
        assert other.swap(Value(number, b""), str(number).encode())
    assert not suspended.swap(seen, b"late")
    assert suspended.read() == other.read() == Value(5, b"4")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    names = ["x.1", "x.2", "x.3"] if used > 1 else ["x.3"]
    assert sizes == {**dict.fromkeys(names, 0), "x.4": 1, "x.5": 1, "x.newest": 20}


def test_a_suspended_process_does_not_change_the_value_if_the_pointer_is_behind(tmp_path: Path) -> None:
    suspended, other = Register(Folder(tmp_path), "x"), Register(Folder(tmp_path), "x")
    seen = suspended.read()
    for number in range(9):
        assert other.swap(Value(number, b""), str(number).encode())
    Folder(tmp_path).replace("x.newest", b"1")  # by a process that was suspended, too
    assert not suspended.swap(seen, b"late")
    assert Register(Folder(tmp_path), "x").read() == Value(9, b"8")


def test_a_lost_pointer_does_not_lead_back(tmp_path: Path) -> None:
    writer, reader = Register(Folder(tmp_path), "x"), Register(Folder(tmp_path), "x")
    for number in range(4):
        assert writer.swap(Value(number, b""), str(number).encode())
    assert reader.read() == Value(4, b"3")
    Folder(tmp_path).replace("x.newest", b"2")  # as a process writes that was suspended before it
    assert reader.read() == Value(4, b"3")
    assert writer.swap(writer.read(), b"4") and Register(Folder(tmp_path), "x").read() == Value(5, b"4")


def test_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    left, new = tmp_path / "a.host-1-x.partial", tmp_path / "b.host-2-y.partial"
    left.touch()
    new.touch()
    os.utime(left, (0, 0))
    Folder(tmp_path)
    assert not left.exists() and new.exists()


def test_a_full_disk_hides_no_version_and_keeps_no_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full after each new version was written: what needs space afterwards fails."""
    writer, reader = Register(Folder(tmp_path), "x"), Register(Folder(tmp_path), "x")
    assert writer.swap(Value(0, b""), b"0") and reader.read() == Value(1, b"0")
    replace = Folder.replace

    def replace_if_empty(self: Folder, name: str, data: bytes) -> None:
        if data:
            raise OSError(28, "No space left on device")
        replace(self, name, data)

    monkeypatch.setattr(Folder, "replace", replace_if_empty)
    for number in range(1, 5):
        assert writer.swap(Value(number, b""), str(number).encode())
    assert reader.read() == Register(Folder(tmp_path), "x").read() == Value(5, b"4")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {"x.1": 0, "x.2": 0, "x.3": 0, "x.4": 1, "x.5": 1, "x.newest": 20}


def test_a_damaged_version_has_the_content_of_the_one_before(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    first, second = (Register(folder, "count", 3, is_intact=bytes.isdigit) for _ in range(2))
    assert first.swap(first.read(), b"1") and folder.create("count.2", b"hello")
    assert first.read() == second.read() == Value(2, b"1")
    assert second.swap(second.read(), b"2") and first.read() == Value(3, b"2")
    for number in (1, 2, 3):
        folder.replace(f"count.{number}", b"")
    assert first.read() == Value(3, b"2")  # it has read that already
    with pytest.raises(OSError, match=r"count\.3"):
        Register(folder, "count", 3, is_intact=bytes.isdigit).read()
