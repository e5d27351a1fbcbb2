"""Images written by Pillow, HDF5 files of h5py, and IDX files."""

from __future__ import annotations

import gzip
import io
import os
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image, ImageOps

from mpitrain import data

from .tables import Rng, pick
from .values import Case

MODES = {
    "PNG": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "PA"],
    "JPEG": ["L", "RGB", "CMYK", "1"],
    "GIF": ["1", "L", "P", "RGB", "RGBA"],
    "BMP": ["1", "L", "P", "RGB", "RGBA"],
    "TIFF": ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I;16B", "LAB", "I", "F"],
    "WEBP": ["L", "P", "RGB", "RGBA"],
    "PPM": ["1", "L", "RGB", "I;16"],
    "JPEG2000": ["L", "LA", "RGB", "RGBA", "YCbCr", "I;16"],
    "AVIF": ["L", "RGB", "RGBA"],
}
ANIMATED = ("GIF", "WEBP", "PNG", "TIFF")  # Pillow crashes when it writes an animated AVIF file
SUFFIX = {"JPEG": ".jpg", "JPEG2000": ".jp2"}
ORIENTATION = 0x0112


def _pixels(rng: Rng, mode: str, size: tuple[int, int]) -> Any:
    """Return an image of random pixels in a mode."""
    if mode in ("I;16", "I;16B", "I"):
        pixels = rng.integers(0, 65536, size[::-1])
        if mode == "I":
            return Image.fromarray(pixels.astype(np.int32))
        image = Image.fromarray(pixels.astype(np.uint16))
        return image if mode == "I;16" else Image.frombytes("I;16B", size, pixels.astype(">u2").tobytes())
    if mode == "F":
        return Image.fromarray(rng.random(size[::-1], np.float32))
    image = Image.fromarray(rng.integers(0, 256, (*size[::-1], 4)).astype(np.uint8), "RGBA")
    if mode in ("P", "PA"):
        return image.convert("RGB").quantize(int(pick(rng, [2, 16, 200]))).convert(mode)
    if mode == "LAB":
        return Image.frombytes("LAB", size, rng.bytes(3 * size[0] * size[1]))
    return image.convert("RGB").convert(mode) if mode in ("CMYK", "YCbCr") else image.convert(mode)


def _options(rng: Rng, form: str, mode: str) -> dict[str, Any]:
    """Return options with which Pillow writes a file of a format."""
    options: dict[str, Any] = {}
    if form == "JPEG":
        options |= {"progressive": bool(rng.integers(2)), "quality": int(pick(rng, [10, 75, 100]))}
        options |= {"subsampling": int(rng.integers(3))} if mode == "RGB" else {}
    if form == "PNG":
        options |= {"compress_level": int(rng.integers(10)), "dpi": (72, 72)}
        clear = {"P": bytes([0, 128]), "L": 3, "RGB": (1, 2, 3)}
        options |= {"transparency": clear[mode]} if mode in clear and rng.random() < 0.3 else {}
    if form == "TIFF":
        options |= {"compression": pick(rng, [None, "tiff_lzw", "tiff_adobe_deflate", "packbits"])}
    if form == "GIF" and mode == "P" and rng.random() < 0.3:
        options |= {"transparency": 0}
    if form in ("WEBP", "AVIF") and rng.random() < 0.5:
        options |= {"lossless": True} if form == "WEBP" else {"quality": 100}
    return options


def _image(rng: Rng) -> tuple[bytes, str, str]:
    """Return an image file, its format, and its mode."""
    form = pick(rng, list(MODES))
    mode = pick(rng, MODES[form])
    size = (int(rng.integers(1, 40)), int(rng.integers(1, 40)))
    image, options, file = _pixels(rng, mode, size), _options(rng, form, mode), io.BytesIO()
    if form in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF") and rng.random() < 0.4:
        exif = Image.Exif()
        exif[ORIENTATION] = int(rng.integers(0, 10))
        options["exif"] = exif.tobytes()
    if form in ANIMATED and rng.random() < 0.15:
        options |= {"save_all": True, "append_images": [_pixels(rng, mode, size) for _ in range(2)]}
    if mode == "PA" and form == "PNG":
        image = image.convert("P")
    try:
        image.save(file, form, **options)
    except (OSError, RuntimeError, ValueError):  # Pillow does not support these options together
        file = io.BytesIO()
        options = {}
        image.save(file, form)
    shown = {name: value for name, value in options.items() if name != "append_images"}
    return file.getvalue(), form, f"{form} {mode} {size} {shown}"


