"""Two convolutions with pooling on MNIST-format images."""

from pathlib import Path

from mpitrain import Job, data, nn, optim


def job(filters: int = 32, learning_rate: float = 0.001, dropout: float = 0.3, data_dir: Path | None = None) -> Job:
    """Train a small convolutional network.

    Args:
        filters: Filters of the first convolution; the second has twice as many.
        learning_rate: Adam's initial step size; it decays along half a cosine.
        dropout: Fraction of the last layer's inputs that is dropped.
        data_dir: Folder with the four IDX files; the embedded digits by default.
    """
    images = data.mnist(data_dir)
    height, width, channels = images.image_shape
    steps = 6_000
    return Job(
        model=nn.Sequential(
            nn.Reshape(height, width, channels),
            nn.Conv2D(channels, filters, 3),
            nn.ReLU(),
            nn.MaxPool(2),
            nn.Conv2D(filters, 2 * filters, 3),
            nn.ReLU(),
            nn.MaxPool(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Dense((height // 4) * (width // 4) * 2 * filters, 10),
        ),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(optim.cosine(learning_rate, steps)),
        train=images.train,
        validation=images.validation,
        batch_size=100,
        train_steps=steps,
    )
