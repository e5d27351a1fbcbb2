"""Images in folders, with augmentation. `python jobs/images.py digits` writes handwritten digits into such folders."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from mpitrain import Job, data, nn, optim

SIZE = 24  # pixels; images are scaled to this height and width
MOVED = 3  # maximum number of pixels by which an image is moved


def augmented(example: tuple[np.ndarray, int], rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Move an image by some pixels, reduce its brightness, and scale it as ``scaled``."""
    image, label = example
    padded = np.pad(image, ((MOVED, MOVED), (MOVED, MOVED), (0, 0)))
    top, left = rng.integers(0, 2 * MOVED + 1, 2)
    return scaled((padded[top : top + SIZE, left : left + SIZE] * rng.uniform(0.7, 1), label))


def scaled(example: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
    """Scale bytes to numbers from 0 to 1."""
    image, label = example
    return np.float32(image) / 255, label


def job(folder: Path = Path("digits"), filters: int = 16, learning_rate: float = 0.003) -> Job:
    """Train a convolutional network on images of ten classes.

    Args:
        folder: Folder with the folders train and validation, in which each class has a folder with its images.
        filters: Filters of the first convolution; the second has twice as many.
        learning_rate: Adam's initial step size; it decays along half a cosine.
    """
    steps, size = 600, (SIZE, SIZE)
    train = data.image_folder(folder / "train", size, channels=1)
    return Job(
        model=nn.Sequential(
            *(nn.Conv2D(1, filters, 3), nn.ReLU(), nn.MaxPool(2)),
            *(nn.Conv2D(filters, 2 * filters, 3), nn.ReLU(), nn.MaxPool(2)),
            *(nn.Flatten(), nn.Dense(2 * filters * (SIZE // 4) ** 2, 64), nn.ReLU(), nn.Dense(64, train.classes)),
        ),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(optim.cosine(learning_rate, steps)),
        train=train.random_map(augmented),
        validation=data.image_folder(folder / "validation", size, channels=1).map(scaled),
        batch_size=32,
        train_steps=steps,
    )


def write(folder: Path) -> None:
    """Write the handwritten digits that are part of the package as images, 64 pixels high and wide."""
    images = data.mnist()
    for name, split in (("train", images.train), ("validation", images.validation)):
        batch = split.read_batch(0, len(split))
        for index, (pixels, label) in enumerate(zip(batch.examples, batch.labels, strict=True)):
            image = Image.fromarray(np.uint8(pixels.reshape(8, 8) * 255.0 * split.scale)).resize((64, 64))
            path = folder / name / str(label) / f"{index:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python jobs/images.py FOLDER, which writes images into FOLDER; mpitrain run trains")
    write(Path(sys.argv[1]))
