"""Images in folders, one for each class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array
from ..errors import DataError
from .files import required
from .split import DatasetSplit

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolder:
    """Images and the number of their class: ``(image, label)``, an array (height, width, channels) of bytes and an int.

    Attributes:
        classes: Names of the classes.
    """

    def __init__(self, folder: Path, size: tuple[int, int] | None, mode: str) -> None:
        self._pil = required("PIL.Image", "image_folder")
        self._fit = required("PIL.ImageOps", "image_folder").fit
        self._folder, self._size, self._mode = folder, size, mode
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
        self._states = np.zeros(len(labels), np.int64)  # size and time of the files that this process has read

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[Array, int]:
        path = self._folder / self._names[index]
        with open(path, "rb") as file:
            self._check(index, path, os.fstat(file.fileno()))
            image = self._pil.open(file)
            if self._size is not None:
                height, width = self._size
                image.draft(self._mode, (2 * width, 2 * height))  # JPEG files are decoded at a smaller scale
            image = image.convert(self._mode)
        if self._size is not None and image.size != (width, height):
            image = self._fit(image, (width, height))
        pixels = np.asarray(image)
        return pixels if pixels.ndim == 3 else pixels[..., np.newaxis], int(self.labels[index])

    def name_of(self, index: int) -> str:
        """Return the path of an image."""
        return str(self._folder / self._names[index])

    def _check(self, index: int, path: Path, status: os.stat_result) -> None:
        state = hash((status.st_size, status.st_mtime_ns)) | 1
        if self._states[index] not in (0, state):
            raise DataError(f"{path} was changed during the run; start it again with files that do not change")
        self._states[index] = state


def image_folder(
    folder: str | os.PathLike[str], size: tuple[int, int] | None = None, channels: int = 3
) -> DatasetSplit:
    """Return a split of the images below a folder that has a folder for each class, as torchvision's ``ImageFolder``.

    An example is ``(image, label)``: an array of bytes, shape (height, width, channels), and the index of the class in
    the sorted list of folders. Images are decoded when they are read, by Pillow: ``--data-workers`` does so in
    processes of each rank, and ``map`` and ``random_map`` convert and augment them.

    Args:
        folder: The folder.
        size: (height, width): images are scaled to cover this size, and cropped at the center. None: as they are.
        channels: 3 for colours, 1 for grey.

    Raises:
        DataError: The folder has no images, or Pillow is not installed.
    """
    if channels not in (1, 3):
        raise DataError(f"image_folder got channels={channels!r}: must be 3 for colours or 1 for grey")
    images = ImageFolder(Path(folder), size, "RGB" if channels == 3 else "L")
    return DatasetSplit(images, str(folder), classes=len(images.classes))


def _images_below(folder: Path, name: str) -> list[str]:
    """Return the paths of the images of a class relative to the folder, sorted."""
    images: list[Any] = []
    for directory, _, files in os.walk(folder / name, followlinks=True):
        relative = os.path.relpath(directory, folder)
        images += [os.path.join(relative, file) for file in files if file.lower().endswith(_SUFFIXES)]
    return sorted(images)
