"""Reads the structure of a checkpoint, and the values stored in the structure, without the HDF5 library.

This package reads files of earlier versions, whose manifest does not describe the arrays, and compressed files.
``verify`` also uses it, to compare the arrays that other programs read from a file with its manifest. Using the HDF5
library in a child process with limits would need less code, but would be less safe. A crafted file that makes the
library overwrite memory could still use the network and the user's files. Also, ranks of some MPI libraries must not
start processes.
"""

from __future__ import annotations

from .parser import parse
from .values import stored_values

__all__ = ["parse", "stored_values"]
