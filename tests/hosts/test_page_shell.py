"""Commands for several hosts on the documentation pages are run, with the test's hosts and fewer ranks and steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ..support.hosts.network import AGENT
from ..support.hosts.training import Hosts
from ..support.launch import run
from ..support.page_shell import PAGES, commands, make_folder, place, shortened


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "hosts" in map(place, commands(page))], ids=lambda page: page.stem
)
def test_commands_run(page: Path, hosts: Hosts, tmp_path: Path) -> None:
    network, folder = hosts.network, tmp_path / "folder"
    make_folder(page, folder)
    both = f"{network.net}.1:2,{network.net}.2:2"
    (folder / "hosts").write_text(both.replace(",", "\n"))
    (tmp_path / "ssh").symlink_to(AGENT)
    binaries = [str(tmp_path), str(network.python.parent), "/usr/sbin:/usr/bin:/sbin:/bin"]
    environment = {**network.environment, "PATH": ":".join(binaries)}
    flags = {"run": f"--network {network.net}.0/24", "horovodrun": "--network-interface eth0"}
    for command in commands(page):
        if place(command) == "hosts":
            command = re.sub(r"\ba(:\d)?,b(:\d)?", both, shortened(command))
            command = re.sub(r"^mpitrain (\w+)", lambda match: f"{match[0]} {flags[match[1]]}", command)
            words = ["bash", "-c", f"{shlex.join(network.on_first())} {command}"]
            done = run(words, timeout=120, env=environment, cwd=folder)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
