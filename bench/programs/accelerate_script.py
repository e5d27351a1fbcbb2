"""An Accelerate script: trains, saves its state every 20 steps, and resumes from it.

torchrun --nproc-per-node 2 accelerate_script.py STEPS
mpitrain run -n 2 accelerate_script.py STEPS
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

STATE = Path("state")


def main() -> None:
    dist.init_process_group(os.environ["BACKEND"])
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    inputs = torch.randn(512, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3), loader)
    step = 0
    if (STATE / "step").exists():
        accelerator.load_state(str(STATE))
        step = int((STATE / "step").read_text())
        accelerator.print(f"resumed after step {step}")
    accelerator.wait_for_everyone()
    while step < int(sys.argv[1]):
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step % 20 == 0:
                accelerator.save_state(str(STATE))
                if accelerator.is_main_process:
                    (STATE / "step").write_text(str(step))
                mean = accelerator.reduce(loss.detach(), "mean").item()
                accelerator.print(f"step {step}: loss {mean:.6f}", flush=True)
            if step == int(sys.argv[1]):
                break
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "result.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
