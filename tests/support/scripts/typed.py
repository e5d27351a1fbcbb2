"""A user's file with the Python API; tests check it with mypy --strict and do not run it."""

from pathlib import Path

import numpy as np

import mpitrain
from mpitrain import Job, Run, RunFailed, data, nn, optim


def job(width: int = 5) -> Job:
    digits = data.mnist(None)
    return Job(
        model=nn.Sequential(nn.Dense(digits.features, width), nn.ReLU(), nn.Dense(width, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(0.001),
        train=digits.train,
        validation=digits.validation,
    )


def start(name: str) -> Run:
    if name == "slurm":
        return mpitrain.submit(job, nodes=2, time="1:00:00", width=7)
    return mpitrain.launch(job, ranks=4, mode="async", ps=1, run_dir=Path("runs") / name, width=7)


def follow(run: Run) -> float:
    try:
        status = run.wait(timeout=60)
    except RunFailed as error:
        print(error.rank, error.traceback)
        run.stop()
        raise
    rows: list[dict[str, object]] = run.metrics
    page: Path = run.report()
    print(status.state, status.step / status.train_steps, len(rows), page, run.checkpoints[-1].name)
    model = mpitrain.load(run.path, averages=True)
    return float(np.mean(model(np.zeros((3, 64), np.uint8))))


print(follow(start("local")), mpitrain.train(job, mode="local", train_steps=10).status.state)
