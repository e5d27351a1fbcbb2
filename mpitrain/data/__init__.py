"""Data sets: storage of examples, their order, and batches."""

from ..core.renamed import warn
from .batch import Batch, BatchSource
from .hdf5 import hdf5
from .loader import InMemory, Loader, Storage, Streaming
from .mnist import Images, mnist
from .split import Split, check_labels, from_arrays
from .text import sample_text

__all__ = [
    "Batch",
    "BatchSource",
    "Images",
    "InMemory",
    "Loader",
    "Split",
    "Storage",
    "Streaming",
    "check_labels",
    "from_arrays",
    "hdf5",
    "mnist",
    "sample_text",
]


def __getattr__(name: str) -> object:
    if name == "Resident":
        warn("mpitrain.data.Resident", "InMemory")
        return InMemory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
