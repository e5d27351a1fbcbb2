"""The job of ``mpitrain demo``, which ``python -m mpitrain.demo`` starts too."""

import sys

from mpitrain import Job, data, nn, optim


def job(hidden_units: int = 100, learning_rate: float = 0.001) -> Job:
    """Classify handwritten digits, which are part of the package.

    Args:
        hidden_units: Width of the hidden layer.
        learning_rate: Adam's step size.
    """
    digits = data.mnist(None)
    return Job(
        model=nn.Sequential(nn.Dense(digits.features, hidden_units), nn.ReLU(), nn.Dense(hidden_units, digits.classes)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(learning_rate),
        train=digits.train,
        validation=digits.validation,
        batch_size=100,
        train_steps=2000,
    )


if __name__ == "__main__":
    from mpitrain.cli.main import main

    sys.exit(main(["demo", *sys.argv[1:]]))
