"""The ``mpitrain`` command, and ``python -m mpitrain``."""

import signal
import sys

# Ctrl-C ends the program while modules are imported. A KeyboardInterrupt might be lost in one of the modules. Shells
# make background programs of scripts ignore SIGINT; 'run' handles SIGINT in such programs too, because the signal
# requests a save.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler or sys.argv[1:2] == ["run"]:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if sys.argv[1:2] in (["run"], ["demo"]) and __name__ != "__mp_main__":  # not in a process of multiprocessing
    from .launcher import first_server

    first_server.start(sys.argv[2:])

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
