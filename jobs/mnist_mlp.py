"""One hidden layer on MNIST-format images, as in TensorFlow's tutorials of parameter servers."""

from pathlib import Path

from mpitrain import Job, data, nn, optim


def job(hidden_units: int = 100, learning_rate: float = 0.001, data_dir: Path | None = None) -> Job:
    """Train a multilayer perceptron.

    Args:
        hidden_units: Width of the hidden layer.
        learning_rate: Adam's step size.
        data_dir: Folder with the four IDX files; the embedded digits by default.
    """
    images = data.mnist(data_dir)
    return Job(
        model=nn.Sequential(nn.Dense(images.features, hidden_units), nn.ReLU(), nn.Dense(hidden_units, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(learning_rate),
        train=images.train,
        validation=images.validation,
        batch_size=100,
        train_steps=10_000,
    )
