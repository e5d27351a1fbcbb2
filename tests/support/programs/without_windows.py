"""``mpitrain train`` where windows fail: ``without_windows.py {refused,stuck} JOB FLAGS``.

No MPI here has no windows, so the failure is a stand-in: creating one raises, or the probe finds that it is stuck.
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
