"""Programs that do not use mpitrain, started by ``mpitrain run`` on real ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import mpitrain
from mpitrain.monitor.heartbeat import read as read_status
from mpitrain.process import rank_status
from mpitrain.process.pid import parent_of, process_state
from mpitrain.process.run_directory import read_failure

from ..support.launch import JOBS, LAUNCHER_ENVIRONMENT, PROGRAMS, Mpi, one_line, run
from ..support.waiting import limit, wait_until

REPORTING, PROGRESSING = PROGRAMS / "reporting.py", PROGRAMS / "progressing.py"


def start(mpi: Mpi, *words: object, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    """Execute ``mpitrain run WORDS`` in the environment of the MPI library."""
    return run([str(mpi.python), "-m", "mpitrain", "run", *map(str, words)], timeout=timeout, **options)


def records(folder: Path, restart: int = 0) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"*-{restart}.json"))]


def background(mpi: Mpi, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(mpi.python), "-m", "mpitrain", "run", *map(str, words)],
        env={**os.environ, **LAUNCHER_ENVIRONMENT},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def wait_ready(folder: Path) -> None:
    wait_until(lambda: all((folder / f"ready-{rank}").exists() for rank in (0, 1)), "both ranks are ready")


@pytest.mark.quick
def test_a_script_gets_the_environment_of_torchrun(openmpi: Mpi, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = start(openmpi, "-n", 3, "--run-dir", run_dir, REPORTING, "print", tmp_path, "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    first, *others = found = records(tmp_path)
    for rank, record in enumerate(found):
        assert record["RANK"] == record["LOCAL_RANK"] == record["ROLE_RANK"] == str(rank)
        assert record["WORLD_SIZE"] == record["LOCAL_WORLD_SIZE"] == record["ROLE_WORLD_SIZE"] == "3"
        assert (record["GROUP_RANK"], record["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert record["MPITRAIN_FIRST_WORLD_SIZE"] == "3"
        assert (record["TORCHELASTIC_RESTART_COUNT"], record["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "0")
        assert record["TORCHELASTIC_RUN_ID"] == "run" and "TORCHELASTIC_USE_AGENT_STORE" not in record
        assert record["MASTER_PORT"] == first["MASTER_PORT"] and record["MASTER_ADDR"] == "127.0.0.1"
        assert record["argv"] == ["--lr", "0.1"] and record["pythonpath"] == os.environ.get("PYTHONPATH")
        assert record["path"][0] == str(PROGRAMS) and not any("startup" in path for path in record["path"])
    assert int(first["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 3)
    assert sorted(line for line in done.stdout.splitlines()) == sorted(
        ["to standard output", *(f"rank {rank}: to standard output" for rank in range(1, len(others) + 1))]
    )
    for rank in range(3):
        log = (run_dir / "logs" / f"rank-{rank}.log").read_text().splitlines()[1:]
        assert sorted(line for line in log if line) == ["to standard error", "to standard output"]
    status = read_status(run_dir)
    assert status is not None and (status.state, status.ranks) == ("finished", "3 ranks")


@pytest.mark.parametrize("ranks", [1, len(os.sched_getaffinity(0))])
def test_a_program_starts_processes_by_mpi(mpi: Mpi, ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "parent.py"
    path.write_text(
        "import sys\nfrom mpi4py import MPI\nparent = MPI.Comm.Get_parent()\n"
        "if parent == MPI.COMM_NULL:\n"
        "    child = MPI.COMM_SELF.Spawn(sys.executable, [__file__])\n    print('received', child.recv(source=0))\n"
        "    child.Disconnect()\n"
        "else:\n    parent.send(42, dest=0)\n    parent.Disconnect()\n"
    )
    more = ["--launcher-args", "--oversubscribe --bind-to none"] if mpi.name == "openmpi" and ranks > 1 else []
    done = start(mpi, "-n", ranks, "--run-dir", tmp_path / "run", *more, path)
    assert (done.returncode, done.stdout.count("received 42\n")) == (0, ranks), done.stderr


def test_a_rank_that_hangs_after_its_interpreter_has_ended(openmpi: Mpi, tmp_path: Path) -> None:
    ends = {"pass": 0, "sys.exit(0)": 0, "sys.exit(3)": 1, "raise SystemExit(0)": 1, "raise ValueError": 1}
    running = []
    for number, end in enumerate(ends):
        path = tmp_path / f"{number}.py"
        path.write_text(
            "import ctypes, os, sys, time\nlibc = ctypes.CDLL(None)\nlibc.__cxa_atexit(libc.pause, None, None)\n"
            f"if not os.fork(): sys.exit(5)\nprint('before', flush=True)\n{end}\n"
        )
        words = [str(openmpi.python), "-m", "mpitrain", "run", "-n", "1", "--run-dir", str(tmp_path / f"run{number}")]
        environment = {**os.environ, **LAUNCHER_ENVIRONMENT}
        running.append(subprocess.Popen([*words, str(path)], env=environment, stderr=subprocess.PIPE, text=True))
    for process, (end, status) in zip(running, ends.items(), strict=True):
        _, err = process.communicate(timeout=limit(90))
        assert process.returncode == status, (end, err)
        assert "Python has ended" in err


def test_a_rank_that_waits_in_finalize_for_one_that_still_works_is_not_ended(mpi: Mpi, tmp_path: Path) -> None:
    path = tmp_path / "saves.py"
    path.write_text(
        "import time\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\nMPI.COMM_WORLD.Barrier()\n"
        "if rank == 1:\n    time.sleep(40)\n    print('saved', flush=True)\n"
    )
    done = start(mpi, "-n", 2, "--run-dir", tmp_path / "run", path)
    assert (done.returncode, done.stdout) == (0, "rank 1: saved\n"), done.stderr
    assert [line for line in done.stderr.splitlines() if "waits for rank 1" in line] == done.stderr.splitlines()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_nothing_watches_is_ended(mpi: Mpi, number: signal.Signals, tmp_path: Path) -> None:
    process = background(mpi, "-n", 2, "--run-dir", tmp_path, "--", "sleep", "300")
    try:
        wait_until(lambda: len(rank_status.read(tmp_path)) == 2, "both ranks run", process=process)
        pid = rank_status.read(tmp_path)[1].pid
        os.kill(parent_of(pid), number)
        _, err = process.communicate(timeout=limit(40))
    finally:
        process.kill()
    assert process.returncode == 1, err
    assert process_state(pid) in ("", "Z")


@pytest.mark.parametrize("work", ["program", "job"])
def test_where_ranks_run_is_shown(openmpi: Mpi, work: str, tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    words = ["--", "true"] if work == "program" else [JOBS / "linear.py", "--train-steps", "2"]
    done = start(openmpi, "-n", 2, "--run-dir", tmp_path / "run", "--show-binding", *words)
    table = (tmp_path / "run" / "ranks.txt").read_text().splitlines()
    assert set(table) <= {*done.stdout.splitlines(), *done.stderr.splitlines()}
    column = table[0].split().index("cores")
    assert [row.split()[column] for row in table[1:]] == [str(core) for core in cores]
    assert "share" not in done.stderr
    crowded = ["taskset", "-c", str(cores[0]), str(openmpi.python), "-m", "mpitrain", "run", "-n", "2"]
    done = run([*crowded, "--run-dir", str(tmp_path / "crowded"), *map(str, words)])
    assert "share 1 core" in done.stdout + done.stderr


TRAINING = """
import os, sys, torch
{before}
model = torch.nn.Linear(2, 1)
class Own(torch.optim.SGD):
    pass
