"""Images in folders, one for each class, and in memory."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array
from ..errors import DataError
from .files import required
from .split import DatasetSplit

_MODES = {3: "RGB", 1: "L"}  # Pillow's modes, by the number of channels
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolder:
    """Images with their class's number: ``(image, label)``, an array (height, width, channels) of bytes and an int.

    Attributes:
        classes: Names of the classes.
    """

    def __init__(self, folder: Path, size: tuple[int, int] | None, channels: int) -> None:
        required("PIL.Image", "image_folder")
        self._folder, self._size, self._channels = folder, size, channels
        try:
            self.classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        except OSError as error:
            raise DataError(f"{folder}: {error.strerror}") from error
        if not self.classes:
            raise DataError(f"{folder} has no folders: must have one for each class, with its images")
        self._names: list[str] = []
        labels = []
        for label, name in enumerate(self.classes):
            images = _images_below(folder, name)
            if not images:
                raise DataError(f"{folder / name} has no images: must have files named {', '.join(_SUFFIXES)}")
            self._names += images
            labels += [label] * len(images)
        self.labels = np.array(labels)
        self._states = np.zeros(len(labels), np.int64)  # hashes of size and time of the files read by this process

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[Array, int]:
        path = self._folder / self._names[index]
        with open(path, "rb") as file:
            self._check(index, path, os.fstat(file.fileno()))
            image = decode_image(file.read(), self._channels, self._size)
        return image, int(self.labels[index])

    def name_of(self, index: int) -> str:
        """Return the path of an image."""
        return str(self._folder / self._names[index])

    def _check(self, index: int, path: Path, status: os.stat_result) -> None:
        state = hash((status.st_size, status.st_mtime_ns)) | 1
        if self._states[index] not in (0, state):
            raise DataError(f"{path} was changed during the run; start the run again with files that do not change")
        self._states[index] = state


def image_folder(
    folder: str | os.PathLike[str], size: tuple[int, int] | None = None, channels: int = 3
) -> DatasetSplit:
    """Return a split of the images below a folder that has a folder for each class, like torchvision's ``ImageFolder``.

    An example is ``(image, label)``. The image is an array of bytes, shape (height, width, channels). The label is the
    index of the class in the sorted list of folders, the split's ``class_names``. Images are decoded when they are
    read, with ``--data-workers`` in processes of each rank. Use ``map`` and ``random_map`` to convert and augment them.

    Args:
        folder: The folder.
        size: (height, width): images are scaled to cover this size, and cropped at the center. None keeps their size.
        channels: 3 for colours, 1 for grey.

    Raises:
        DataError: A folder has no images, ``channels`` is not valid, or Pillow is not installed.
    """
    _check_channels("image_folder", channels)
    images = ImageFolder(Path(folder), size, channels)
    split = DatasetSplit(images, str(folder), classes=len(images.classes))
    split.class_names = images.classes
    return split


def decode_image(content: bytes, channels: int = 3, size: tuple[int, int] | None = None) -> Array:
    """Return the pixels of an image file, shape (height, width, channels), uint8.

    If ``size`` is None, ``channels`` is 3, and simplejpeg is installed, simplejpeg decodes most JPEG files. The pixels
    are the same as Pillow's, in less than half of Pillow's time. Pillow decodes all other files.

    Args:
        content: The bytes of the file.
        channels: 3 for colours, 1 for grey.
        size: As for ``image_folder``: (height, width), or None for the file's own size.

    Raises:
        DataError: ``channels`` is not valid, or Pillow is not installed.
        OSError: The content is not an image, or is damaged.
    """
    _check_channels("decode_image", channels)
    if size is not None:
        return _scaled(content, channels, *size)
    if channels == 3 and (decoder := _jpeg_decoder()) is not None and decoder.is_jpeg(content):
        with contextlib.suppress(ValueError):  # Pillow decodes the file below, or describes what is wrong with it
            if decoder.decode_jpeg_header(content)[2] in ("Gray", "YCbCr"):
                return decoder.decode_jpeg(content)  # type: ignore[no-any-return]
    return _pixels(required("PIL.Image", "decode_image").open(io.BytesIO(content)).convert(_MODES[channels]))


@functools.cache
def _jpeg_decoder() -> Any:
    """Return the module simplejpeg; None if it is not installed."""
    try:
        return import_module("simplejpeg")
    except ImportError:
        return None


def _scaled(content: bytes, channels: int, height: int, width: int) -> Array:
    """Return an image that is scaled to cover this size, and cropped at the center."""
    image, mode = required("PIL.Image", "decode_image").open(io.BytesIO(content)), _MODES[channels]
    image.draft(mode, (2 * width, 2 * height))  # JPEG files are decoded at a smaller scale
    return _pixels(required("PIL.ImageOps", "decode_image").fit(image.convert(mode), (width, height)))


def _pixels(image: Any) -> Array:
    pixels = np.array(image)  # a copy: torch warns of arrays that cannot be written
    return pixels if pixels.ndim == 3 else pixels[..., np.newaxis]


def _check_channels(function: str, channels: int) -> None:
    if channels not in _MODES:
        raise DataError(f"{function} got channels={channels!r}: must be 3 for colours or 1 for grey")


def _images_below(folder: Path, name: str) -> list[str]:
    """Return the paths of the images of a class relative to the folder, sorted."""
    images: list[Any] = []
    for directory, _, files in os.walk(folder / name, followlinks=True):
        relative = os.path.relpath(directory, folder)
        images += [os.path.join(relative, file) for file in files if file.lower().endswith(_SUFFIXES)]
    return sorted(images)
