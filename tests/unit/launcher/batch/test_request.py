"""Options of batch jobs, site files, and the output of schedulers and allocations."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mpitrain.batch_systems.registry import SYSTEMS, allocated_ranks
from mpitrain.batch_systems.resources import Resources, seconds_of
from mpitrain.comm.mpi import is_foreign_launcher, is_on_one_node
from mpitrain.errors import ConfigError
from mpitrain.launcher.batch.request import find_site, read_site, submit_flags
from mpitrain.launcher.batch.scheduler import refusal
from mpitrain.launcher.hosts import Host, assign_ranks, read_hostfile
from mpitrain.plan.options import options_of


def test_a_schedulers_file_of_hosts_has_a_line_for_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a\na\na\nb\nb\nb\n")
    assert assign_ranks(read_hostfile(path), 6) == [Host("a", 3), Host("b", 3)]


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 1800), ("1:30", 90), ("01:00:00", 3600), ("2-3", 183600), ("1-00:00:01", 86401)]
)
def test_durations(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"time": "soon"}, "--time is 'soon'"),
        ({"time": "0"}, "--time is '0'"),
        ({"mem": "lots"}, "--mem is 'lots'"),
        ({"nodes": 0}, "--nodes is 0"),
        ({"array": "a-b"}, "--array is 'a-b'"),
        ({"ntasks": 3, "nodes": 2}, "--ntasks 3 .*--nodes 2"),
        ({"ntasks": 8, "nodes": 2, "tasks_per_node": 8}, "--ntasks 8 .*--nodes 2 .*--tasks-per-node 8"),
        ({"mem": "1G", "mem_per_cpu": "1G"}, "--mem and --mem-per-cpu"),
        ({"ps_nodes": 1, "array": "0-1"}, "--ps-nodes .*--array"),
        ({"gpus": "4", "spare_hosts": 1}, "--spare-hosts.*--gpus-per-node"),
        ({"time": "2", "signal_secs": 120}, "--signal-secs 120 .*120 seconds of --time 2"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(given: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Resources(**given)  # type: ignore[arg-type]


def test_a_site_fills_what_is_not_given(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('partition = "gpu"\nnodes = 2\ncpus-per-task = 4\nsetup = ["module load x"]\nexclusive = true\n')
    options = submit_flags()
    assert read_site(path, options) == {
        "partition": "gpu",
        "nodes": 2,
        "cpus_per_task": 4,
        "setup": ("module load x",),
        "exclusive": True,
    }
    path.write_text('partitoin = "gpu"\n')
    with pytest.raises(ConfigError, match="did you mean 'partition'"):
        read_site(path, options)
    path.write_text("partition = [1]\n")
    with pytest.raises(ConfigError, match=r"partition is \[1\]"):
        read_site(path, options)
    path.write_text("partition =\n")
    with pytest.raises(ConfigError, match=r"site\.toml"):
        read_site(path, options)


def test_where_a_sites_file_is_looked_for(tmp_path: Path) -> None:
    own = tmp_path / ".config" / "mpitrain" / "site.toml"
    own.parent.mkdir(parents=True)
    own.touch()
    home = {"HOME": str(tmp_path)}
    assert find_site(None, home) == own
    assert find_site(None, {**home, "MPITRAIN_SITE": "/x"}) == Path("/x")
    assert find_site(Path("/y"), {**home, "MPITRAIN_SITE": "/x"}) == Path("/y")


def test_every_resource_has_a_flag_and_help() -> None:
    assert {option.name for option in options_of(Resources)} == {f.name for f in dataclasses.fields(Resources)}
    assert all(option.help for option in submit_flags())


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "6"}, 6),
        ({"SLURM_JOB_ID": "1", "SLURM_TASKS_PER_NODE": "2(x3),1"}, 7),
        ({"SLURM_JOB_ID": "1"}, None),
    ],
    ids=str,
)
def test_ranks_of_an_allocation(environ: dict[str, str], ranks: int | None) -> None:
    assert allocated_ranks(environ) == ranks


def test_a_refusal_is_one_line_with_a_fix() -> None:
    output = (
        "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition\n"
    )
    line = refusal(SYSTEMS["slurm"], output)
    assert line.startswith("sbatch ") and "invalid partition specified: x; Invalid partition" in line
    assert "sinfo" in line and "\n" not in line


@pytest.mark.parametrize(
    ("environ", "library", "another"),
    [
        ({"PMI_RANK": "0"}, "Open MPI v5.0.11", True),
        ({"PMI_RANK": "0"}, "Open MPI v4.1.4", False),
        ({"PMIX_RANK": "0"}, "Open MPI v5.0.11", False),
        ({"PMIX_RANK": "0"}, "MPICH Version: 5.0.2", True),
        ({"PMIX_RANK": "0"}, "MPICH Version: 5.0.2 --with-pmix=/usr", False),
        ({"PMIX_RANK": "0", "PMI_RANK": "0"}, "MPICH Version: 5.0.2", False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "MPICH Version: 5.0.2", True),
        ({}, "MPICH Version: 5.0.2", False),
    ],
    ids=str,
)
def test_launchers_and_libraries(environ: dict[str, str], library: str, another: bool) -> None:
    assert is_foreign_launcher(environ, library) == another


@pytest.mark.parametrize(
    ("environ", "one"),
    [
        ({}, True),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_NODES": "1"}, True),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_NODES": "2"}, False),
        ({"PMIX_RANK": "0"}, False),
    ],
    ids=str,
)
def test_ranks_on_one_node(environ: dict[str, str], one: bool) -> None:
    assert is_on_one_node(environ) == one
