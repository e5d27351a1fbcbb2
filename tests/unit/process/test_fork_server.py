"""What the server of forks imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ...support.waiting import limit

MODULES = {
    "folder": ("import os, tempfile\nos.environ['OWN_FOLDER'] = tempfile.gettempdir()", 0),
    "fault": ("1 / 0", 1),
    "file": ("x = 1", 0),
    "thread": ("import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()", 1),
    "GPU": ("file = open('gpu', 'w')", 1),
}


@pytest.mark.parametrize("kind", MODULES)
def test_a_module_that_a_fork_would_break_ends_the_server(kind: str, tmp_path: Path) -> None:
    content, status = MODULES[kind]
    (tmp_path / "own.py").write_text(content)
    code = (
        "import os, sys, tempfile\n"
        "from mpitrain.process import fork_server\n"
        "sys.path.insert(0, os.getcwd())\n"
        "fork_server._GPUS = (os.path.abspath('gpu'),)\n"
        "fork_server._import('own', 0)\n"
        "os.environ['TMPDIR'] = os.getcwd()\n"
        "assert 'OWN_FOLDER' not in os.environ and tempfile.gettempdir() == os.getcwd()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=limit(60))
    assert done.returncode == status
