"""Data sets: where examples are, in which order they come, and batches of them."""

from .hdf5 import hdf5
from .loader import Loader, Resident, Storage, Streaming
from .mnist import Images, mnist
from .split import Split, check_labels, from_arrays

__all__ = [
    "Images",
    "Loader",
    "Resident",
    "Split",
    "Storage",
    "Streaming",
    "check_labels",
    "from_arrays",
    "hdf5",
    "mnist",
]
