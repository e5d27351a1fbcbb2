"""A table in a Parquet file, with AUC as metric. `python jobs/tabular.py loans.parquet` writes invented loans."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from mpitrain import Job, data, nn, optim

VALIDATION = "validation"  # in the names of the files of validation examples


def auc(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Return the area under the ROC curve: how often a positive example has a higher score than a negative one."""
    scores = outputs[:, 1] - outputs[:, 0]
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]  # equal scores have the mean of their ranks
    positives = labels == 1
    n, p = len(labels) - positives.sum(), positives.sum()
    return float((ranks[positives].sum() - p * (p + 1) / 2) / (n * p))


def job(table: Path = Path("loans.parquet"), units: int = 64, learning_rate: float = 0.003) -> Job:
    """Predict which loans are not paid back.

    Args:
        table: The Parquet file; the file with -validation before the suffix has the validation examples.
        units: Width of the two hidden layers.
        learning_rate: Adam's initial step size; it decays along half a cosine.
    """
    steps = 3000
    train = data.parquet(table, label="defaulted", classes=2)
    return Job(
        model=nn.Sequential(
            nn.BatchNorm(train.shape[0]),  # the columns have different units
            *(nn.Dense(train.shape[0], units), nn.ReLU(), nn.Dense(units, units), nn.ReLU(), nn.Dense(units, 2)),
        ),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(optim.cosine(learning_rate, steps)),
        train=train,
        validation=data.parquet(table.with_stem(f"{table.stem}-{VALIDATION}"), label="defaulted", classes=2),
        metrics={"auc": auc},
        batch_size=128,
        train_steps=steps,
    )


def write(path: Path) -> None:
    """Write invented loans, and print the AUC of their true probabilities, which no model can exceed by much."""
    rng = np.random.default_rng(0)
    for name, count in ((path, 50_000), (path.with_stem(f"{path.stem}-{VALIDATION}"), 10_000)):
        age, income = rng.integers(18, 75, count), rng.lognormal(10.3, 0.5, count)
        debt, late = income * rng.exponential(0.6, count), rng.poisson(0.5, count)
        employed = np.minimum(rng.exponential(6, count), age - 17)
        burden = np.log(debt / income + 0.1)
        risk = 1.1 * burden + 0.8 * late * (employed < 3) - 0.03 * np.abs(age - 45) - 0.1 * employed + 0.4
        probability = 1 / (1 + np.exp(-2 * risk))
        defaulted = (rng.random(count) < probability).astype(np.int64)
        columns = {"age": age, "income": income, "debt": debt, "late_payments": late, "years_employed": employed}
        pa.parquet.write_table(pa.table({**columns, "defaulted": defaulted}), name, row_group_size=10_000)
        print(f"{name}: AUC of the true probabilities {auc(np.stack([-risk, risk], 1), defaulted):.4f}")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
