"""Each kind of source with the same examples: 40 triples of an index, three numbers that depend on it, and a label."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

from mpitrain import data

EXAMPLES = 40
LABELS = 3
Triple = tuple[int, np.ndarray, int]


def values_of(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 200, 3).astype(np.float32) / 200


def with_noise(example: Triple, rng: np.random.Generator) -> Triple:
    index, values, label = example
    return index, (values + 0.1 * rng.random(3)).astype(np.float32), label


def _triple(index: int) -> Triple:
    return index, values_of(index), index % LABELS


def _images(folder: Path) -> data.DatasetSplit:
    """Images of two pixels, which hold the three values and the index; the index is also the file's name."""
    if not folder.exists():
        for index in range(EXAMPLES):
            path = folder / str(index % LABELS) / f"{index:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.rint(200 * values_of(index)).astype(np.uint8)
            Image.fromarray(np.array([[pixels, [index] * 3]], np.uint8)).save(path)
    split = data.image_folder(folder)
    return split.map(lambda example: (int(example[0][0, 1, 0]), example[0][0, 0] / np.float32(200), example[1]))


def _table(folder: Path) -> Path:
    if not folder.exists():
        folder.mkdir(parents=True)
        columns: dict[str, Any] = {"index": range(EXAMPLES), "label": [i % LABELS for i in range(EXAMPLES)]}
        columns["values"] = [values_of(i) for i in range(EXAMPLES)]
        for place in range(3):
            columns[f"x{place}"] = [values_of(i)[place] for i in range(EXAMPLES)]
        pa.parquet.write_table(pa.table(columns), folder / "t.parquet", row_group_size=7)
    return folder / "t.parquet"


def _rows(folder: Path) -> data.DatasetSplit:
    split = data.parquet(_table(folder), ["index", "values", "label"])
    return split.map(lambda row: (row["index"], row["values"].astype(np.float32), row["label"]))


def _columns(folder: Path) -> data.DatasetSplit:
    split = data.parquet(_table(folder), ["index", "x0", "x1", "x2"], "label")
    return split.map(lambda example: (int(example[0][0]), example[0][1:].astype(np.float32), example[1]))


def _masked(content: bytes) -> bytes:
    value = google_crc32c.value(content)
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _records(folder: Path) -> data.DatasetSplit:
    if not folder.exists():
        folder.mkdir(parents=True)

        def field(number: int, content: bytes) -> bytes:
            return bytes([number << 3 | 2, len(content)]) + content

        def record(index: int) -> bytes:
            features = {
                b"index": field(3, field(1, bytes([index]))),
                b"label": field(3, field(1, bytes([index % LABELS]))),
                b"values": field(2, field(1, values_of(index).tobytes())),
            }
            message = field(1, b"".join(field(1, field(1, k) + field(2, v)) for k, v in features.items()))
            length = struct.pack("<Q", len(message))
            return length + _masked(length) + message + _masked(message)

        for part, indices in enumerate(np.array_split(range(EXAMPLES), 3)):
            (folder / f"{part}.tfrecord").write_bytes(b"".join(map(record, indices.tolist())))
    split = data.tfrecord(folder / "*.tfrecord")
    return split.map(lambda example: (int(example["index"][0]), example["values"], int(example["label"][0])))


def _tar(folder: Path) -> data.DatasetSplit:
    if not folder.exists():
        folder.mkdir(parents=True)
        for part, indices in enumerate(np.array_split(range(EXAMPLES), 3)):
            with tarfile.open(folder / f"{part}.tar", "w") as file:
                for index in indices.tolist():
                    array = io.BytesIO()
                    np.save(array, values_of(index))
                    for name, content in (("npy", array.getvalue()), ("cls", str(index % LABELS).encode())):
                        info = tarfile.TarInfo(f"{index:02d}.{name}")
                        info.size = len(content)
                        file.addfile(info, io.BytesIO(content))
    split = data.webdataset(folder / "*.tar")
    return split.map(lambda example: (int(example["__key__"]), example["npy"], example["cls"]))


def _hdf5(folder: Path) -> data.DatasetSplit:
    if not folder.exists():
        folder.mkdir(parents=True)
        with h5py.File(folder / "d.h5", "w") as file:
            file["images"] = np.array([[index, *values_of(index)] for index in range(EXAMPLES)], np.float32)
            file["labels"] = np.arange(EXAMPLES) % LABELS
    split = data.hdf5(folder / "d.h5")
    return split.map(lambda example: (int(example[0][0]), example[0][1:], example[1]))


def _windows(folder: Path) -> data.DatasetSplit:
    sequence = np.concatenate([np.array([index, *values_of(index)], np.float32) for index in range(EXAMPLES)])
    split = data.windows(sequence, 4, ahead=0)
    return split.map(lambda window: (int(window[0]), window[1:], int(window[0]) % LABELS))


def _arrays(folder: Path) -> data.DatasetSplit:
    examples = np.array([[index, *values_of(index)] for index in range(EXAMPLES)], np.float32)
    split = data.from_arrays(examples, np.arange(EXAMPLES) % LABELS)
    return split.map(lambda example: (int(example[0][0]), example[0][1:], example[1]))


class _Objects:
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Triple:
        return _triple(index)


KINDS: dict[str, Callable[[Path], data.DatasetSplit]] = {
    "images": _images,
    "rows": _rows,
    "columns": _columns,
    "records": _records,
    "tar": _tar,
    "hdf5": _hdf5,
    "windows": _windows,
    "arrays": _arrays,
    "objects": lambda folder: data.dataset(_Objects()),
}


def _grain(folder: Path) -> data.DatasetSplit:
    import grain

    return data.dataset(grain.MapDataset.source(range(EXAMPLES)).map(_triple))


def _hugging_face(folder: Path) -> data.DatasetSplit:
    import datasets

    rows = [
        {"index": index, "values": values.tolist(), "label": label}
        for index, values, label in map(_triple, range(EXAMPLES))
    ]
    split = data.dataset(datasets.Dataset.from_list(rows))
    return split.map(lambda row: (row["index"], np.array(row["values"], np.float32), row["label"]))


OF_OTHERS = {"grain": _grain, "hugging face": _hugging_face}  # of libraries that are not part of the test environment


def source(kind: str, folder: Path) -> data.DatasetSplit:
    """Return the examples as a source of this kind, with noise; the first call writes its files into the folder."""
    return {**KINDS, **OF_OTHERS}[kind](folder / kind).random_map(with_noise)


def all_kinds(folder: Path) -> Iterator[tuple[str, data.DatasetSplit]]:
    """Yield each kind of source, after its files have been written."""
    for kind in KINDS:
        yield kind, source(kind, folder)
