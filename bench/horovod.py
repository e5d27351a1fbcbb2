"""mpitrain's version of Horovod's API against DistributedDataParallel over gloo, on the ranks of one mpirun.

    python bench/horovod.py [--ranks 2] [--rounds 50] [--models cnn mlp1024]

The loops are those of Horovod's synthetic benchmark: fixed data, SGD, one thread per rank. Both libraries train the
same module in the same processes, in alternating rounds. A result is the median of the rounds' ratios. The ratio of the
90th percentiles of the rates is printed, too, because other programs affect the fastest rounds least. Also measured:
the module without any exchange.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

BENCH = Path(__file__).parent
sys.path.insert(0, str(BENCH))
STEPS = {"mlp100": 60, "mlp1024": 15, "cnn": 4, "gpt": 2}  # of a round
TARGETS = {"mlp100": 1.5, "mlp1024": 1.5, "cnn": 1.0, "gpt": 1.0}


def loop_of(name: str, kind: str) -> Callable[[int], float]:
    """Return a training loop, which takes the number of steps and returns the examples/s of all ranks."""
    import torch
    import torch.distributed as dist
    import torch_models as models
    from torch import nn

    import mpitrain.horovod.torch as hvd

    torch.manual_seed(0)
    model = models.module_of(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    if kind == "horovod":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    elif kind == "gloo":
        model = nn.parallel.DistributedDataParallel(model)
    batch = models.BATCH[name]
    data, target = (torch.from_numpy(array[:batch]) for array in models.arrays_of(name))

    def train(steps: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            models.loss_of(model(data), target).backward()
            optimizer.step()
        dist.barrier()
        return steps * batch * hvd.size() / (time.perf_counter() - began)

    return train


def measure(rounds: int, names: list[str]) -> None:
    """Print examples/s, and the median of the rounds' ratios."""
    import backend
    import torch
    import torch.distributed as dist

    import mpitrain.horovod.torch as hvd

    sys.path.insert(0, str(BENCH / "jobs"))
    torch.set_num_threads(1)
    hvd.init()
    port = hvd.broadcast_object(29000 + os.getpid() % 2000)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=hvd.rank(), world_size=hvd.size())
    if hvd.rank() == 0:
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        print(f"{hvd.size()} ranks, {os.cpu_count()} cores, {backend.cpu()}; torch {torch.__version__}; load {load}")
    for name in names:
        loops = {kind: loop_of(name, kind) for kind in ("horovod", "gloo", "alone")}
        rates: dict[str, list[float]] = {kind: [] for kind in loops}
        for train in loops.values():
            train(max(3, STEPS[name] // 10))
        for _ in range(rounds):
            for kind, train in loops.items():
                rates[kind].append(train(STEPS[name]))
        ratio = statistics.median(a / b for a, b in zip(rates["horovod"], rates["gloo"], strict=True))
        if hvd.rank() == 0:
            text = ", ".join(f"{kind} {statistics.median(values):,.0f}" for kind, values in rates.items())
            fast = {kind: statistics.quantiles(values, n=10)[-1] for kind, values in rates.items()}
            print(
                f"{name:8} examples/s: {text}; {ratio:.2f} x gloo (target {TARGETS[name]}); "
                f"fastest tenth {fast['horovod'] / fast['gloo']:.2f} x",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--models", nargs="*", default=["cnn", "mlp1024"], choices=list(STEPS))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments.rounds, arguments.models)
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-n", str(arguments.ranks), "--oversubscribe"]
    words = [*mpirun, "--bind-to", "none", sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--rank"]
    os.execvpe(words[0], words, environment)


if __name__ == "__main__":
    main()
