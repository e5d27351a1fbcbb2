"""Images in folders, one for each class, and in memory."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Iterator, Set
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array
from ..core.words import one_line
from ..errors import DataError
from .files import foreign, left_out, required, starts_of
from .split import DatasetSplit

_MODES = {3: "RGB", 1: "L"}  # Pillow's modes, by the number of channels
SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .apng .bmp .gif .ppm .pgm .pbm .pnm .tif .tiff .webp .jp2 .avif".split()
)
_SIZES = 64  # number of images whose sizes are compared when a run is resumed: each needs a request to the file system
_NO_CLASSES = "__MACOSX"  # what macOS adds to archives
_ORIENTATION, _BITS, _WHITE_IS_ZERO, _SAMPLE_FORMAT = 0x0112, 258, 262, 339  # tags of EXIF and TIFF
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # from orientations of EXIF to ``PIL.Image.Transpose``


class ImageFolder:
    """Images with their class's number: ``(image, label)``, an array (height, width, channels) of bytes and an int.

    Hidden files and folders, broken links and files of other kinds are left out. A link to a folder that contains it is
    not followed.

    Attributes:
        classes: Names of the classes.
        starts: Index of the first image of each class.
        others: The paths of what is left out, relative to the folder.
        names_and_sizes: See ``files.names_and_sizes``.
    """

    def __init__(self, folder: Path, size: tuple[int, int] | None, channels: int) -> None:
        required("PIL.Image", "image_folder")
        self._folder, self._size, self._channels = folder, size, channels
        self.others: list[str] = []
        try:
            classes = sorted(self._visible(folder), key=lambda entry: entry.name)
            self.others += [entry.name for entry in classes if not entry.is_dir()]
            folders = [entry for entry in classes if entry.is_dir()]
            self.classes = [entry.name for entry in folders]
            if not self.classes:
                raise DataError(f"{folder} has no folders: must have one for each class, with its images")
            above = {_inode(path) for path in (folder.resolve(), *folder.resolve().parents)}
            images = [sorted(self._below(entry, above)) for entry in folders]
        except OSError as error:
            raise DataError(f"{error.filename or folder}: {error.strerror}") from error
        for name, own in zip(self.classes, images, strict=True):
            if not own:
                others = {os.path.splitext(other)[1] for other in self.others if other.startswith(f"{name}/")} - {""}
                what = f", but {' '.join(sorted(others)[:4])}: convert them" if others else ""
                raise DataError(
                    f"{folder / name} has no images{what}; must have files named {' '.join(sorted(SUFFIXES))}"
                )
        self._names = [name for own in images for name in own]
        self.labels = np.repeat(np.arange(len(images)), [len(own) for own in images])
        self.starts, _ = starts_of(map(len, images))
        some = self._names[:: max(1, len(self._names) // _SIZES)]
        sizes = [os.stat(folder / name).st_size for name in some]
        self.names_and_sizes = os.fsencode("\0".join(self._names) + repr(sizes))
        self._states = np.zeros(len(self._names), np.int64)  # hashes of size and time of the files read by this process

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

    def _visible(self, folder: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name == _NO_CLASSES:
                    self.others.append(self._relative(entry))
                else:
                    yield entry

    def _relative(self, entry: os.DirEntry[str]) -> str:
        return entry.path[len(os.path.join(self._folder, "")) :]

    def _below(self, folder: os.DirEntry[str], above: Set[tuple[int, int]]) -> Iterator[str]:
        """Yield the paths of the images in a folder, relative to that of the classes.

        Args:
            above: The folders that contain this one.
        """
        own = _inode(folder)
        if own in above:
            return
        for entry in self._visible(folder):
            relative = self._relative(entry)
            if entry.is_dir():
                yield from self._below(entry, above | {own})
            elif os.path.splitext(entry.name)[1].lower() in SUFFIXES and entry.is_file() and _can_read(entry):
                yield relative
            else:
                self.others.append(relative)

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
    read, with ``--data-workers`` in processes of each rank; see ``decode_image``. Use ``map`` and ``random_map`` to
    convert and augment them. What is left out is counted in a notice.

    Args:
        folder: The folder.
        size: (height, width): images are scaled to cover this size, and cropped at the center. None keeps their size.
        channels: 3 for colours, 1 for grey.

    Raises:
        DataError: A folder has no images, ``channels`` is not valid, or Pillow is not installed.
    """
    _check("image_folder", channels, size)
    images = ImageFolder(Path(folder), size, channels)
    split = DatasetSplit(images, str(folder), classes=len(images.classes))
    split.class_names = images.classes
    split.note = left_out(str(folder), "file", images.others)
    if len(images.classes) == 1:
        split.note = f"{folder} has one class, {images.classes[0]!r}{'' if split.note is None else f'; {split.note}'}"
    return split


def _can_read(path: os.PathLike[str]) -> bool:
    return os.access(path, os.R_OK, effective_ids=True)


