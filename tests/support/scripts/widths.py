"""A module in the folder of a script, with a job function that the ranks import."""

from mpitrain import Job, data, nn, optim


def widths(hidden_units: int = 4) -> Job:
    digits = data.mnist(None)
    return Job(
        model=nn.Sequential(nn.Dense(digits.features, hidden_units), nn.ReLU(), nn.Dense(hidden_units, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.sgd(0.1),
        train=digits.train,
        validation=digits.validation,
        batch_size=12,
        train_steps=20,
    )
