"""Small Python environments for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .launch import Mpi

# Prints a line of JSON: what shows from which environment a rank and the commands that it calls have started.
PROGRAM = """
import json, os, socket, subprocess, sys
import own
tool = subprocess.run(["tool"], capture_output=True, text=True).stdout.strip()
print(json.dumps([socket.gethostname(), sys.prefix, own.__file__, tool, os.environ.get("VIRTUAL_ENV")]), flush=True)
"""


def make_environment(folder: Path, mpi: Mpi) -> Mpi:
    """Make a virtual environment with the module ``own`` and the command ``tool``; it uses the packages of ``mpi``."""
    subprocess.run([str(mpi.python), "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (theirs,) = (mpi.python.parent.parent / "lib").glob("python*/site-packages")
    # An environment in which an environment was active when it was made has that one's packages in editable mode.
    (packages / "more.pth").write_text(f"import site; site.addsitedir({str(theirs)!r})\n")
    (packages / "own.py").write_text("")
    for path in (mpi.python.parent.parent / "lib").iterdir():  # the MPI library
        if not path.name.startswith("python"):
            (folder / "lib" / path.name).symlink_to(path)
    for path in mpi.python.parent.iterdir():  # its launcher
        if path.name.startswith(("mpirun", "mpiexec", "hydra", "prte")):
            (folder / "bin" / path.name).symlink_to(path)
    tool = folder / "bin" / "tool"
    tool.write_text(f"#!{folder}/bin/python\nimport sys\nprint(sys.prefix)\n")
    tool.chmod(0o755)
    return Mpi(mpi.name, folder / "bin" / "python")
