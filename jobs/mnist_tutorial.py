"""An MNIST network of tutorials: 500 hidden units, decaying SGD, L2 penalty, and averaged parameters for validation."""

from pathlib import Path

from mpitrain import Job, data, nn, optim


def job(
    hidden_units: int = 500,
    learning_rate: float = 0.1,
    learning_rate_decay: float = 0.99,
    l2: float = 0.0001,
    average_decay: float = 0.99,
    data_dir: Path | None = None,
) -> Job:
    """Train a multilayer perceptron with SGD, an L2 penalty and moving averages of the parameters.

    Args:
        hidden_units: Width of the hidden layer.
        learning_rate: SGD's step size in the first epoch.
        learning_rate_decay: Factor of the step size after every epoch.
        l2: This value times a weight is added to the weight's gradient; not applied to biases.
        average_decay: Decay of the moving averages of the parameters.
        data_dir: Folder with the four IDX files; the embedded digits by default.
    """
    images = data.mnist(data_dir)
    schedule = optim.by_epoch(optim.exponential(learning_rate, learning_rate_decay, 1, staircase=True))
    return Job(
        model=nn.Sequential(nn.Dense(images.features, hidden_units), nn.ReLU(), nn.Dense(hidden_units, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.sgd(schedule, l2=l2, decay_names="*.weight"),
        train=images.train,
        validation=images.validation,
        batch_size=100,
        train_steps=10_000,
        moving_average=optim.moving_average(average_decay),
    )
