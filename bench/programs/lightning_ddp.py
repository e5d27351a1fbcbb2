"""A Lightning script: trains with DDP on 2 CPU ranks, saves a checkpoint at each epoch, and resumes from the last one.

torchrun --nproc-per-node 2 lightning_ddp.py EPOCHS
mpitrain run -n 2 lightning_ddp.py EPOCHS
"""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)

    def on_train_epoch_end(self) -> None:
        print(f"rank {self.global_rank}: epoch {self.current_epoch} is done", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    lightning.seed_everything(0)
    inputs = torch.randn(512, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        strategy=DDPStrategy(process_group_backend=os.environ["BACKEND"]),
        accelerator="cpu",
        devices=2,
        max_epochs=int(sys.argv[1]),
        callbacks=[ModelCheckpoint("checkpoints", save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    model = Regression()
    trainer.fit(model, loader, ckpt_path="last")
    if trainer.is_global_zero:
        torch.save(model.state_dict(), "result.pt")


if __name__ == "__main__":
    main()
