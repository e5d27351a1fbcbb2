"""Data sets: storage of examples, their order, and batches."""

from . import orders
from .arrays import from_arrays
from .batch import Batch, BatchSource
from .checks import check_labels
from .hdf5 import hdf5
from .images import decode_image, image_folder
from .loader import InMemory, Loader, Storage, Streaming
from .mnist import Images, mnist
from .split import DatasetSplit, Split, dataset
from .streams import stream
from .tables import arrow, csv, parquet
from .text import sample_text
from .tfrecords import tfrecord
from .webdataset import webdataset
from .windows import windows

__all__ = [
    "Batch",
    "BatchSource",
    "DatasetSplit",
    "Images",
    "InMemory",
    "Loader",
    "Split",
    "Storage",
    "Streaming",
    "arrow",
    "check_labels",
    "csv",
    "dataset",
    "decode_image",
    "from_arrays",
    "hdf5",
    "image_folder",
    "mnist",
    "orders",
    "parquet",
    "sample_text",
    "stream",
    "tfrecord",
    "webdataset",
    "windows",
]
