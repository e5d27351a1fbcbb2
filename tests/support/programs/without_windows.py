"""``mpitrain train`` with MPI windows that fail: ``without_windows.py {refused,stuck} JOB FLAGS``.

All MPI libraries of the tests have windows, so the failure is simulated: creating a window raises an exception, or the
probe reports no progress.
"""

from __future__ import annotations

import sys

from mpitrain.cli.main import main
from mpitrain.comm.mpi import MPI
from mpitrain.comm.rpc import Routes, windows


def refuse(window: windows.Window, routes: Routes, nbytes: int) -> None:
    raise MPI.Exception(MPI.ERR_WIN)


how, *words = sys.argv[1:]
if how == "refused":
    windows.Window.__init__ = refuse
else:
    windows.Window.progresses = lambda self: False
main(["train", *words])
