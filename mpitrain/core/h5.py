"""The one place that imports h5py. Built with parallel HDF5 it imports MPI, which is not to start then and there."""

import mpi4py

_before = mpi4py.rc.initialize, mpi4py.rc.finalize
mpi4py.rc.initialize, mpi4py.rc.finalize = False, True

import h5py  # noqa: E402

mpi4py.rc.initialize, mpi4py.rc.finalize = _before  # somebody else's import of MPI is as they want it

__all__ = ["h5py"]
