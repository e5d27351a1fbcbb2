"""Fine-tuning: the layers of ``torch_cnn.py`` do not change, and a new last layer learns another task.

mpitrain run -n 2 jobs/torch_cnn.py --run-dir runs/digits
mpitrain run -n 2 jobs/torch_fine_tuning.py --init-from runs/digits
"""

from pathlib import Path

from torch import nn
from torch_cnn import features

from mpitrain import Job, data, optim


def parity(split: data.Split) -> data.Split:
    """Return the images with the label 1 for odd digits, 0 for even ones."""
    batch = split.read_batch(0, len(split))
    return data.from_arrays(batch.examples, batch.labels % 2, classes=2, scale=split.scale)


def job(filters: int = 16, learning_rate: float = 0.01, data_dir: Path | None = None) -> Job:
    """Learn to tell odd digits from even ones, with the features of another network.

    Args:
        filters: Filters of the first convolution, as in the other network.
        learning_rate: Adam's step size.
        data_dir: Folder with the four IDX files; the embedded digits by default.
    """
    images = data.mnist(data_dir)
    frozen = features(filters, images.image_shape[0]).requires_grad_(False).eval()
    return Job(
        model=nn.Sequential(frozen, nn.Identity(), nn.Sequential(nn.Linear(4 * filters, 2))),
        loss=nn.CrossEntropyLoss(),
        optimizer=optim.adam(learning_rate),
        train=parity(images.train),
        validation=parity(images.validation),
        batch_size=32,
        train_steps=500,
    )