optimizer = Own(model.parameters(), 0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
{after}
"""
GLOO = "import torch.distributed as dist; dist.init_process_group('gloo')"


@pytest.mark.parametrize(
    ("before", "after", "ranks", "is_reported"),
    [
        ("", "", 2, True),
        ("", "", 1, False),
        ("", "sys.exit(3 if os.environ['RANK'] == '0' else 0)", 2, True),
        ("", "raise ValueError", 2, False),
        (GLOO, "", 2, False),
        (GLOO, "dist.destroy_process_group()", 2, False),
        ("from mpi4py import MPI", "", 2, False),
        ("os.environ['MPITRAIN_INDEPENDENT'] = '1'", "", 2, False),
        ("sys.exit()", "", 2, False),
    ],
)
def test_ranks_that_train_without_communicating(
    openmpi: Mpi, before: str, after: str, ranks: int, is_reported: bool, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAINING.format(before=before, after=after))
    done = start(openmpi, "-n", ranks, "--run-dir", tmp_path / "run", path)
    lines = [line for line in done.stderr.splitlines() if "communicat" in line]
    assert len(lines) == is_reported, done.stderr
    assert done.returncode == (1 if after.startswith(("sys.exit(3", "raise")) else 0)


@pytest.mark.parametrize("action", ["raise", "status", "kill"])
def test_the_rank_that_fails_is_named(mpi: Mpi, action: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = start(mpi, "-n", 2, "--run-dir", run_dir, REPORTING, action, tmp_path)
    assert done.returncode == 1
    failure, message = read_failure(run_dir), one_line(done.stderr) if action != "raise" else done.stderr
    assert failure is not None and failure.rank == 1 and failure.reason in message
    cause = {"raise": "ValueError: no such thing", "status": "status 3", "kill": "SIGKILL"}[action]
    assert cause in failure.reason and os.uname().nodename in failure.reason
    assert ("Traceback" in failure.traceback) == (action == "raise")
    status = read_status(run_dir)
    assert status is not None and status.state == "failed"
    assert all(process_state(record["pid"]) in ("", "Z") for record in records(tmp_path))


def test_a_killed_rank_is_restarted(mpi: Mpi, tmp_path: Path) -> None:
    done = start(mpi, "-n", 2, "--max-restarts", 2, "--run-dir", tmp_path / "run", REPORTING, "kill", tmp_path)
    assert done.returncode == 0, done.stderr
    again = records(tmp_path, restart=1)
    assert [record["TORCHELASTIC_MAX_RESTARTS"] for record in again] == ["2", "2"]
    assert not list(tmp_path.glob("*-2.json"))


@pytest.mark.parametrize(("action", "status", "state"), [("stop", 75, "stopped"), ("finish", 0, "finished")])
def test_a_signal_asks_the_program_to_stop(mpi: Mpi, action: str, status: int, state: str, tmp_path: Path) -> None:
    process = background(mpi, "-n", 2, "--run-dir", tmp_path / "run", REPORTING, action, tmp_path)
    wait_ready(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=limit(30))
    assert process.returncode == status, errors
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["SIGTERM", "SIGTERM"]
    recorded = read_status(tmp_path / "run")
    assert recorded is not None and recorded.state == state


def test_a_program_that_dies_by_the_signal_has_stopped(openmpi: Mpi, tmp_path: Path) -> None:
    process = background(openmpi, "-n", 2, "--run-dir", tmp_path / "run", REPORTING, "wait", tmp_path)
    wait_until(lambda: len([*tmp_path.glob("*-0.json")]) == 2, "the records of both ranks")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=limit(30))
    assert process.returncode == 75


def test_a_program_is_stopped_before_the_time_limit(openmpi: Mpi, tmp_path: Path) -> None:
    began = time.monotonic()
    flags = ["--time-limit", 30, "--stop-secs", 27, "--signal", "USR1"]
    done = start(openmpi, "-n", 2, *flags, "--run-dir", tmp_path / "run", REPORTING, "stop", tmp_path, "SIGUSR1")
    assert done.returncode == 75 and time.monotonic() < began + 27
    assert "time limit" in one_line(done.stderr)
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["SIGUSR1", "SIGUSR1"]


def test_processes_that_a_program_leaves_are_ended(openmpi: Mpi, tmp_path: Path) -> None:
    done = start(openmpi, "-n", 2, "--run-dir", tmp_path / "run", REPORTING, "leave", tmp_path)
    assert done.returncode == 0, done.stderr
    mark = f"MPITRAIN_RUN_DIR={tmp_path / 'run'}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            assert mark not in Path(f"/proc/{name}/environ").read_bytes()
        except OSError:  # the process has ended
            continue


def test_processes_in_the_background_print_to_their_end(mpi: Mpi, tmp_path: Path) -> None:
    script = "(sleep 2; seq 1000) & (sleep 6; echo last >&2) & echo first"
    done = start(mpi, "-n", 2, "--run-dir", tmp_path / "run", "--", "sh", "-c", script)
    expected = ["first", *map(str, range(1, 1001))]
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("rank 1: ")] == expected
    assert [line.removeprefix("rank 1: ") for line in lines if line.startswith("rank 1: ")] == expected
    errors = [line for line in done.stderr.splitlines() if not line.startswith("mpitrain:")]  # a notice that it waits
    assert (done.returncode, sorted(errors)) == (0, ["last", "rank 1: last"])


def test_a_program_that_has_failed_does_not_wait_for_its_background(mpi: Mpi, tmp_path: Path) -> None:
    script = "(while echo more; do sleep 0.2; done) & exit 3"
    done = start(mpi, "-n", 2, "--run-dir", tmp_path / "run", "--", "sh", "-c", script)
    assert done.returncode == 1 and "status 3" in one_line(done.stderr)


def test_an_interrupt_ends_processes_in_the_background(mpi: Mpi, tmp_path: Path) -> None:
    process = background(mpi, "-n", 2, "--run-dir", tmp_path / "run", "--", "sh", "-c", "sleep 300 &")
    try:
        wait_until(lambda: len(rank_status.read(tmp_path / "run")) == 2, "both ranks run", process=process)
        pids = [rank.pid for rank in rank_status.read(tmp_path / "run")]
        wait_until(lambda: all(process_state(pid) in ("", "Z") for pid in pids), "the programs end", process=process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=limit(20))
    finally:
        process.kill()
    assert process.returncode == 0, err  # the programs have succeeded


def test_a_rank_without_progress_is_ended(openmpi: Mpi, tmp_path: Path) -> None:
    flags = ["-n", 2, "--hang-timeout", 2, "--long-timeout", 2, "--run-dir", tmp_path / "run"]
    done = start(openmpi, *flags, PROGRESSING, 30, tmp_path)
    failure = read_failure(tmp_path / "run")
    assert done.returncode == 1 and failure is not None and failure.rank == 1
    assert f'File "{PROGRESSING}"' in done.stderr  # the stacks


def test_one_line_says_that_hangs_are_not_detected(openmpi: Mpi, tmp_path: Path) -> None:
    flags = ["-n", 2, "--hang-timeout", 1, "--time-limit", 20, "--stop-secs", 16]
    done = start(openmpi, *flags, "--run-dir", tmp_path / "run", REPORTING, "stop", tmp_path)
    assert done.returncode == 75 and "mpitrain.progress()" in done.stderr.splitlines()[0]


def test_stacks_of_a_program(openmpi: Mpi, tmp_path: Path) -> None:
    process = background(openmpi, "-n", 2, "--run-dir", tmp_path / "run", PROGRESSING, 50, tmp_path)
    wait_ready(tmp_path)
    done = run([sys.executable, "-m", "mpitrain", "stacks", str(tmp_path / "run")])
    assert done.returncode == 0 and done.stdout.count(f'File "{PROGRESSING}"') == 2
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=limit(30))


def test_commands_and_modules(openmpi: Mpi, tmp_path: Path) -> None:
    command = ["--", "bash", "-c", f'echo "$RANK $0" > {tmp_path}/command-$RANK', "a b"]
    assert start(openmpi, "-n", 2, "--run-dir", tmp_path / "a", *command).returncode == 0
    assert [(tmp_path / f"command-{rank}").read_text() for rank in (0, 1)] == ["0 a b\n", "1 a b\n"]
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        "import sys, os\nfrom pathlib import Path\nPath(f'module-{os.environ[\"RANK\"]}').write_text(sys.argv[1])\n"
    )
    done = start(openmpi, "-n", 2, "--run-dir", tmp_path / "b", "-m", "package.train", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"module-{rank}").read_text() for rank in (0, 1)] == ["x", "x"]


def test_a_program_may_start_mpi(mpi: Mpi, tmp_path: Path) -> None:
    program = tmp_path / "sum.py"
    program.write_text(
        "from mpi4py import MPI\ncomm = MPI.COMM_WORLD\ntotal = comm.allreduce(comm.rank + 1)\n"
        f"open(f'{tmp_path}/total-{{comm.rank}}', 'w').write(str(total))\n"
    )
    done = start(mpi, "-n", 3, "--run-dir", tmp_path / "run", program)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"total-{rank}").read_text() for rank in range(3)] == ["6", "6", "6"]


def test_the_python_api_launches_programs(openmpi: Mpi, tmp_path: Path) -> None:
    launched = mpitrain.launch(
        [sys.executable, str(REPORTING), "print", str(tmp_path)], ranks=2, run_dir=tmp_path / "run"
    )
    assert launched.wait(show=False, timeout=60).state == "finished"
    assert len(records(tmp_path)) == 2
    failing = mpitrain.launch(["bash", "-c", "exit 4"], ranks=1, run_dir=tmp_path / "failing")
    with pytest.raises(mpitrain.RunFailed) as raised:
        failing.wait(show=False, timeout=60)
    assert raised.value.rank == 0


@pytest.mark.parametrize(
    ("words", "mentioned"),
    [
        (["--", "torchrun", "x.py"], "torchrun starts ranks"),
        (["-m", "torch.distributed.run", "x.py"], "torch.distributed.run"),
        (["--", "python", "-m", "torch.distributed.run", "x.py"], "torch.distributed.run"),
        (["--", "mpirun", "x"], "mpirun starts ranks"),
        (["--", "accelerate", "launch", "x.py"], "accelerate"),
        (["--", "mpitrain", "run", "x.py"], "mpitrain run"),
        (["--", "no-such-program"], "no-such-program"),
        (["--", "python program.py"], "quotation marks"),
        (["python", "program.py"], "-- python program.py"),
        (["functions.py"], "functions.py"),
        (["--"], "command"),
        (["-m"], "module"),
        (["package"], "directory"),
        (["missing.py"], "missing.py"),
        (["data.txt"], "--"),
        (["--mode", "async", "program.py"], "--mode"),
        (["--config", "x.toml", "program.py"], "--config"),
        (["--signal", "KILL", "program.py"], "--signal"),
        (["--stop-sec", "3", "program.py"], "--stop-secs"),
        (["--hang-timeout", "-1", "program.py"], "--hang-timeout"),
        (["--signal", "USR1", "job.py"], "--signal"),
        (["broken_job.py"], "job"),
    ],
)
def test_mistakes_are_one_line(words: list[str], mentioned: str, openmpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "program.py").write_text("print(1)\n")
    (tmp_path / "functions.py").write_text("import os\nNAMES = ['a']\ndef train() -> None: ...\n")
    (tmp_path / "data.txt").write_text("1\n")
    (tmp_path / "job.py").write_text("from mpitrain import Job\ndef job() -> Job: ...\n")
    (tmp_path / "broken_job.py").write_text("from mpitrain import Job\ndef jobs() -> Job: ...\n")
    done = start(openmpi, "-n", 2, *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert mentioned in one_line(done.stderr)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("address", ["192.0.2.7", "no-such-host.invalid"])
def test_an_address_of_another_host_is_one_line(openmpi: Mpi, address: str, tmp_path: Path) -> None:
    done = start(openmpi, "-n", 2, REPORTING, "print", tmp_path, env={"MASTER_ADDR": address}, cwd=tmp_path)
    assert done.returncode == 2 and address in one_line(done.stderr)
    assert not records(tmp_path)


def test_torchrun_in_a_script_is_one_line(openmpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text("print('ranks of its own')\n")
    script = tmp_path / "start.sh"
    script.write_text(f"#!/bin/bash\n{openmpi.python} {tmp_path}/torchrun program.py\n")
    script.chmod(0o755)
    done = start(openmpi, "-n", 2, "--run-dir", tmp_path / "run", "--", script)
    assert done.returncode == 0 and "torchrun" in one_line(done.stderr)
    alone = start(openmpi, "-n", 1, "--run-dir", tmp_path / "alone", "--", script)
    assert alone.returncode == 0 and "mpitrain:" not in alone.stderr


@pytest.mark.parametrize("kind", ["arguments", "module", "executable"])
def test_an_exit_status_is_reported_with_the_last_line(mpi: Mpi, kind: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    program.chmod(0o755)
    words, last = {
        "arguments": ([program, "--lr", "1"], "unrecognized arguments: --lr 1"),
        "module": (["-m", "no_such_module"], "No module named no_such_module"),
        "executable": (["--", program], "#!/bin/bash"),
    }[kind]
    done = start(mpi, "-n", 2, "--run-dir", tmp_path / "run", *words)
    failure = read_failure(tmp_path / "run")
    assert done.returncode == 1 and failure is not None
    assert last in failure.reason and failure.reason in one_line(done.stderr)


def test_a_port_in_use_is_one_line(openmpi: Mpi, tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = start(openmpi, "-n", 2, REPORTING, "print", tmp_path, env={"MASTER_PORT": port}, cwd=tmp_path)
    assert done.returncode == 2 and port in one_line(done.stderr)


def test_watch_shows_the_output_of_a_program(openmpi: Mpi, tmp_path: Path) -> None:
    assert start(openmpi, "-n", 2, "--run-dir", tmp_path / "run", REPORTING, "print", tmp_path).returncode == 0
    done = run([sys.executable, "-m", "mpitrain", "watch", str(tmp_path / "run")], env={"COLUMNS": "80"})
    assert "to standard output" in done.stdout and "2 ranks" in done.stdout


def test_runs_in_a_rank_are_runs_of_their_own(mpi: Mpi, tmp_path: Path) -> None:
    """The outer run ends with the status of its own program."""
    words = ["-n", 2, "--run-dir", tmp_path / "run", PROGRAMS / "inner_runs.py", tmp_path, JOBS / "small.py"]
    done = start(mpi, *words, timeout=180)
    failure = read_failure(tmp_path / "run")
    assert done.returncode == 1 and failure is not None and "ArithmeticError" in failure.reason, done.stderr
    ports = set()
    for rank in range(2):
        found = json.loads((tmp_path / str(rank) / "found.json").read_text())
        sizes = {"run": 2, "exec": 1, "mpirun exec": 2}
        assert found.keys() - {"outer"} == sizes.keys() - ({"mpirun exec"} if mpi.name == "mpich" else set())
        for name, size in [(name, sizes[name]) for name in found if name != "outer"]:
            runs = sorted(found[name], key=lambda one: one["RANK"])
            assert [(one["RANK"], one["WORLD_SIZE"]) for one in runs] == [(str(i), str(size)) for i in range(size)]
            ports |= {(rank, name, one["MASTER_PORT"]) for one in runs}
        for name, workers in (("train", "1"), ("mpirun", "2")):
            assert f"{workers} worker" in (tmp_path / str(rank) / name / "status.json").read_text()
    outer = found["outer"][0]["MASTER_PORT"]
    assert len(ports) == 2 * len(found) - 2 and outer not in {port for _, _, port in ports}
