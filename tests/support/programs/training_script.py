"""A script that trains ``jobs/small.py``: ``KIND FOLDER``. It writes the model's outputs to ``FOLDER/outputs.npy``."""

import importlib
import os
import signal
import sys
from pathlib import Path

import numpy as np

import mpitrain
from mpitrain import Hook, data
from mpitrain.process import rank_status
from mpitrain.process.launcher_env import launched_rank

SMALL = Path(__file__).parents[1] / "jobs" / "small.py"
sys.path.insert(0, str(SMALL.parent))
small = importlib.import_module("small")


class SendSignal(Hook):
    """Sends this rank a signal after five steps."""

    def after_step(self, loop) -> None:
        if loop.step == 5:
            os.kill(os.getpid(), signal.SIGUSR1)


kind, folder = sys.argv[1], Path(sys.argv[2])
options = {"run_dir": folder / "run", "train_steps": 10, "batch_size": 6}
if kind == "path":
    run = mpitrain.train(SMALL, hidden_units=20, **options)
elif kind == "job":
    run = mpitrain.train(small.job(hidden_units=20), **options)
elif kind == "mistake":
    try:
        run = mpitrain.train(small.job, hiden_units=20, **options)
    except mpitrain.UserError:
        sys.exit(10)
elif kind == "signal":
    job = small.job()
    job.hooks = [SendSignal()]
    run = mpitrain.train(job, **options)
else:
    run = mpitrain.train(small.job, hidden_units=20, **options)
if kind == "twice":
    run = mpitrain.train(small.job, hidden_units=10, **{**options, "run_dir": folder / "second"})
if kind == "raise" and launched_rank(os.environ) == 1:
    raise ArithmeticError("after training")
if kind == "exit":
    sys.exit("not accurate enough")
if launched_rank(os.environ) == 0:
    np.save(folder / "outputs.npy", run.model(averages=True)(data.mnist(None).validation.read_batch(0, 50).examples))
if kind == "path":  # ranks that are done must exit soon, but a script may take long
    done = [status.done for status in rank_status.read(Path(os.environ["MPITRAIN_RUN_DIR"]))]
    (folder / f"done-{launched_rank(os.environ)}").write_text(str(done))
