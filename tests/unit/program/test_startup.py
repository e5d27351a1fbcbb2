"""The module that Python programs import at their start agrees with the package, and hides no module of the user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mpitrain.core.activity import ActivityPage
from mpitrain.program.rank import _STARTUP


def started(tmp_path: Path, page: ActivityPage, *folders: Path) -> str:
    """Return the process id, $PYTHONPATH and ``sys.own`` that a program prints, after checking its recorded stacks."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\nprint(os.getpid(), os.environ.get('PYTHONPATH'), getattr(sys, 'own', None))\n"
        "os.kill(os.getpid(), signal.SIGRTMIN + 7)\n"
    )
    stacks = tmp_path / "stacks"
    stacks.touch()
    variables = {"MPITRAIN_ACTIVITY": page.path, "MPITRAIN_STACKS": str(stacks)}
    path = os.pathsep.join(map(str, [_STARTUP, *folders]))
    environment = {**os.environ, **variables, "PYTHONPATH": path}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
    assert f'File "{script}", line 3' in stacks.read_text()
    return done.stdout


def test_a_program_registers_its_process(tmp_path: Path) -> None:
    page = ActivityPage("program")
    pid, path, _ = started(tmp_path, page).split()
    assert page.stacks_pid == int(pid) and path == "None"


def test_the_users_own_module_is_imported(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.own = 'imported'\n")
    _, path, own = started(tmp_path, ActivityPage("program"), tmp_path / "site").split()
    assert (path, own) == (str(tmp_path / "site"), "imported")
