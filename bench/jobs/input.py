"""Input pipelines of mpitrain, for ``bench/input.py``: prints a JSON object with examples per second, or memory."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

from mpitrain import Job, data, nn, optim
from mpitrain.data.batch import Loading

IMAGES, CLASSES, SIZE, CROP, BATCH = 2000, 10, 256, 224, 32
ROWS, COLUMNS, ROW_BATCH = 200_000, 20, 256
SMALL = 64  # width and height of the images in training


def write(folder: Path) -> None:
    """Write all files: images in folders, a Parquet file, and TFRecord files."""
    rng = np.random.default_rng(0)
    with open(folder / "images.tfrecord", "wb") as records:
        for index in range(IMAGES):
            pixels = np.kron(rng.integers(0, 256, (32, 32, 3)), np.ones((8, 8, 1))).astype(np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG", quality=90)
            path = folder / "images" / str(index % CLASSES) / f"{index:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.getvalue())
            records.write(_record({"image": file.getvalue(), "label": [index % CLASSES]}))
    columns: dict[str, Any] = {f"x{i}": rng.random(ROWS, np.float32) for i in range(COLUMNS)}
    pa.parquet.write_table(pa.table({**columns, "label": rng.integers(0, 2, ROWS)}), folder / "table.parquet")
    with open(folder / "numbers.tfrecord", "wb") as records:
        for _ in range(ROWS // 10):
            records.write(_record({"x": rng.random(COLUMNS, np.float32), "label": [1]}))


def _record(features: dict[str, Any]) -> bytes:
    """Return a record of a TFRecord file with a tf.train.Example: bytes, integers below 128, or float32 numbers."""
    entries = []
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = _field(1, _field(1, value))
        elif isinstance(value, list):
            feature = _field(3, _field(1, bytes(value)))
        else:
            feature = _field(2, _field(1, value.tobytes()))
        entries.append(_field(1, _field(1, name.encode()) + _field(2, feature)))
    content = _field(1, b"".join(entries))
    length = struct.pack("<Q", len(content))
    return b"".join((length, _masked(length), content, _masked(content)))


def _field(number: int, content: bytes) -> bytes:
    """Return a field of a protocol buffer."""
    size, rest = bytearray(), len(content)
    while rest > 127:
        size.append(rest & 127 | 128)
        rest >>= 7
    return bytes([number << 3 | 2, *size, rest]) + content


def _masked(content: bytes) -> bytes:
    value = google_crc32c.value(content)
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def augmented(example: tuple[np.ndarray, int], rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Crop, mirror and scale an image; channels first."""
    image, label = example
    top, left = rng.integers(0, SIZE - CROP + 1, 2)
    image = image[top : top + CROP, left : left + CROP]
    scaled = np.multiply(image.transpose(2, 0, 1), np.float32(1 / 255), dtype=np.float32)
    return scaled[..., ::-1] if rng.random() < 0.5 else scaled, label


def decoded(example: dict[str, Any]) -> tuple[np.ndarray, int]:
    return data.decode_image(example["image"]), int(example["label"][0])


