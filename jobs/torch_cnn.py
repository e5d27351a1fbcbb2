"""A PyTorch module with convolutions and BatchNorm on MNIST-format images."""

from pathlib import Path

from torch import nn

from mpitrain import Job, data, optim


def features(filters: int, size: int) -> nn.Sequential:
    """Return layers from flat images of ``size`` x ``size`` pixels to 4 * ``filters`` numbers."""
    return nn.Sequential(
        nn.Unflatten(1, (1, size, size)),
        *(nn.Conv2d(1, filters, 3, padding=1), nn.SyncBatchNorm(filters), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(filters, 4 * filters, 3, padding=1), nn.SyncBatchNorm(4 * filters), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


def job(filters: int = 16, learning_rate: float = 0.003, dropout: float = 0.2, data_dir: Path | None = None) -> Job:
    """Train a small convolutional network.

    Args:
        filters: Filters of the first convolution; the second has four times as many.
        learning_rate: AdamW's initial step size; it decays along half a cosine.
        dropout: Fraction of the last layer's inputs that is dropped.
        data_dir: Folder with the four IDX files; the embedded digits by default.
    """
    images = data.mnist(data_dir)
    steps = 800
    return Job(
        model=nn.Sequential(
            features(filters, images.image_shape[0]), nn.Dropout(dropout), nn.Linear(4 * filters, images.classes)
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=optim.adamw(optim.cosine(learning_rate, steps)),
        train=images.train,
        validation=images.validation,
        batch_size=32,
        train_steps=steps,
    )
