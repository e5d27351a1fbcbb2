"""``jobs/mnist_mlp.py`` with momentum in place of Adam."""

from pathlib import Path

from mpitrain import Job, data, nn, optim


def job(data_dir: Path | None = None) -> Job:
    """Train a multilayer perceptron with 100 hidden units.

    Args:
        data_dir: Folder with the four IDX files; the embedded digits by default.
    """
    images = data.mnist(data_dir)
    return Job(
        model=nn.Sequential(nn.Dense(images.features, 100), nn.ReLU(), nn.Dense(100, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.momentum(0.05, 0.9),
        train=images.train,
        validation=images.validation,
        batch_size=100,
        train_steps=3000,
    )
