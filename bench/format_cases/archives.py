"""Tar files of Python, GNU tar and webdataset; NumPy's files in them; and TFRecord files of TensorFlow."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mpitrain import data

from .tables import Rng, pick
from .values import Case, Peers

# Keys of samples: folders, spaces, several dots, long names, and names that are not UTF-8.
KEYS = ["{0:04}", "a b/{0}", "deep/er/{0}", "./x{0}", "é{0}", "\udce9{0}"]
KEYS += ["n" * 120 + "{0}", "d" * 90 + "/" + "e" * 90 + "{0}"]
STRAYS = ["._{0}.jpg", ".hidden", "__MACOSX/._a.jpg", "README", "__shards__", "Makefile"]


def _content(rng: Rng, extension: str) -> tuple[bytes, Any]:
    """Return a file and what it is decoded to."""
    kind = extension.rpartition(".")[2].lower()
    if kind == "cls":
        number = int(rng.integers(1000))
        return str(number).encode() + pick(rng, [b"", b"\n"]), number
    if kind == "json":
        value = {"a": [1, 2.5, None], "b": pick(rng, ["x", "é"])}
        return json.dumps(value, ensure_ascii=bool(rng.integers(2))).encode(), value
    if kind == "txt":
        text = pick(rng, ["", "hello", "日本\n", "a\r\nb"])
        return text.encode(), text
    if kind == "npy":
        return _npy(rng)
    if kind == "png":
        pixels = rng.integers(0, 256, (int(rng.integers(1, 9)), 3, 3)).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        return file.getvalue(), pixels
    content = rng.bytes(int(pick(rng, [0, 10, 512, 1024, 5000])))
    return content, content


def _npy(rng: Rng) -> tuple[bytes, np.ndarray]:
    """Return a file of NumPy, and the array in this machine's byte order."""
    shape = pick(rng, [(), (0,), (3,), (2, 3), (2, 0, 3), (5, 1, 2)])
    kinds = "? i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 c8 c16 U3 S3 M8[ns] M8[D] m8[s] >i4 >f8 >u2 >U2 >M8[us]"
    kind = pick(rng, kinds.split())
    array = np.asarray(rng.integers(0, 100, shape)).astype(kind)
    if rng.random() < 0.1:
        array = np.zeros(shape, pick(rng, ["i4,f8", [("a", ">i2"), ("b", "f4", (2,))]]))
    if rng.random() < 0.3:
        array = np.asfortranarray(array)
    elif rng.random() < 0.2 and array.ndim:
        array = array[::-1]
    file = io.BytesIO()
    if rng.random() < 0.2:
        np.lib.format.write_array(file, array, version=pick(rng, [(1, 0), (2, 0), (3, 0)]))
    else:
        np.save(file, array)
    return file.getvalue(), array.astype(array.dtype.newbyteorder("="))


def _samples(rng: Rng) -> list[tuple[str, dict[str, tuple[bytes, Any]]]]:
    extensions = ["dat", "cls", "json", "txt", "npy", "seg.png", "PNG", "bin", "x.Txt", "pyd"]
    style, count = pick(rng, KEYS[:4] if rng.random() < 0.6 else KEYS), int(rng.integers(1, 6))
    chosen = [str(name) for name in rng.permutation(extensions)[: rng.integers(1, 5)]]
    samples = []
    for number in range(count):
        own = chosen if rng.random() < 0.8 else chosen[:1]
        files = {extension: _content(rng, extension) for extension in own}
        samples.append((style.format(number), files))
    return samples


def tar(rng: Rng, folder: Path, peers: Peers) -> Case:
    """Return one or two tar files of one of several writers."""
    paths: list[Path] = []
    expected: list[Any] = []
    about, decode, is_mixed = [], bool(rng.integers(2)), False
    for shard in range(pick(rng, [1, 1, 2])):
        samples, path = _samples(rng), folder / pick(rng, [f"s{shard}.tar", f"s {shard} é.tar"])
        writer = pick(rng, ["python", "gnu", "webdataset"])
        if writer == "webdataset":
            name = _write_webdataset(samples, path, peers)
        elif writer == "python":
            name, is_mixed = _write_python(rng, samples, path)
        else:
            name = _write_gnu(rng, samples, path, folder / f"files{shard}")
        about.append(f"{writer} {name}")
        paths.append(path)
        own = [_sample(key, files, decode) for key, files in samples]
        if not is_mixed and not any(word in name for word in ("ignore", "links", "sparse", "strays")):
            _check_webdataset(peers, path, samples)
        expected += own

    def read() -> Any:
        split = data.webdataset(paths, decode=decode)
        return [split.dataset[i] for i in range(len(split))]

    return Case(paths, read, expected, ", ".join(about), is_protected=_protects(paths, "ignore" in about[0]))


