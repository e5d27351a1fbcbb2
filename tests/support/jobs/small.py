"""A small model whose results could depend on how a batch is divided: with Dropout, BatchNorm and moving averages.

Its matrices have 1,536, 576 and 240 elements.
"""

from mpitrain import Job, data, nn, optim


def job(
    hidden_units: int = 24,
    learning_rate: float = 0.01,
    clip_norm: float = 0.0,
    optimizer: str = "adam",
    normalize: bool = True,
    joint: bool = True,
) -> Job:
    """Train on the embedded digits.

    Args:
        hidden_units: Width of the hidden layer.
        learning_rate: The optimizer's learning rate.
        clip_norm: Largest norm of the gradient; 0 for any.
        optimizer: Name of an optimizer.
        normalize: Whether there is a BatchNorm layer.
        joint: Whether its statistics are those of all workers.
    """
    digits = data.mnist(None)
    make = getattr(optim, optimizer)
    return Job(
        model=nn.Sequential(
            # The gradient of a bias before BatchNorm is only rounding error, which Adam would turn into steps.
            nn.Dense(digits.features, hidden_units, bias=not normalize),
            *([nn.BatchNorm(hidden_units, sync=joint)] if normalize else []),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Residual(nn.Dense(hidden_units, hidden_units), nn.Tanh()),
            nn.Dense(hidden_units, 10),
        ),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=make(learning_rate, clip_norm=clip_norm or None),
        train=digits.train,
        validation=digits.validation,
        batch_size=12,
        train_steps=100,
        moving_average=optim.moving_average(0.9),
    )
