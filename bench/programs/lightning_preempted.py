"""A Lightning script that is asked to stop while it trains, and resumes when it is started again.

    mpitrain run -n 2 lightning_preempted.py EPOCHS HOW

At SIGTERM, Lightning ends training after the current batch, and raises SIGTERMException. HOW is the reaction:

- ``unchanged``: none, as in most scripts. Python then exits with status 0.
- ``status75``: saves a checkpoint and exits with status 75, so that the job is requeued. Lightning 2.6 may hang before:
  its handler of SIGTERM communicates, and the ranks may be in different steps.
- ``callback``: replaces Lightning's handler by a callback, with which all ranks stop after the same batch.
"""

import signal
import sys
import time

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Linear(8, 1)

    def on_train_start(self) -> None:
        print(f"rank {self.global_rank}: training begins in step {self.global_step}", flush=True)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        time.sleep(0.05)
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)

    def on_train_batch_end(self, *values: object) -> None:
        if self.global_rank == 0 and self.global_step % 20 == 0:
            print(f"step {self.global_step}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class StopInTime(Callback):
    """Saves a checkpoint and exits with status 75 after SIGTERM."""

    asked = False

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: setattr(self, "asked", True))

    def on_train_batch_end(self, trainer: lightning.Trainer, *values: object) -> None:
        if trainer.strategy.reduce_boolean_decision(self.asked, all=False):
            trainer.save_checkpoint("checkpoints/last.ckpt")
            sys.exit(75)


def main() -> None:
    epochs, how = int(sys.argv[1]), sys.argv[2]
    lightning.seed_everything(0)
    inputs = torch.randn(640, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    callbacks: list[Callback] = [ModelCheckpoint("checkpoints", save_last=True, save_on_exception=how == "status75")]
    if how == "callback":
        callbacks.append(StopInTime())
    trainer = lightning.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
    )
    try:
        trainer.fit(Regression(), loader, ckpt_path="last")
    except SIGTERMException:
        sys.exit(75 if how == "status75" else 0)  # without this line, Python exits with status 0
    print(f"finished in step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
