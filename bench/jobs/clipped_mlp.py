"""``jobs/mnist_mlp.py`` with clipped gradients and a moving average, for ``bench/same_bits.py``."""

from mpitrain import Job, data, nn, optim


def job(decay: float = 0.0) -> Job:
    """Train a multilayer perceptron with 100 hidden units.

    Args:
        decay: Decay of the moving average; 0 for none.
    """
    images = data.mnist()
    return Job(
        model=nn.Sequential(nn.Dense(images.features, 100), nn.ReLU(), nn.Dense(100, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(0.001, clip_norm=0.5),
        train=images.train,
        validation=images.validation,
        batch_size=100,
        moving_average=optim.moving_average(decay) if decay else None,
    )
