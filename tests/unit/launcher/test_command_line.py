"""The launcher's command line, a pure function: notations of hosts, valid and invalid combinations of options."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mpitrain.comm.mpi import check_launcher
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.launcher import bad_hosts
from mpitrain.launcher.command_line import compose
from mpitrain.launcher.hosts import Host, assign_ranks, is_local, parse_hosts, read_hostfile
from mpitrain.launcher.hydra import IntelMpi, Mpich
from mpitrain.launcher.mpi_flavors import recognize
from mpitrain.launcher.mpi_launcher import Launcher, LaunchSpec, LocalMachine
from mpitrain.launcher.open_mpi import OpenMpi
from mpitrain.launcher.preparation import check_restarts, make_launch_spec, resolve_allocation
from mpitrain.plan.config import RunConfig
from mpitrain.plan.launch_options import LaunchOptions
from mpitrain.process.network import interface_of

OPEN, OPEN_4 = OpenMpi("/opt/mpirun", 5), OpenMpi("/opt/mpirun", 4)
MPICH, INTEL = Mpich("/opt/mpirun", 5), IntelMpi("/opt/mpirun", 2021)
ALL = [OPEN, OPEN_4, MPICH, INTEL]
RANK = [sys.executable, "-m", "mpitrain", "train", "a job.py"]
TWO = [Host("a", 4), Host("b", 4)]


def machine(cores: int = 4, root: bool = False, **environ: str) -> LocalMachine:
    return LocalMachine(cores, root, {"PATH": "/bin", **environ})


def words(launcher: Launcher, spec: LaunchSpec, on: LocalMachine | None = None) -> list[str]:
    command = compose(launcher, spec, on or machine(), ["a job.py"])
    assert command.words[-len(RANK) :] == RANK
    assert command.words[0] == "/opt/mpirun"
    return command.words[1 : -len(RANK)]


def test_cores_are_shared_among_ranks() -> None:
    for launcher in (OPEN, OPEN_4):
        assert words(launcher, LaunchSpec(2), machine(16)) == ["-n", "2", "--map-by", "slot:PE=8", "--bind-to", "core"]
    assert words(MPICH, LaunchSpec(3), machine(16)) == ["-n", "3", "-bind-to", "core:5"]
    assert words(INTEL, LaunchSpec(2), machine(16)) == ["-n", "2"]


def test_ranks_that_may_start_processes_leave_cores_for_them() -> None:
    assert words(OPEN, LaunchSpec(2, may_spawn=True), machine(16)) == ["-n", "2", "--bind-to", "none"]
    for ranks in (2, 16):
        assert words(MPICH, LaunchSpec(ranks, may_spawn=True), machine(16)) == ["-n", str(ranks)]
    assert words(OPEN, LaunchSpec(16, may_spawn=True), machine(16)) == words(OPEN, LaunchSpec(16), machine(16))


ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1"}


def of_slurm(answer: str, folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]) -> LocalMachine:
    """Return a machine in an allocation of Slurm, whose commands run a line of shell; there are none without it."""
    if answer:
        for name in ("srun", "squeue"):
            (folder / name).write_text(f"#!/bin/sh\n{answer}\n")
            (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin" if answer else str(folder))
    return LocalMachine(4, False, {**ALLOCATION, **changes})


@pytest.mark.parametrize(
    ("answer", "ranks", "uses"),
    [
        ("echo RUNNING", 1, True),
        ("echo RUNNING", 4, False),
        ("echo no configuration >&2; exit 1", 1, False),
        ("", 2, False),
    ],
)
def test_an_allocation_of_this_host_alone(
    answer: str, ranks: int, uses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = resolve_allocation(of_slurm(answer, tmp_path, monkeypatch, {}), OPEN, LaunchSpec(ranks))
    assert found.allocated == uses
    assert ("PRTE_MCA_ras" in OPEN.arguments(LaunchSpec(ranks), found).environment) == (not uses)
    assert ("fork" in MPICH.arguments(LaunchSpec(ranks), found).words) == (not uses)


@pytest.mark.parametrize(
    ("answer", "changes", "ranks", "named"),
    [
        ("echo RUNNING", {}, 5, "--ntasks 5"),
        ("echo RUNNING", {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}, 2, "--ntasks 2"),
        ("echo RUNNING", {"SLURM_JOB_NODELIST": "another"}, 2, "--ntasks 2"),
        ("echo Invalid job id specified >&2; exit 1", {}, 1, "this job has ended"),
        ("echo COMPLETED", {}, 1, "this job has ended"),
        ("true", {}, 1, "this job has ended"),
        ("echo no configuration >&2; exit 1", {"SLURM_JOB_NODELIST": "another"}, 1, "unset SLURM_JOB_ID"),
        ("", {"SLURM_JOB_NODELIST": "another"}, 2, "unset SLURM_JOB_ID"),
    ],
)
def test_an_allocation_that_cannot_be_used(
    answer: str, changes: dict[str, str], ranks: int, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match=named):
        resolve_allocation(of_slurm(answer, tmp_path, monkeypatch, changes), OPEN, LaunchSpec(ranks))


def test_more_ranks_than_cores_are_not_bound() -> None:
    assert words(OPEN, LaunchSpec(5)) == ["-n", "5", "--oversubscribe", "--bind-to", "none"]
    for launcher in (MPICH, INTEL):
        assert words(launcher, LaunchSpec(5)) == ["-n", "5"]
    assert compose(INTEL, LaunchSpec(5), machine(), []).environment["I_MPI_PIN"] == "0"
    assert compose(OPEN, LaunchSpec(5), machine(), []).environment["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OMPI_MCA_mpi_yield_when_idle" not in compose(OPEN, LaunchSpec(4), machine(), []).environment


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        (OPEN, "--host a:4,b:4 --bind-to none --prtemca plm_ssh_agent go --prtemca prte_if_include 10.1.0.0/16"),
        (OPEN_4, "--host a:4,b:4 --bind-to none --mca plm_rsh_agent go --mca oob_tcp_if_include 10.1.0.0/16"),
        (MPICH, "-hosts a:4,b:4 -launcher ssh -launcher-exec go -iface 10.1.0.0/16"),
        (INTEL, "-hosts a:4,b:4 -bootstrap ssh -bootstrap-exec go -iface 10.1.0.0/16"),
    ],
    ids=str,
)
def test_hosts(launcher: Launcher, expected: str) -> None:
    found = words(launcher, LaunchSpec(8, TWO, "go", "10.1.0.0/16"))
    assert " ".join(found).startswith(f"-n 8 {expected}")
    assert ("btl_tcp_if_include" in found) == (launcher.flavor == "openmpi")


@pytest.mark.parametrize("launcher", ALL, ids=str)
def test_in_an_allocation_the_launcher_finds_hosts_and_ranks(launcher: Launcher) -> None:
    found = words(launcher, LaunchSpec(None), machine(SLURM_JOB_ID="7", OMP_NUM_THREADS="2"))
    assert not {"-n", "--host", "-hosts", "--oversubscribe", "--map-by", "-bind-to"} & {*found}
    if launcher.flavor == "openmpi":
        assert found[:2] == ["--bind-to", "none"]
        assert found[found.index("OMP_NUM_THREADS") - 1] == "-x"


def test_root_is_allowed_only_where_it_is_root() -> None:
    for root in (True, False):
        command = compose(OPEN, LaunchSpec(1), machine(root=root), [])
        assert ("OMPI_ALLOW_RUN_AS_ROOT" in command.environment) == root


@pytest.mark.parametrize("launcher", ALL, ids=str)
@pytest.mark.parametrize("ranks", [1, 9])
@pytest.mark.parametrize("binding", [["--bind-to", "socket"], ["-map-by", "node"], ["--map-by=node"]])
def test_binding_options_of_the_user_are_not_changed(launcher: Launcher, ranks: int, binding: list[str]) -> None:
    assert words(launcher, LaunchSpec(ranks, words=binding)) == ["-n", str(ranks), *binding]
    assert "I_MPI_PIN" not in compose(launcher, LaunchSpec(ranks, words=binding), machine(), []).environment


def test_what_the_user_has_set_is_left_alone() -> None:
    def environment(launcher: Launcher, **environ: str) -> dict[str, str]:
        return compose(launcher, LaunchSpec(9), LocalMachine(1, True, environ), []).environment

    assert environment(OPEN)["OMPI_MCA_osc"] == "^ucx"
    assert "OMPI_MCA_osc" not in environment(OPEN, OMPI_MCA_osc="rdma")
    assert "UCX_LOG_LEVEL" not in environment(MPICH, UCX_LOG_LEVEL="info")
    assert environment(OPEN, OMPI_MCA_osc="^ucx")["OMPI_MCA_osc"] == "^ucx"  # this package may have set it
    assert environment(INTEL, PATH="/bin")["PATH"] == "/opt:/bin"
    assert "PATH" not in environment(INTEL, PATH="/bin:/opt")
    bound = machine(PRTE_MCA_hwloc_default_binding_policy="none")
    assert words(OPEN, LaunchSpec(2), bound) == ["-n", "2"]


def test_variables_reach_ranks_on_other_hosts() -> None:
    on = machine(OMP_NUM_THREADS="2", HOME="/root", OMPI_MCA_btl="tcp,self", MPITRAIN_TERMINAL_COLUMNS="80")
    spec = LaunchSpec(8, TWO, env={"MY_VALUE": "a b"})
    found = words(OPEN, spec, on)
    passed = {found[at + 1] for at, word in enumerate(found) if word == "-x"}
    assert passed == {"OMP_NUM_THREADS", "OMPI_MCA_btl", "OMPI_MCA_osc", "OMPI_MCA_mpi_yield_when_idle", "MY_VALUE"} - (
        {"OMPI_MCA_mpi_yield_when_idle"}  # not set: eight ranks have the eight cores of two hosts
    )
    assert compose(OPEN, spec, on, []).environment["MY_VALUE"] == "a b"
    assert compose(MPICH, spec, on, []).environment["MY_VALUE"] == "a b"
    assert "-x" not in words(OPEN, LaunchSpec(2), on)


def test_kernels_chosen_for_this_cpu_are_not_passed_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.core.openblas.CHOSEN", {"OPENBLAS_CORETYPE": "Haswell"})
    for value, passed in (("Haswell", False), ("Zen", True)):
        monkeypatch.setenv("OPENBLAS_CORETYPE", value)
        assert ("OPENBLAS_CORETYPE" in words(OPEN, LaunchSpec(8, TWO), LocalMachine.detect())) == passed


def test_the_printed_command_can_be_pasted() -> None:
    command = compose(OPEN, LaunchSpec(1, env={"A": "$(x) 'y"}), machine(), ["it's $(here).py", "--x", "a b"])
    assert shlex.split(str(command))[-3:] == ["it's $(here).py", "--x", "a b"]
    assert "A=$(x) 'y" in shlex.split(str(command))


@pytest.mark.parametrize(
    ("answer", "make", "major"),
    [
        ("mpirun (Open MPI) 5.0.11\n", "openmpi", 5),
        ("mpirun.openmpi (Open MPI) 4.1.4\n", "openmpi", 4),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "mpich", 5),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.19 Build 2025\n", "intel", 2021),
    ],
)
def test_a_launcher_is_known_by_its_answer(answer: str, make: str, major: int) -> None:
    found = recognize("mpirun", answer)
    assert found is not None and (found.flavor, found.major) == (make, major)
    assert recognize("mpirun", "mpirun of somebody 1.0") is None


# Hosts.


def test_hosts_as_they_are_given(tmp_path: Path) -> None:
    for text in ("a:4, b:2,a:1,c", "a:4\nb:2\na:1\nc\n"):
        assert parse_hosts(text) == [Host("a", 5), Host("b", 2), Host("c", 0)]
    with pytest.raises(LaunchError) as caught:
        parse_hosts("a:4\nb c")
    assert "\n" not in str(caught.value)
    file = tmp_path / "hosts"
    file.write_text("# two\na slots=4 max_slots=8\n\nb:2  # the other\nc\n")
    assert read_hostfile(file) == [Host("a", 4), Host("b", 2), Host("c", 0)]


@pytest.mark.parametrize(
    "line",
    [
        "a slots=4",
        "a slots = 4",
        "a  slots= 4 # x",
        "a SLOTS=4",
        "a slot=4 max-slots=4",
        "a cpu=4",
        "a count=4",
        "a:4\r",
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_hostfiles_of_other_launchers(tmp_path: Path, line: str, mark: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"{mark}{line}\nuser@b-2.x_y:1\n", encoding="utf-8")
    assert read_hostfile(file) == [Host("a", 4), Host("user@b-2.x_y", 1)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[01,03-05]", "n01 n03 n04 n05"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[8-011]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("a[1-2][3,4]", "a13 a14 a23 a24"),
        ("a,n[1-2],b", "a n1 n2 b"),
    ],
)
def test_lists_of_slurm(text: str, names: str, tmp_path: Path) -> None:
    """The names are those of ``scontrol show hostnames``."""
    assert parse_hosts(text) == [Host(name, 0) for name in names.split()]
    assert parse_hosts(",".join(f"{part}:2" for part in re.split(r",(?!\d)", text))) == [
        Host(name, 2) for name in names.split()
    ]
    (tmp_path / "hosts").write_text("".join(f"{part} slots=2\n" for part in re.split(r",(?!\d)", text)))
    assert read_hostfile(tmp_path / "hosts") == [Host(name, 2) for name in names.split()]


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a:0", "a:x", "a:-1", ":3", "-oProxyCommand=x:1", "a:\u00b2", "a:\u0664", "a:4;b:4", "a b", "a:1:2"),
        *(
            "::1",
            "[::1]:2",
            "fe80::1%eth0",
            "n[5-3]",
            "n[]",
            "n[1-",
            "n[1-]",
            "n[a]",
            "n[1-9999999]",
            "n[1-65536][1-2]",
            "n[1-40000,1-40000]",
            "n[1-" + "9" * 5000 + "]",
            "a:" + "9" * 5000,
            "n]1[",
            "a=4",
            "a:+4",
        ),
    ],
    ids=lambda text: text[:20],
)
def test_hosts_that_are_none(text: str) -> None:
    with pytest.raises(LaunchError, match="--hosts"):
        parse_hosts(text)


def test_a_hostfile_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="No such file"):
        read_hostfile(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "line",
    [
        *(
            "b slots=many",
            "b 4",
            "b:4 slots=2",
            "b slots=2 slots=3",
            "b slots=4 max_slots=2",
            "b max_slots=2",
            "b slots=0",
        ),
        *(
            "b slots=",
            "b slots",
            "b slots=2 gpus=1",
            "b ifname=eth0",
            "slots=4",
            "b:4;c:4",
            "rank 0=b slot=1",
            "b slots=\u00b2",
        ),
    ],
)
def test_lines_of_a_hostfile_that_are_not_understood(tmp_path: Path, line: str) -> None:
    (tmp_path / "hosts").write_text(f"a\n{line}\n", encoding="utf-8")
    with pytest.raises(LaunchError, match="hosts, line 2: "):
        read_hostfile(tmp_path / "hosts")


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ("a:4,b:4", None, "a:4,b:4"),
        ("a:4,b:4", 8, "a:4,b:4"),
        ("a:4,b:4", 6, "a:4,b:2"),
        ("a:4,b:4", 3, "a:3"),
        ("a,b", None, "a:1,b:1"),
        ("a,b", 5, "a:3,b:2"),
        ("a,b,c", 2, "a:1,b:1"),
        ("a:1,b", 5, "a:1,b:4"),
    ],
)
def test_ranks_are_spread_over_hosts(given: str, ranks: int | None, expected: str) -> None:
    assert ",".join(map(str, assign_ranks(parse_hosts(given), ranks))) == expected


@pytest.mark.parametrize("n_hosts", range(1, 5))
@pytest.mark.parametrize("sized", [(), (2,), (1, 3)], ids=str)
def test_hosts_without_a_number_share_the_rest_evenly(n_hosts: int, sized: tuple[int, ...]) -> None:
    first = [Host(f"sized{index}", slots) for index, slots in enumerate(sized)]
    hosts = [*first, *(Host(f"host{index}", 0) for index in range(n_hosts))]
    for rest in range(1, 3 * n_hosts + 1):
        assigned = assign_ranks(hosts, sum(sized) + rest)
        assert assigned[: len(sized)] == first
        shares = [host.slots for host in assigned[len(sized) :]]
        assert sum(shares) == rest and len(shares) == min(rest, n_hosts)
        assert shares == sorted(shares, reverse=True) and shares[0] - shares[-1] <= 1


def test_there_must_be_room() -> None:
    with pytest.raises(LaunchError, match=r"-n 9 .*8 .*a:4,b:4"):
        assign_ranks(TWO, 9)


def test_this_host_is_known() -> None:
    assert is_local("localhost") and is_local("127.0.0.1")
    assert not is_local("198.51.100.1")
    assert interface_of("127.0.0.0/8") == interface_of("lo") == "lo"
    for network in ("198.51.100.0/24", "nothing"):
        with pytest.raises(LaunchError, match=network):
            interface_of(network)


# Flags.


def test_a_host_is_bad_if_only_its_ranks_were_killed_and_more_than_once() -> None:
    assert bad_hosts.failed_twice("a", {"a": 2})
    assert not bad_hosts.failed_twice("a", {"a": 1})
    assert not bad_hosts.failed_twice("a", {"a": 5, "b": 1})  # the program may be the cause
    assert not bad_hosts.failed_twice("", {"a": 2})  # the last failure was of another kind


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (LaunchOptions(hosts="a:1", hostfile=Path("b")), "--hosts and --hostfile"),
        (LaunchOptions(env=["A-B=3"]), "--env A-B=3"),
        (LaunchOptions(env=["=3"]), "--env =3"),
        (LaunchOptions(env=["NOWHERE_SET"]), "--env NOWHERE_SET=VALUE"),
        (LaunchOptions(launcher_args="'a"), "--launcher-args"),
        (LaunchOptions(network="10.1.0.0/99"), "--network 10.1.0.0/99"),
        (LaunchOptions(remote_agent="ssh -p 22"), "--remote-agent 'ssh -p 22'"),
    ],
    ids=str,
)
def test_flags_that_cannot_be(options: LaunchOptions, pattern: str) -> None:
    with pytest.raises(LaunchError, match=pattern):
        make_launch_spec(options, MPICH, machine())


def test_flags_as_they_are_meant() -> None:
    assert make_launch_spec(LaunchOptions(), OPEN, machine()).ranks == 1
    assert make_launch_spec(LaunchOptions(), OPEN, machine(SLURM_JOB_ID="1")).ranks is None
    spec = make_launch_spec(
        LaunchOptions(hosts="a:2,b:2", env=["A=1=2", "PATH"], launcher_args="--x 'y z'"), OPEN, machine()
    )
    assert (spec.ranks, spec.hosts) == (4, [Host("a", 2), Host("b", 2)])
    assert spec.env == {"A": "1=2", "PATH": "/bin"}
    assert spec.words == ["--x", "y z"]


def test_spare_hosts_have_no_ranks_and_bad_hosts_are_not_used() -> None:
    options = LaunchOptions(hosts="a:2,b:2,c:2,d:2", spare_hosts=1)
    spec = make_launch_spec(options, OPEN, machine())
    assert (spec.ranks, [host.name for host in spec.hosts or ()], spec.spares) == (6, ["a", "b", "c"], [Host("d", 2)])
    spec = make_launch_spec(options, OPEN, machine(), bad={"b": "did not answer", "x": "no disk"})
    assert (spec.ranks, [host.name for host in spec.hosts or ()], spec.spares) == (6, ["a", "c", "d"], [])
    spec = make_launch_spec(replace(options, spare_hosts=2), OPEN, machine(), bad={"d": "did not answer"})
    assert (spec.ranks, [host.name for host in spec.hosts or ()], spec.spares) == (4, ["a", "b"], [Host("c", 2)])
    for needed in ({"ranks": 4}, {"min_ranks": 4}):  # such as in a requeued job with the same nodes
        few = LaunchOptions(hosts="a:2,b:2", **needed)
        assert make_launch_spec(few, OPEN, machine(), bad={"a": "did not answer"}).ranks == 4
    with pytest.raises(LaunchError, match=bad_hosts.FILE):
        make_launch_spec(LaunchOptions(hosts="a:2"), OPEN, machine(), bad={"a": "did not answer"})
    for other in (replace(options, spare_hosts=4), LaunchOptions(spare_hosts=1)):
        with pytest.raises(LaunchError, match="--spare-hosts"):
            make_launch_spec(other, OPEN, machine())


def test_bad_hosts_are_kept_with_their_reasons(tmp_path: Path) -> None:
    assert bad_hosts.read(tmp_path) == {}
    bad_hosts.record(tmp_path, {"n1": "did not answer"})
    (tmp_path / bad_hosts.FILE).write_text("# by hand\n" + (tmp_path / bad_hosts.FILE).read_text() + "\nn2\n")
    bad_hosts.record(tmp_path, {"n3": "had no disk"})
    assert list(bad_hosts.read(tmp_path)) == ["n1", "n2", "n3"]
    assert bad_hosts.read(tmp_path)["n3"] == "had no disk"


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (LaunchOptions(min_ranks=1), "--max-restarts"),
        (LaunchOptions(hosts="a:1,b:1", spare_hosts=1), "--max-restarts"),
        (LaunchOptions(min_ranks=1, max_restarts=1), "--hosts"),
        (LaunchOptions(min_ranks=9, max_restarts=1, hosts="a:8"), "--min-ranks 9 .* 8"),
    ],
    ids=str,
)
def test_fewer_ranks_need_hosts_and_restarts(options: LaunchOptions, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        check_restarts(options, make_launch_spec(options, OPEN, machine()), RunConfig())


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS"])
def test_singletons_of_another_launcher_are_refused(variable: str) -> None:
    check_launcher({variable: "1"}, 1)
    check_launcher({variable: "4"}, 4)
    check_launcher({}, 1)
    with pytest.raises(LaunchError, match="4 ranks"):
        check_launcher({variable: "4"}, 1)


def test_a_restart_in_a_slurm_allocation_does_not_wait_for_the_step_of_a_failed_node() -> None:
    in_slurm = LocalMachine(4, False, {"SLURM_JOB_ID": "1"})
    spec = LaunchSpec(4, [Host("n1", 2), Host("n2", 2)])
    expected = ["plm_slurm_args", "--overlap --mem=0"]
    for launcher, flag in (OPEN, "--prtemca"), (OPEN_4, "--mca"):
        words = compose(launcher, spec, in_slurm, [], is_restart=True).words
        at = words.index("plm_slurm_args")
        assert words[at - 1 : at + 2] == [flag, *expected]
        assert "plm_slurm_args" not in compose(launcher, spec, in_slurm, []).words
        assert "plm_slurm_args" not in compose(launcher, spec, machine(), [], is_restart=True).words
    name = "HYDRA_LAUNCHER_EXTRA_ARGS"
    assert compose(MPICH, spec, in_slurm, [], is_restart=True).environment[name] == expected[1]
    assert name not in compose(MPICH, spec, in_slurm, []).environment
    set_by_slurm = LocalMachine(4, False, {"SLURM_JOB_ID": "1", name: "--external-launcher"})
    value = compose(MPICH, spec, set_by_slurm, [], is_restart=True).environment[name]
    assert value == f"--external-launcher {expected[1]}"
    by_agent = replace(spec, agent="ssh-agent-program")
    assert name not in compose(MPICH, by_agent, in_slurm, [], is_restart=True).environment
    assert "plm_slurm_args" not in compose(OPEN, by_agent, in_slurm, [], is_restart=True).words