def _sample(key: str, files: dict[str, tuple[bytes, Any]], decode: bool) -> dict[str, Any]:
    return {"__key__": key, **{name.lower(): pair[decode] for name, pair in files.items()}}


def _check_webdataset(peers: Peers, path: Path, samples: list[Any]) -> None:
    """Check that webdataset finds the same samples in the same order."""
    read = peers("read_tar", str(path))
    expected = [_sample(key, files, False) for key, files in samples]
    if read != expected:
        raise ValueError(f"webdataset reads {[[*sample] for sample in read]}, not {[[*s] for s in expected]}")


def _write_webdataset(samples: list[Any], path: Path, peers: Peers) -> str:
    raw = [{"__key__": key, **{name: pair[0] for name, pair in files.items()}} for key, files in samples]
    peers("write_tar", str(path), raw)
    return ""


def _write_python(rng: Rng, samples: list[Any], path: Path) -> tuple[str, bool]:
    """Write with tarfile, perhaps with files of samples apart from each other, and files that belong to no sample."""
    form = pick(rng, [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    longest = max(len(os.fsencode(key)) for key, _ in samples)
    form = tarfile.PAX_FORMAT if form == tarfile.USTAR_FORMAT and longest > 90 else form
    members = [(f"{key}.{name}", pair[0]) for key, files in samples for name, pair in files.items()]
    is_mixed, strays = rng.random() < 0.3, rng.random() < 0.3
    if is_mixed:
        members.sort(key=lambda member: member[0].partition(".")[2])
        order = list(dict.fromkeys(name for name, _ in members))
        _sort_as(samples, order)
    with tarfile.open(path, "w", format=form, encoding="utf-8", errors="surrogateescape") as archive:
        for number, (name, content) in enumerate(members):
            if strays:
                archive.addfile(tarfile.TarInfo(STRAYS[number % len(STRAYS)].format(number)))
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), float(pick(rng, [0, 1.5e9, 1.5e9 + 0.5]))
            if form == tarfile.PAX_FORMAT and rng.random() < 0.2:
                member.pax_headers = {"comment": "é" * 100}
            archive.addfile(member, io.BytesIO(content))
    names = {tarfile.USTAR_FORMAT: "ustar", tarfile.GNU_FORMAT: "gnu", tarfile.PAX_FORMAT: "pax"}
    return f"{names[form]}{' mixed' * is_mixed}{' strays' * strays}", is_mixed


def _sort_as(samples: list[Any], names: list[str]) -> None:
    """Sort samples in place by the first of their files in a list of names."""
    samples.sort(key=lambda sample: min(names.index(f"{sample[0]}.{name}") for name in sample[1]))


def _write_gnu(rng: Rng, samples: list[Any], path: Path, folder: Path) -> str:
    """Write with GNU tar, in one of its formats; with links, sparse files, or two archives after each other."""
    longest = max(len(os.fsencode(key)) for key, _ in samples)
    form = pick(rng, ["gnu", "posix", "oldgnu"] if longest > 90 else ["gnu", "posix", "ustar", "v7", "oldgnu"])
    special = pick(rng, ["", "", "sparse", "links", "ignore"])
    if form in ("v7", "ustar") and special == "sparse":
        special = ""
    names, seen = [], {}
    for key, files in samples:
        for extension, (content, decoded) in files.items():
            name = f"{key}.{extension}"
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if special == "sparse" and extension in ("bin", "pyd", "dat"):
                content = bytes(200_000) + content + bytes(int(pick(rng, [0, 100_000])))
                files[extension] = (content, content)
                _write_sparse(file, content)
            elif special == "links" and extension in seen:
                target, files[extension] = seen[extension]
                if rng.random() < 0.5:
                    os.link(folder / target, file)
                else:
                    os.symlink(os.path.relpath(folder / target, file.parent), file)
            else:
                file.write_bytes(content)
                seen[extension] = name, (content, decoded)
            names.append(name)
    parts = [names]
    if special == "ignore":
        cut = int(rng.integers(len(names) + 1))
        parts = [part for part in (names[:cut], names[cut:]) if part]
    path.write_bytes(b"")
    for part in parts:
        words = ["--sparse"] if special == "sparse" else []
        words += ["--sparse-version=" + pick(rng, ["0.0", "0.1", "1.0"])] if words and form == "posix" else []
        words += ["--no-recursion", "-b", pick(rng, ["1", "20"]), "-c", "-f", "-"]
        done = subprocess.run(
            ["tar", f"--format={form}", *words, "--", *part], cwd=folder, capture_output=True, check=True
        )
        with open(path, "ab") as file:
            file.write(done.stdout)
    return f"{form} {special} {' '.join(words)}"


def _write_sparse(path: Path, content: bytes) -> None:
    """Write only the blocks that are not zero."""
    with open(path, "wb") as file:
        for start in range(0, len(content), 4096):
            if any(content[start : start + 4096]):
                file.seek(start)
                file.write(content[start : start + 4096])
        file.truncate(len(content))


def _protects(paths: list[Path], are_several: bool) -> Callable[[str, int, int], bool]:
    """Return whether damage is in the last header before a file's content, or cuts the file: the format shows it.

    Args:
        are_several: Whether the first file consists of two archives, of which the first is valid when it is alone.
    """
    with tarfile.open(paths[0], encoding="utf-8", ignore_zeros=True) as archive:
        headers = {member.offset_data - 512 for member in archive if not member.issparse()}

    def is_protected(way: str, start: int, stop: int) -> bool:
        within = any(header <= start and stop <= header + 512 for header in headers)
        return (way == "cut" and not are_several) or (way in ("flip", "flips") and within)

    return is_protected


def npy(rng: Rng, folder: Path) -> Case:
    """Return a tar file with arrays; damage is in the arrays, not in the tar file."""
    path, contents, expected = folder / "arrays.tar", [], []
    for number in range(4):
        content, array = _npy(rng)
        contents.append(content)
        expected.append({"__key__": str(number), "x.npy": array})
    file = folder / "x.npy"
    file.write_bytes(contents[0])

    def read() -> Any:
        with tarfile.open(path, "w") as archive:
            for number, content in enumerate([file.read_bytes(), *contents[1:]]):
                member = tarfile.TarInfo(f"{number}.x.npy")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        split = data.webdataset(path)
        return [split.dataset[i] for i in range(len(split))]

    about = ", ".join(f"{each['x.npy'].dtype} {each['x.npy'].shape}" for each in expected)
    return Case(
        [file], read, expected, about, is_protected=lambda way, start, stop: way in ("cut", "twice", "inserted")
    )


# TFRecord files


def _feature(rng: Rng, kind: str) -> list[Any]:
    count = int(pick(rng, [0, 1, 1, 3, 200]))
    if kind == "int":
        return [int(pick(rng, [0, -1, 2**63 - 1, -(2**63), 300])) for _ in range(count)]
    if kind == "float":
        return [float(pick(rng, [0.0, -0.0, float("nan"), float("inf"), 1e-40, 3.4e38, 0.1])) for _ in range(count)]
    return [rng.bytes(int(pick(rng, [0, 1, 300]))) for _ in range(count)]


def tfrecord(rng: Rng, folder: Path, peers: Peers) -> Case:
    """Return one or two files of messages of alike or different features."""
    paths, expected = [], []
    names = ["image", "label", "", "a/b", "é", "x" * 200]
    kinds = {name: pick(rng, ["int", "float", "bytes"]) for name in names[: int(rng.integers(0, 7))]}
    is_alike, has_sequences = rng.random() < 0.3, rng.random() < 0.3
    for shard in range(pick(rng, [1, 2])):
        examples: list[tuple[dict[str, Any], dict[str, Any]]] = []
        first = {name: _feature(rng, kind) for name, kind in kinds.items()}
        for _ in range(pick(rng, [0, 1, 5]) if shard else 4):
            features = {name: _feature(rng, kind) for name, kind in kinds.items() if rng.random() < 0.8}
            steps = {
                name: [_feature(rng, kind) for _ in range(int(rng.integers(0, 4)))]
                for name, kind in (("frames", "bytes"), ("ids", "int"), ("empty", "float"))
            }
            examples.append((first if is_alike else features, steps if has_sequences else {}))
        paths.append(folder / f"{shard}.tfrecord")
        peers("write_tfrecord", str(paths[-1]), examples)
        for features, lists in peers("read_tfrecord", str(paths[-1]), [bool(steps) for _, steps in examples]):
            values = {name: _documented(*feature) for name, feature in features.items() if feature[1] or feature[0]}
            values |= {name: [_documented(*step) for step in steps] for name, steps in lists.items()}
            expected.append(values)

    def read() -> Any:
        split = data.tfrecord(paths)
        return [split.dataset[i] for i in range(len(split))]

    ends = _record_ends(paths[0])

    def is_protected(way: str, start: int, stop: int) -> bool:
        return way not in ("cut", "twice") or start not in ends

    about = f"{kinds}, {'alike, ' * is_alike}{'sequences' * has_sequences}"
    return Case(paths, read, expected, about, is_protected=is_protected)


def _record_ends(path: Path) -> set[int]:
    """Return where the records of a file end: a file that is cut there is a valid file."""
    content, ends = path.read_bytes(), {0}
    at = 0
    while at < len(content):
        at += 16 + int.from_bytes(content[at : at + 8], "little")
        ends.add(at)
    return ends


def _documented(kind: str, values: list[Any]) -> Any:
    """Return the value of a feature by the documentation of ``mpitrain.data.tfrecord``."""
    if not kind:
        return None
    if kind == "bytes_list":
        return values[0] if len(values) == 1 else values
    return np.array(values, np.float32 if kind == "float_list" else np.int64)
