"""Images in the file format of MNIST: four IDX files. MNIST, Fashion-MNIST, and the embedded digits."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np

from ..core.layout import Array, Shape
from ..errors import DataError
from . import idx
from .files import UnchangedFile, names_and_sizes
from .split import Split

_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_CLASSES = 10
_DIGITS_LARGEST = 16  # pixels of the embedded digits are counts of dots in 4 x 4 squares


class Images:
    """Labelled images for training and validation.

    Attributes:
        train, validation: Splits of images as flat vectors, shape (features,).
        features: Pixels of an image.
        image_shape: (height, width, channels), for ``nn.Reshape``.
        classes: Number of classes.
    """

    def __init__(self, train: IdxSplit, validation: IdxSplit) -> None:
        if train.image_shape != validation.image_shape:
            raise DataError(
                f"images of {train.source} have shape {train.image_shape}, "
                f"those of {validation.source} have {validation.image_shape}; shapes must match"
            )
        self.train: Split = train
        self.validation: Split = validation
        self.image_shape: Shape = train.image_shape
        (self.features,) = train.shape
        self.classes = _CLASSES


class IdxSplit(Split):
    """A file of images and a file of labels."""

    def __init__(self, images: Path, labels: Path, largest: int) -> None:
        count, height, width = idx.read_header(images, 3)
        (labelled,) = idx.read_header(labels, 1)
        if count != labelled:
            raise DataError(f"{images} has {count:,} images but {labels} has {labelled:,} labels; counts must match")
        super().__init__(
            str(labels), count, (height * width,), np.uint8, (), np.uint8, classes=_CLASSES, scale=1 / largest
        )
        self.image_shape = (height, width, 1)
        self._images, self._labels = UnchangedFile(images), UnchangedFile(labels)
        self.names_and_sizes = names_and_sizes([self._images, self._labels])

    def read(self, start: int, stop: int, examples: Array, labels: Array) -> None:
        for file in (self._images, self._labels):
            file.check()
        idx.read_into(self._images.path, start, stop, examples.reshape(stop - start, *self.image_shape[:2]))
        idx.read_into(self._labels.path, start, stop, labels)


def mnist(data_dir: Path | None = None) -> Images:
    """Return the images in a folder with the four files of MNIST; reads only the files' headers.

    The files are ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
    ``t10k-labels-idx1-ubyte``, each with or without ``.gz``. Pixels are scaled to [0, 1].

    Args:
        data_dir: The folder; None for UCI's handwritten digits (8 x 8), which are part of this package.

    Raises:
        DataError: A file is missing, or does not have the content that its name implies.
    """
    largest = 255
    if data_dir is None:
        data_dir, largest = Path(str(files(__package__) / "digits")), _DIGITS_LARGEST
    train_images, train_labels, images, labels = idx.find(Path(data_dir), _NAMES)
    return Images(IdxSplit(train_images, train_labels, largest), IdxSplit(images, labels, largest))
