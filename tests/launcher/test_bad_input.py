"""User errors: one line from one rank, status 2, and every rank ends."""

from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path

import pytest

from ..support.launch import JOBS, ROOT, Mpi, one_line, run
from ..support.world.controller import World

MLP = ROOT / "jobs" / "mnist_mlp.py"
PROLOGUE = "from mpitrain import Job, data, nn, optim\n"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--hiden-units", "3"], ["--hiden-units", "--hidden-units"]),
        (["--mode", "snc"], ["snc", "sync"]),
        (["--hidden-units", "many"], ["many", "--hidden-units", "integer"]),
        (["--batch-size", "0"], ["--batch-size is 0", "1"]),
        (["--resume", "nowhere.h5"], ["nowhere.h5", "never"]),
        (["--config", "nowhere.toml"], ["nowhere.toml"]),
        (["--init-from", "nowhere.h5"], ["--init-from nowhere.h5"]),
        (["--init-from", "README.md"], ["--init-from README.md"]),
        (["--keep-every", "5"], ["--keep-every 5", "requires --keep"]),
        (["--save-compression", "zip"], ["zip", "gzip"]),
        (["--time-limit", "0"], ["--time-limit is 0", "1"]),
        (["--prefetch-params"], ["--prefetch-params", "--mode async"]),
        (["--precision", "tf32"], ["--precision tf32", "no worker"]),
        (["--precision", "tf32", "--dtype", "float64"], ["--precision tf32", "float32"]),
        (["--precision", "float16", "--mode", "local"], ["--precision float16", "--mode sync", "local"]),
        (["--gpu-transport", "nccl"], ["--gpu-transport nccl", "no worker"]),
        (["--gpu-transport", "nccl", "--device", "cpu"], ["--gpu-transport nccl", "--device cpu"]),
        (["--accumulate-steps", "13", "--batch-size", "12"], ["--accumulate-steps 13", "12"]),
        (["--devices-per-rank", "0"], ["--devices-per-rank is 0", "1"]),
        (["--devices-per-rank", "4", "--batch-size", "3"], ["--devices-per-rank 4", "3 examples", "--batch-size"]),
        (["--batch-size", "5000"], ["5,000", "1,437", "--batch-size 1437"]),
    ],
    ids=str,
)
def test_flags(world: World, flags: list[str], expected: list[str]) -> None:
    message = world.refusal(1, MLP, *flags)
    for part in expected:
        assert part in message


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "part"), [((MLP, "--mode", "snc"), "--mode"), ((MLP, "--data-dir", "/nowhere"), "/nowhere")]
)
def test_all_ranks_exit_and_print_one_line(mpi: Mpi, words: tuple[str | Path, ...], part: str) -> None:
    done = mpi.run(2, "-m", "mpitrain", "train", *words, timeout=30)
    assert done.returncode == 2, done.stdout + done.stderr
    assert part in one_line(done.stderr)


@pytest.mark.quick
def test_no_job_file(world: World) -> None:
    message = world.refusal(2, "jobs/mnist_mpl.py")
    assert "jobs/mnist_mpl.py" in message
    assert "jobs/mnist_mlp.py" in message


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def jub():\n    return 1\n", ["has no function 'job'", "jub"]),
        ("import nothing_of_that_name\ndef job():\n    return 1\n", ["line 1", "nothing_of_that_name"]),
        ("def job(:\n", ["line 1"]),
        ("def job():\n    return 1 / 0\n", ["line 2", "ZeroDivisionError"]),
        ("def job():\n    return 1\n", ["returned int"]),
        ("def job(batch_size: int = 3):\n    return 1\n", ["'batch_size'", "Job(...)"]),
        ("def job(x: dict = {}):\n    return 1\n", ["'x'", "dict"]),
        (
            PROLOGUE + "def job():\n    d = data.mnist(None)\n    return Job(model=nn.Sequential(nn.Dense(63, 10)),"
            " loss=nn.SoftmaxCrossEntropy(), optimizer=optim.sgd(0.1), train=d.train)\n",
            ["dense1", "63", "64"],
        ),
    ],
    ids=["no job", "import", "syntax", "raises", "no Job", "taken name", "odd type", "shape"],
)
def test_job_files(world: World, job, text: str, expected: list[str]) -> None:
    path = job(text)
    message = world.refusal(2, path)
    for part in expected:
        assert part in message


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    """The embedded digits as files that a test may damage."""
    folder = tmp_path / "idx"
    folder.mkdir()
    for file in (ROOT / "mpitrain" / "data" / "digits").glob("*ubyte.gz"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.quick
def test_missing_data_file(each_world: World, idx_folder: Path) -> None:
    (idx_folder / "train-labels-idx1-ubyte.gz").unlink()
    assert "train-labels-idx1-ubyte" in each_world.refusal(2, MLP, "--data-dir", idx_folder)


def test_truncated_data_file(each_world: World, idx_folder: Path) -> None:
    file = idx_folder / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:5000])
    message = each_world.refusal(2, MLP, "--data-dir", idx_folder)
    assert "train-images-idx3-ubyte.gz" in message


