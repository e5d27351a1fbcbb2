"""Input pipelines of torch, Hugging Face datasets and tf.data, for ``bench/input.py``; see ``jobs/input.py``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")

CLASSES, SIZE, CROP, BATCH, COLUMNS, ROW_BATCH = 10, 256, 224, 32, 20, 256


def cpu_seconds() -> float:
    """Return the CPU time that this process and its child processes have taken."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in ("self", *children)]
    return sum(int(number) for field in fields for number in field[11:13]) / os.sysconf("SC_CLK_TCK")


def rate(batches: Iterable[Any], batch: int, seconds: float = 4.0) -> dict[str, float]:
    """Return examples per second, and CPU time per example, after the first batches."""
    iterator = iter(batches)
    for _ in range(4):
        next(iterator)
    began, cpu_began, loaded = time.perf_counter(), cpu_seconds(), 0
    while time.perf_counter() - began < seconds:
        next(iterator)
        loaded += batch
    return {"rate": loaded / (time.perf_counter() - began), "cpu_us": (cpu_seconds() - cpu_began) / loaded * 1e6}


def forever(loader: Iterable[Any]) -> Iterable[Any]:
    while True:
        yield from loader


def torch_images(folder: Path, prefetch: str) -> dict[str, float]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import numpy as np
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    class Decoding(Dataset):  # type: ignore[type-arg]
        """The images, with the same augmentation."""

        def __init__(self) -> None:
            self._paths = sorted((folder / "images").rglob("*.jpg"))

        def __len__(self) -> int:
            return len(self._paths)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            with Image.open(self._paths[index]) as image:
                pixels = np.asarray(image.convert("RGB"))
            top, left = torch.randint(0, SIZE - CROP + 1, (2,)).tolist()
            pixels = pixels[top : top + CROP, left : left + CROP]
            if torch.rand(()) < 0.5:
                pixels = pixels[:, ::-1]
            scaled = np.multiply(pixels.transpose(2, 0, 1), np.float32(1 / 255), dtype=np.float32)
            return torch.from_numpy(scaled), index % CLASSES

    torch.set_num_threads(1)
    loader = DataLoader(
        Decoding(),
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        prefetch_factor=int(prefetch),
        persistent_workers=True,
    )
    return rate(forever(loader), BATCH)


def datasets_parquet(folder: Path) -> dict[str, float]:
    import datasets

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_parquet(str(folder / "table.parquet"), cache_dir=str(folder / "cache"))

    def epochs() -> Iterable[Any]:
        epoch = 0
        while True:
            epoch += 1
            yield from table.shuffle(seed=epoch).with_format("numpy").iter(ROW_BATCH, drop_last_batch=True)

    return rate(epochs(), ROW_BATCH)


def tf_records(folder: Path, of_images: bool) -> dict[str, float]:
    import tensorflow as tf

    label = tf.io.FixedLenFeature([1], tf.int64)

    def image(message: Any) -> Any:
        example = tf.io.parse_single_example(message, {"image": tf.io.FixedLenFeature([], tf.string), "label": label})
        pixels = tf.io.decode_jpeg(example["image"], channels=3)
        pixels = tf.image.random_flip_left_right(tf.image.random_crop(pixels, (CROP, CROP, 3)))
        return tf.cast(tf.transpose(pixels, (2, 0, 1)), tf.float32) / 255.0, example["label"]

    def numbers(messages: Any) -> Any:
        return tf.io.parse_example(messages, {"x": tf.io.FixedLenFeature([COLUMNS], tf.float32), "label": label})

    records = tf.data.TFRecordDataset(str(folder / ("images.tfrecord" if of_images else "numbers.tfrecord")))
    records = records.repeat().shuffle(1000)
    if of_images:
        batches = records.map(image, num_parallel_calls=2).batch(BATCH)
    else:
        batches = records.batch(ROW_BATCH).map(numbers, num_parallel_calls=2)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 2
    return rate(batches.prefetch(4).with_options(options).as_numpy_iterator(), BATCH if of_images else ROW_BATCH)


PROGRAMS: dict[str, Any] = {
    "torch-images": torch_images,
    "datasets-parquet": datasets_parquet,
    "tf-records": lambda folder: tf_records(folder, of_images=True),
    "tf-numbers": lambda folder: tf_records(folder, of_images=False),
}

if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])))