def _inode(path: os.PathLike[str]) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def decode_image(content: bytes, channels: int = 3, size: tuple[int, int] | None = None) -> Array:
    """Return the pixels of an image file, shape (height, width, channels), uint8.

    The orientation in the file's EXIF data is applied. Palettes and CMYK become colours, transparency is dropped, and
    of several pages or frames the first is decoded. Pixels of more than 8 bits are scaled from the range of the file's
    format to bytes.

    If ``size`` is None, ``channels`` is 3, and simplejpeg is installed, simplejpeg decodes most JPEG files. The pixels
    are the same as Pillow's, in less than half of Pillow's time. Pillow decodes all other files.

    Args:
        content: The bytes of the file.
        channels: 3 for colours, 1 for grey.
        size: As for ``image_folder``: (height, width), or None for the file's own size.

    Raises:
        DataError: ``channels`` is not valid, or Pillow is not installed.
        OSError: The content is not an image, or is damaged.
        ValueError: The pixels have no defined range, as in a TIFF file of floating-point numbers.
    """
    _check("decode_image", channels, size)
    turned = (b"Exif\0\0" in content or b"tiff:Orientation" in content) and _orientation(_opened(content)) != 1
    decoder = _jpeg_decoder() if size is None and channels == 3 and not turned else None
    if decoder is not None and decoder.is_jpeg(content):
        with contextlib.suppress(ValueError):  # Pillow decodes the file below, or describes what is wrong with it
            if decoder.decode_jpeg_header(content)[2] in ("Gray", "YCbCr"):
                return decoder.decode_jpeg(content)  # type: ignore[no-any-return]
    image, mode = _opened(content), _MODES[channels]
    with _damage():
        if image.format == "PNG":  # reading the orientation would decode it, and hide an error
            image.verify()  # the checksums, which decoding does not read
            image = _opened(content)
        if size is not None and image.format in ("JPEG", "MPO"):
            height, width = size if _orientation(image) <= 4 else size[::-1]
            image.draft(mode, (2 * width, 2 * height))  # JPEG files are decoded at a smaller scale
        image.load()
    turn = _TURNS.get(_orientation(image))  # Pillow turns TIFF files when it loads them, and removes the tag
    image = _converted(image, mode)
    image = image if turn is None else image.transpose(turn)
    if size is not None:
        image = required("PIL.ImageOps", "decode_image").fit(image, size[::-1])
    pixels = np.array(image)  # a copy: torch warns of arrays that cannot be written
    return pixels if pixels.ndim == 3 else pixels[..., np.newaxis]


def _opened(content: bytes) -> Any:
    """Return the image, of which only the header has been read."""
    image = required("PIL.Image", "decode_image")
    try:
        with _damage():
            return image.open(io.BytesIO(content))
    except image.UnidentifiedImageError as error:
        raise OSError(f"the content {foreign(content) or 'is not an image that Pillow reads'}") from error


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Convert errors of damaged images, for which Pillow has many types, to ``OSError``."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"the image is damaged: {one_line(error)}") from error


def _orientation(image: Any) -> int:
    """Return how the image is rotated or mirrored by its EXIF or XMP data; 1 if it is not."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged EXIF data is ignored: Pillow raises errors of many types
        return 1


def _converted(image: Any, mode: str) -> Any:
    """Return an image with 8 bits per channel in a mode of Pillow.

    Raises:
        ValueError: The range of the pixels is not defined.
    """
    tags = getattr(image, "tag_v2", None)  # of a TIFF file
    if image.mode[0] == "F" or (tags is not None and not set(tags.get(_SAMPLE_FORMAT, (1,))) <= {1, 4}):
        raise ValueError("the pixels are floating-point or signed numbers, whose range is not defined")
    if image.mode[0] == "I":
        if tags is not None:
            bits = max(tags.get(_BITS, (1,)))
        elif image.format in ("PNG", "PPM", "JPEG2000"):  # Pillow scales the last two to 16 bits
            bits = 16
        else:
            raise ValueError(f"{image.format} files with more than 8 bits per pixel are not supported")
        pixels = np.asarray(image)
        pixels = (pixels.view(np.uint32) if pixels.dtype == np.int32 else pixels) * (255 / (2**bits - 1))
        if tags is not None and tags.get(_WHITE_IS_ZERO) == 0:
            pixels = 255 - pixels
        image = required("PIL.Image", "decode_image").fromarray(np.rint(pixels).astype(np.uint8))
    if image.mode in ("P", "PA") and "transparency" in image.info:  # Pillow warns of a direct conversion
        image = image.convert("RGBA")
    return image.convert(mode)


@functools.cache
def _jpeg_decoder() -> Any:
    """Return the module simplejpeg; None if it is not installed."""
    try:
        return import_module("simplejpeg")
    except ImportError:
        return None


def _check(function: str, channels: int, size: tuple[int, int] | None) -> None:
    if channels not in _MODES:
        raise DataError(f"{function} got channels={channels!r}: must be 3 for colours or 1 for grey")
    if size is not None and not (isinstance(size, (tuple, list)) and len(size) == 2 and min(size) > 0):
        raise DataError(f"{function} got size={size!r}: must be (height, width), at least 1, or None")