def test_mislabelled_data_file(world: World, idx_folder: Path) -> None:
    images, labels = (idx_folder / f"train-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    held = images.read_bytes()
    images.write_bytes(labels.read_bytes())
    labels.write_bytes(held)
    assert "train-images-idx3-ubyte.gz" in world.refusal(2, MLP, "--data-dir", idx_folder)


def test_label_out_of_range(world: World, idx_folder: Path) -> None:
    labels = idx_folder / "train-labels-idx1-ubyte.gz"
    content = bytearray(gzip.decompress(labels.read_bytes()))
    content[100] = 11
    labels.write_bytes(gzip.compress(bytes(content)))
    message = world.refusal(2, MLP, "--data-dir", idx_folder)
    assert "11" in message
    assert "train-labels-idx1-ubyte.gz" in message


@pytest.mark.quick
def test_data_missing_on_one_rank_only(each_world: World, job) -> None:
    path = job(
        PROLOGUE + "import os\nfrom pathlib import Path\nfrom mpitrain.comm.mpi import MPI\n"
        "def job():\n"
        "    d = data.mnist(Path('/nowhere') if MPI.COMM_WORLD.rank == 1 else None)\n"
        "    return Job(model=nn.Sequential(nn.Dense(64, 10)), loss=nn.SoftmaxCrossEntropy(),"
        " optimizer=optim.sgd(0.1), train=d.train)\n"
    )
    message = each_world.refusal(3, path)
    assert "/nowhere" in message
    assert "rank 1" in message


@pytest.mark.quick
def test_ranks_disagree_on_the_layout(each_world: World, job) -> None:
    path = job(
        PROLOGUE + "from mpitrain.comm.mpi import MPI\n"
        "def job():\n"
        "    d = data.mnist(None)\n"
        "    width = 20 if MPI.COMM_WORLD.rank == 2 else 10\n"
        "    return Job(model=nn.Sequential(nn.Dense(64, width), nn.Dense(width, 10)),"
        " loss=nn.SoftmaxCrossEntropy(), optimizer=optim.sgd(0.1), train=d.train)\n"
    )
    message = each_world.refusal(3, path)
    for part in ("rank 2", "dense1.weight (64, 10)", "dense1.weight (64, 20)"):
        assert part in message


@pytest.mark.quick
@pytest.mark.parametrize("sharing", ["--shared-memory", "--no-shared-memory"])
def test_nan_loss(each_world: World, sharing: str) -> None:
    message = each_world.refusal(2, JOBS / "diverging.py", sharing, "--log-steps", "0")
    for part in ("nan", "step 8", "worker 1", "--nan skip"):
        assert part in message


@pytest.mark.parametrize("sharing", ["--shared-memory", "--no-shared-memory"])
@pytest.mark.parametrize("policy", ["skip", "ignore"])
def test_nan_loss_that_is_to_be_survived(world: World, policy: str, sharing: str, tmp_path: Path) -> None:
    done = world.train(2, JOBS / "diverging.py", "--nan", policy, "--run-dir", tmp_path, sharing)
    loss = done.stdout.split("validation loss ")[-1].split()[0]
    assert (loss == "nan") == (policy == "ignore")


@pytest.mark.quick
@pytest.mark.parametrize("where", ["job", "forward", "hook", "end"])
def test_a_rank_that_raises_ends_all(mpi: Mpi, where: str) -> None:
    done = mpi.run(3, "-m", "mpitrain", "train", JOBS / "raising.py", "--where", where, timeout=30)
    assert done.returncode != 0
    assert done.stderr.count("on purpose") >= 1
    if where != "job":
        assert done.stderr.count("Traceback") == 1, done.stderr
        assert "rank 1 of 3" in done.stderr


@pytest.mark.quick
@pytest.mark.parametrize(("raised", "status"), [("KeyError('mine')", 1), ("errors.DataError('mine')", 2)])
def test_an_error_in_the_hooks_of_all_ranks_is_printed_once(mpi: Mpi, job, raised: str, status: int) -> None:
    path = job(f"""
from mpitrain import Hook, Job, data, errors, nn, optim

class Fails(Hook):
    def after_step(self, loop):
        self.check()

    def check(self):
        raise {raised}

def job():
    d = data.mnist(None)
    return Job(nn.Dense(64, 10), nn.SoftmaxCrossEntropy(), optim.sgd(0.1), d.train, hooks=[Fails()])
""")
    done = mpi.run(3, "-m", "mpitrain", "train", path, timeout=30)
    assert done.returncode in (status, 9), done.stderr  # 9 from MPICH's mpirun
    assert done.stderr.count("mpitrain: ") == done.stderr.count("rank 0 of 3") == 1, done.stderr
    lines = re.findall(r'File "(.*)", line (\d+)', done.stderr)
    assert lines == ([(str(path), "6"), (str(path), "9")] if status == 1 else []), done.stderr


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("raised", "status"), [("DataError('my data')", 2), ("SystemExit(0)", 1)])
def test_a_users_error_on_one_rank_ends_all(mpi: Mpi, job, rank: int, raised: str, status: int) -> None:
    path = job(
        PROLOGUE + "from mpitrain import Hook\nfrom mpitrain.errors import DataError\n"
        "class Fails(Hook):\n"
        "    def after_step(self, loop):\n"
        f"        if loop.step == 5 and loop.cluster.rank == {rank}:\n"
        f"            raise {raised}\n"
        "def job():\n"
        "    d = data.mnist(None)\n"
        "    return Job(model=nn.Sequential(nn.Dense(64, 10)), loss=nn.SoftmaxCrossEntropy(),"
        " optimizer=optim.sgd(0.1), train=d.train, hooks=[Fails()])\n"
    )
    done = mpi.run(2, "-m", "mpitrain", "train", path, timeout=30)
    # MPICH's mpirun kills the ranks after an abort, and returns 9 if it kills them before the first rank exits.
    assert done.returncode == status or (mpi.name, done.returncode) == ("mpich", 9), done.stderr
    assert f"rank {rank} of 2" in done.stderr
    if status == 2:
        assert "my data" in one_line(done.stderr)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("optimizer=optim.adam(0.1) if rank else optim.sgd(0.1)", "optimizer"),
        ("validation=d.validation if rank else None", "number of validation examples"),
        ("train_steps=100 + rank", "train_steps"),
        ("batch_size=50 + rank", "batch_size"),
        ("train=d.train if rank else d.validation", "number of training examples"),
    ],
)
def test_ranks_disagree_on_the_job(world: World, job, what: str, expected: str) -> None:
    path = job(
        PROLOGUE + "from mpitrain.comm.mpi import MPI\n"
        "def job():\n"
        "    d, rank = data.mnist(None), MPI.COMM_WORLD.rank\n"
        "    given = dict(model=nn.Sequential(nn.Dense(64, 10)), loss=nn.SoftmaxCrossEntropy(),"
        " optimizer=optim.sgd(0.1), train=d.train)\n"
        f"    return Job(**(given | dict({what})))\n"
    )
    message = world.refusal(2, path)
    assert expected in message
    assert "rank 1" in message


