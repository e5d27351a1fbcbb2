"""The only module that imports h5py. With parallel HDF5 h5py imports MPI, which must not start at that moment."""

import mpi4py

_before = mpi4py.rc.initialize, mpi4py.rc.finalize
mpi4py.rc.initialize, mpi4py.rc.finalize = False, True

import h5py  # noqa: E402

mpi4py.rc.initialize, mpi4py.rc.finalize = _before  # restore the settings for other imports of MPI

__all__ = ["h5py"]