def cpu_seconds() -> float:
    """Return the CPU time of this process and its child processes in seconds."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in ("self", *children)]
    return sum(int(number) for field in fields for number in field[11:13]) / os.sysconf("SC_CLK_TCK")


def rate(split: data.Split, batch: int, seconds: float = 4.0) -> dict[str, float]:
    """Load batches with two processes; return examples/s and microseconds of CPU time per example, after 4 batches."""
    loader = split.own_loader(0, Loading(2, 2))
    assert loader is not None
    for step in range(4):
        loader.batch(step * batch, batch)
    began, cpu_began, loaded = time.perf_counter(), cpu_seconds(), 0
    while time.perf_counter() - began < seconds:
        loader.batch(4 * batch + loaded, batch)
        loaded += batch
    figures = {"rate": loaded / (time.perf_counter() - began), "cpu_us": (cpu_seconds() - cpu_began) / loaded * 1e6}
    loader.close()
    return figures


def parquet(folder: Path) -> dict[str, float]:
    from mpitrain.data import InMemory, Loader

    split = data.parquet(folder / "table.parquet", label="label")
    whole = split.read_batch(0, len(split))
    loader = Loader(split, InMemory(whole.examples, whole.labels), 0, np.float32)
    began, loaded = time.perf_counter(), 0
    while time.perf_counter() - began < 2:
        loader.batch(loaded, ROW_BATCH)
        loaded += ROW_BATCH
    return {"rate": loaded / (time.perf_counter() - began)}


def small(example: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
    image, label = example
    if _rank is not None and os.getpid() != _rank and os.sched_getaffinity(0) != {1}:  # the data worker's first example
        os.sched_setaffinity(0, {1})
    return np.float32(image) / 255, label


_rank: int | None = None  # the process that trains, on the first core


def job(folder: Path, units: int, in_memory: bool = False, steps: int = 60) -> Job:
    """Train on images that are decoded at each step, or that were decoded before."""
    global _rank
    _rank = os.getpid()
    os.sched_setaffinity(0, {0})
    train: Any = data.image_folder(folder / "images", (SMALL, SMALL)).map(small)
    if in_memory:
        whole = train.load(np.arange(len(train)), 0, 0).examples
        train = data.from_arrays(*whole, CLASSES)
    features = SMALL * SMALL * 3
    model = nn.Sequential(nn.Flatten(), nn.Dense(features, units), nn.ReLU(), nn.Dense(units, CLASSES))
    return Job(model, nn.SoftmaxCrossEntropy(), optim.sgd(0.001), train, batch_size=BATCH, train_steps=steps)


def training(folder: Path, in_memory: bool) -> dict[str, float]:
    """Train on one rank, on the first core; the data worker has the second core."""
    with tempfile.TemporaryDirectory() as out:
        words = ["-m", "mpitrain", "train", "--threads", "1", "--run-dir", f"{out}/run", "--log-steps", "10"]
        words += ["--data-workers", "0" if in_memory else "1", __file__, "--folder", str(folder), "--units", "1500"]
        words += ["--in-memory"] if in_memory else []
        subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
        lines = [json.loads(line) for line in Path(out, "run", "metrics.jsonl").read_text().splitlines()]
        rates = [line["examples_per_s"] for line in lines if "examples_per_s" in line]
        return {"rate": float(np.median(rates[2:]))}


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def memory(folder: Path) -> dict[str, float]:
    """Return in MiB: the increase of the total PSS while two processes load, its limit, and the size of a batch."""
    before = _pss(os.getpid())
    split = data.image_folder(folder / "images").random_map(augmented)
    loader = split.own_loader(0, Loading(2, 2))
    assert loader is not None
    most = 0.0
    for step in range(60):
        batch = loader.batch(step * BATCH, BATCH)
        most = max(most, sum(map(_pss, [os.getpid(), *_children(os.getpid())])))
    nbytes = sum(array.nbytes for array in batch.examples)
    loader.close()
    return {"MiB": most - before, "batch_MiB": nbytes / 2**20, "limit_MiB": (2 * 2 + 2) * nbytes / 2**20 + 200}


def _pss(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


class Decoding:
    """The images as a torch dataset."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted((folder / "images").rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import torch

        with Image.open(self._paths[index]) as image:
            pixels = np.asarray(image.convert("RGB"))
        top, left = torch.randint(0, SIZE - CROP + 1, (2,)).tolist()
        pixels = pixels[top : top + CROP, left : left + CROP]
        if torch.rand(()) < 0.5:
            pixels = pixels[:, ::-1]
        scaled = np.multiply(pixels.transpose(2, 0, 1), np.float32(1 / 255), dtype=np.float32)
        return torch.from_numpy(scaled), index % CLASSES


def of_torch(folder: Path) -> data.Split:
    from mpitrain.pytorch.batches import as_split

    split: data.Split = as_split(Decoding(folder))
    return split


PROGRAMS: dict[str, Any] = {
    "ours-images": lambda folder: rate(data.image_folder(folder / "images").random_map(augmented), BATCH),
    "ours-dataset": lambda folder: rate(of_torch(folder), BATCH),
    "ours-parquet": parquet,
    "ours-records": lambda folder: rate(
        data.tfrecord(folder / "images.tfrecord").map(decoded).random_map(augmented), BATCH
    ),
    "ours-numbers": lambda folder: rate(data.tfrecord(folder / "numbers.tfrecord"), ROW_BATCH),
    "ours-training": lambda folder: training(folder, in_memory=False),
    "ours-arrays": lambda folder: training(folder, in_memory=True),
    "ours-memory": memory,
}

if __name__ == "__main__":
    program, folder = sys.argv[1], Path(sys.argv[2])
    if program == "ours-write":
        write(folder)
        print("{}")
    else:
        print(json.dumps(PROGRAMS[program](folder)))