@pytest.mark.parametrize("given", ["batch_size='a'", "hooks=[3]", "validation=d", "model=nn.Sequential(nn.Flatten())"])
def test_a_job_of_wrong_parts(world: World, job, given: str) -> None:
    path = job(
        PROLOGUE + "def job():\n"
        "    d = data.mnist(None)\n"
        "    parts = dict(model=nn.Sequential(nn.Dense(64, 10)), loss=nn.SoftmaxCrossEntropy(),"
        " optimizer=optim.sgd(0.1), train=d.train)\n"
        f"    return Job(**(parts | dict({given})))\n"
    )
    world.refusal(2, path)


def test_outputs_that_do_not_fit_the_classes(world: World, job) -> None:
    path = job(
        PROLOGUE + "def job():\n"
        "    d = data.mnist(None)\n"
        "    return Job(model=nn.Sequential(nn.Dense(64, 5)), loss=nn.SoftmaxCrossEntropy(),"
        " optimizer=optim.sgd(0.1), train=d.train)\n"
    )
    message = world.refusal(2, path)
    assert "(5,)" in message
    assert "10 classes" in message


def test_a_launcher_of_another_mpi(openmpi: Mpi, mpich: Mpi) -> None:
    for launcher, python in ((openmpi, mpich), (mpich, openmpi)):
        done = run([*launcher.command(2), str(python.python), "-m", "mpitrain", "train", str(MLP)], timeout=30)
        assert done.returncode == 2, done.stderr
        message = one_line(done.stderr)
        assert "2 ranks" in message
        assert "mpi4py" in message and "mpitrain run" in message


@pytest.mark.quick
def test_run_refuses_before_it_starts_ranks(openmpi: Mpi) -> None:
    done = run([str(openmpi.python), "-m", "mpitrain", "run", "-n", "2", str(MLP), "--hiden-units", "3"])
    assert done.returncode == 2
    assert done.stderr.splitlines() == [one_line(done.stderr)]


def test_run_reports_nothing_but_the_line(openmpi: Mpi) -> None:
    done = run([str(openmpi.python), "-m", "mpitrain", "run", "-n", "2", str(MLP), "--data-dir", "/nowhere"])
    assert done.returncode == 2
    assert done.stderr.splitlines() == [one_line(done.stderr)]


@pytest.mark.parametrize("command", ["doctor", "train", "run"])
def test_no_mpi_library(command: str) -> None:
    words = [sys.executable, "-m", "mpitrain", command, *([] if command == "doctor" else [MLP])]
    done = run([*map(str, words)], env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert done.returncode == 2 and "/nowhere/libmpi.so" in one_line(done.stderr)
