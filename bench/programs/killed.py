"""The script of ``bench/goodput.py``: training whose ranks are killed, as each library recommends to write it.

    killed.py LIBRARY FOLDER [LEARNER]

Each rank keeps its process id and its number of completed steps in the file FOLDER/RANK. Learners have one rank each,
and the file has the learner's number. A step sleeps as long as an accelerator would compute. DDP and Lightning save a
checkpoint every 50 steps, and resume from the newest one.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEP_S, SAVE_STEPS, EPOCHS = 0.05, 50, 10_000
library, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(3200, 64)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
loss_of = nn.MSELoss()


def report(rank: int, step: int) -> None:
    file = folder / f"{rank}.new"
    file.write_text(f"{os.getpid()} {step}")
    file.replace(folder / str(rank))


def with_mpitrain() -> None:
    import mpitrain

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = mpitrain.Trainer(model, optimizer)
    loader = trainer.loader(dataset, batch_size=16)
    for _ in trainer.epochs(EPOCHS):
        for x, y in loader:
            time.sleep(STEP_S)
            trainer.backward(loss_of(model(x), y))
            trainer.step()
            report(int(sys.argv[3]) if sys.argv[3:] else trainer.rank, trainer.step_count)


def with_ddp() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    loader, snapshot, step = DataLoader(dataset, batch_size=16, sampler=sampler), folder / "snapshot.pt", 0
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    for epoch in range(step // len(loader), EPOCHS):
        sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(loader):
            if index < step - epoch * len(loader):
                continue  # trained before the failure
            time.sleep(STEP_S)
            optimizer.zero_grad()
            loss_of(replica(x), y).backward()
            optimizer.step()
            step += 1
            report(dist.get_rank(), step)
            if not step % SAVE_STEPS and not dist.get_rank():
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, snapshot.with_suffix(".new"))
                snapshot.with_suffix(".new").replace(snapshot)


def with_lightning() -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            time.sleep(STEP_S)
            return loss_of(self.layers(batch[0]), batch[1])

        def on_train_batch_end(self, *values: object) -> None:
            report(self.global_rank, self.global_step)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint(folder / "checkpoints", every_n_train_steps=SAVE_STEPS, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), DataLoader(dataset, batch_size=16, shuffle=True), ckpt_path="last")


{"mpitrain": with_mpitrain, "ddp": with_ddp, "lightning": with_lightning}[library]()