def _eight_bits(content: bytes, mode: str) -> Any:
    """Return the image as Pillow reads and turns it, scaled to bytes if it has 16 bits."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    if image.mode.startswith("I"):
        image = Image.fromarray(np.rint(np.asarray(image).astype(np.float64) / 257).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(mode)


def _expected(content: bytes, channels: int) -> Any:
    try:
        pixels = np.array(_eight_bits(content, "RGB" if channels == 3 else "L"))
    except ValueError as error:  # Pillow does not convert it either
        return str(error)
    return pixels if channels == 3 else pixels[..., None]


def images(rng: Rng, folder: Path) -> Case:
    """Return one image, for ``decode_image``, which may raise two more errors."""
    content, form, about = _image(rng)
    channels, path = int(pick(rng, [3, 3, 1])), folder / "image"
    path.write_bytes(content)
    expected = _expected(content, channels)

    def is_protected(way: str, start: int, stop: int) -> bool:
        return form == "PNG" and way in ("flip", "flips") and stop < len(content) - 12

    return Case(
        [path],
        lambda: data.decode_image(path.read_bytes(), channels),
        expected,
        f"{about}, {channels} channels",
        (OSError, ValueError),
        is_protected,
    )


def folders(rng: Rng, folder: Path) -> Case:
    """Return folders of images, with hidden files, names that are not UTF-8, upper case, and links."""
    root = folder / "data"
    classes = sorted({pick(rng, ["a", "B", "c d", "é", "10", "9", "z\udce9"]) for _ in range(3)})
    paths, expected = [], []
    size = pick(rng, [None, None, (8, 12)])
    for label, name in enumerate(classes):
        below = [pick(rng, ["", "sub/", "sub/deep/"]) for _ in range(int(rng.integers(1, 4)))]
        made = []
        for number, part in enumerate(below):
            image = Image.fromarray(rng.integers(0, 256, (9 + number, 14, 3)).astype(np.uint8))
            stem, suffix = pick(rng, ["x", "é", "a b", "q\udce9"]), pick(rng, [".png", ".PNG", ".bmp"])
            path = root / name / f"{part}{stem}{number}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, path.suffix[1:].lower())
            made.append((str(path.relative_to(root)), image))
        stray = root / name / pick(rng, ["._x.png", "notes.txt", ".DS_Store", "Thumbs.db"])
        stray.write_bytes(b"no image")
        if rng.random() < 0.2:
            os.symlink("nowhere.png", root / name / "broken.png")
        for relative, image in sorted(made, key=lambda pair: pair[0]):
            paths.append(root / relative)
            shown = image if size is None else ImageOps.fit(image, size[::-1])
            expected.append((np.array(shown), label))

    def read() -> Any:
        split = data.image_folder(root, size=size)
        return [split.class_names, *(split.dataset[i] for i in range(len(split)))]

    def is_protected(way: str, start: int, stop: int) -> bool:
        return paths[0].suffix.lower() == ".png" and way in ("flip", "flips") and stop < paths[0].stat().st_size - 12

    refusals = (OSError, ValueError)  # the split names the file in a DataError
    return Case(paths, read, [classes, *expected], f"{classes}, size {size}", refusals, is_protected)


def _hdf5_array(rng: Rng, shape: tuple[int, ...]) -> Any:
    kind = pick(rng, "u1 i1 u2 i2 u4 i4 u8 i8 f4 f8 >f4 >i4 >u2 >f8 bool f4 u1".split())
    return rng.integers(0, 2 if kind == "bool" else 100, shape).astype(kind)


def _layout(rng: Rng, shape: tuple[int, ...], kind: Any) -> dict[str, Any]:
    """Return options of a dataset."""
    if rng.random() < 0.3:
        return {}
    options: dict[str, Any] = {"chunks": pick(rng, [True, tuple(max(1, length // 2) for length in shape)])}
    options |= {"compression": pick(rng, [None, "gzip", "lzf"]), "shuffle": bool(rng.integers(2))}
    options |= {"fletcher32": bool(rng.integers(2)), "maxshape": pick(rng, [None, (None, *shape[1:])])}
    if np.dtype(kind).kind in "iu" and rng.random() < 0.1 and np.dtype(kind).isnative:
        return {"chunks": True, "scaleoffset": 0}
    return options


def _virtual(file: h5py.File, folder: Path, name: str, array: Any) -> None:
    """Write a dataset in two other files, and one that is composed of them."""
    half = len(array) // 2
    layout = h5py.VirtualLayout(array.shape, array.dtype)
    for number, part in enumerate((array[:half], array[half:])):
        source = folder / f"{name.replace('/', '-')}-{number}.h5"
        with h5py.File(source, "w") as other:
            other["part"] = part
        start = number * half
        layout[start : start + len(part)] = h5py.VirtualSource(source.name, "part", part.shape)
    file.create_virtual_dataset(name, layout)


def hdf5(rng: Rng, folder: Path) -> Case:
    """Return a file with examples and labels, in one of the layouts of each."""
    count, path, names, about = int(pick(rng, [2, 5, 40])), folder / "a b.h5", [], []
    arrays = [_hdf5_array(rng, (count, *pick(rng, [(), (3,), (4, 2), (2, 3, 3)]))), _hdf5_array(rng, (count,))]
    libver = pick(rng, ["earliest", "latest"])
    with h5py.File(path, "w", libver=libver) as file:
        for name, array in zip(["images", "labels"], arrays, strict=True):
            where = pick(rng, ["", "", "soft", "external", "virtual", "raw"])
            own = pick(rng, ["", "group/"]) + name
            names.append(own)
            options = _layout(rng, array.shape, array.dtype) if where not in ("virtual", "raw") else {}
            if where == "virtual":
                _virtual(file, folder, own, array)
            elif where == "raw":
                raw = [(str(folder / f"{name}.raw"), 0, h5py.h5f.UNLIMITED)]
                file.create_dataset(own, array.shape, array.dtype, external=raw)[...] = array
            elif where == "external":
                with h5py.File(folder / f"{name}.h5", "w", libver=libver) as other:
                    other.create_dataset("x", data=array, **options)
                file[own] = h5py.ExternalLink(f"{name}.h5", "x")
            elif where == "soft":
                file.create_dataset(f"hidden/{name}", data=array, **options)
                file[own] = h5py.SoftLink(f"/hidden/{name}")
            else:
                file.create_dataset(own, data=array, **options)
            about.append(f"{array.dtype}{array.shape} {where} {options}")

    def read() -> Any:
        split = data.hdf5(path, *names)
        part, batch = split.read_batch(1, len(split)), split.read_batch(0, len(split))
        if part.examples.tobytes() != batch.examples[1:].tobytes():
            return "a part differs from the whole"
        return [batch.examples, batch.labels]

    chunks = [chunk for name in names for chunk in _checked_chunks(path, name)]

    def is_protected(way: str, start: int, stop: int) -> bool:
        return way in ("flip", "flips", "zeros") and any(first <= start and stop <= last for first, last in chunks)

    expected = [array.astype(array.dtype.newbyteorder("=")) for array in arrays]
    return Case([path], read, expected, f"{libver}: {'; '.join(about)}", is_protected=is_protected)


def _checked_chunks(path: Path, name: str) -> list[tuple[int, int]]:
    """Return where the chunks with checksums of a dataset of this file start and end."""
    with h5py.File(path) as file:
        dataset = file[name]
        if dataset.file.filename != file.filename or not dataset.fletcher32:
            return []
        infos = [dataset.id.get_chunk_info(number) for number in range(dataset.id.get_num_chunks())]
        return [(info.byte_offset, info.byte_offset + info.size) for info in infos if not info.filter_mask]


def idx(rng: Rng, folder: Path) -> Case:
    """Return a folder with the four files of MNIST."""
    height, width = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    paths, expected = [], []
    for part in ("train", "t10k"):
        count = int(rng.integers(1, 12))
        pixels = rng.integers(0, 256, (count, height, width)).astype(np.uint8)
        labels = rng.integers(0, 10, count).astype(np.uint8)
        for name, array in ((f"{part}-images-idx3-ubyte", pixels), (f"{part}-labels-idx1-ubyte", labels)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            packed = rng.random() < 0.5
            content = header + array.tobytes()
            path = folder / (name + ".gz" * packed)
            path.write_bytes(gzip.compress(content) if packed else content)
            paths.append(path)
        expected += [pixels.reshape(count, -1), labels]

    def read() -> Any:
        both = data.mnist(folder)
        batches = [split.read_batch(0, len(split)) for split in (both.train, both.validation)]
        return [array for batch in batches for array in (batch.examples, batch.labels)]

    def is_protected(way: str, start: int, stop: int) -> bool:
        return paths[0].suffix == ".gz" or way in ("cut", "twice", "inserted")

    rng.shuffle(paths)
    return Case(paths, read, expected, f"{height} x {width}", is_protected=is_protected)
