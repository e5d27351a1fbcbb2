"""Every option of a run, validated in one place."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError

MODES = ("sync", "async", "ssp", "backup", "local")
Precision = Literal["float32", "bfloat16", "float16"]
SERVED = ("async", "ssp", "backup")  # parameters live on servers, or in a node's shared memory


def _option(default: Any, help: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True)
class ParallelConfig:
    """How workers agree on the parameters."""

    mode: str = _option(
        "sync",
        "How workers agree on the parameters; MODULE:CLASS is a strategy of your own.",
        "sync|async|ssp|backup|local|MODULE:CLASS",
    )
    staleness: int | None = _option(
        None, "ssp: maximum number of steps a worker may be ahead of the slowest one.  [default: 3]", "S"
    )
    staleness_scaling: bool = _option(False, "async, ssp: divide the learning rate by the gradient's staleness.")
    backup_workers: int | None = _option(
        None, "backup: number of spare workers B; a step uses the first N-B gradients.  [default: 1]", "B"
    )
    local_steps: int | None = _option(None, "local: steps between two parameter averages.  [default: 8]", "H")
    elastic_rho: float | None = _option(
        None, "local: elastic averaging; move workers and a center towards each other by this fraction.", "RHO"
    )
    shared_memory: bool = _option(True, "Average gradients in memory shared by the ranks of a node.")
    bucket_bytes: int = _option(1 << 20, "Minimum size of a gradient bucket in bytes.", "BYTES")


@dataclass(frozen=True)
class ServerConfig:
    """Parameter servers, and the gradients sent to them."""

    ps: int = _option(
        0, "async, ssp, backup: number of parameter servers; 0 keeps the parameters in the node's shared memory.", "K"
    )
    ps_placement: Literal["spread", "pack", "first"] = _option(
        "spread", "Ranks that become servers: spread over nodes, packed on few nodes, or the first ranks."
    )
    ps_hosts: list[str] | None = _option(None, "Hosts whose ranks become servers.", "HOST,...")
    placement: Literal["round_robin", "greedy", "partitioned"] = _option(
        "partitioned", "How variables are distributed over the servers."
    )
    push_precision: Precision | None = _option(
        None, "Data type of gradients sent to servers on other nodes.  [default: that of --dtype]"
    )
    one_sided: bool = _option(
        True, "Use RMA windows to reach servers on other nodes; --no-one-sided uses point-to-point messages."
    )


@dataclass(frozen=True)
class TrainingConfig:
    """The computation of a step, and the number of steps."""

    batch_size: int | None = _option(None, "Examples per worker and step.", "N")
    train_steps: int | None = _option(None, "Number of training steps.", "N")
    accumulate_steps: int = _option(1, "Split a worker's batch into this many micro-batches, to save memory.", "N")
    seed: int = _option(0, "Random seed for initialization, data order and dropout.", "N")
    dtype: Literal["float32", "float64"] = _option("float32", "Data type of parameters and arithmetic.")
    nan: Literal["stop", "skip", "ignore"] = _option("stop", "Action on a non-finite loss.")
    init_from: Path | None = _option(
        None,
        "Initialize parameters from a checkpoint or a run directory where they match, unless the run resumes from its "
        "own checkpoint.",
        "PATH",
    )
    validate_steps: int = _option(1000, "Validate every N steps; 0: only at the end.", "N")
    validate_secs: float = _option(0.0, "Also validate every S seconds; 0: never.", "S")


@dataclass(frozen=True)
class DeviceConfig:
    """The devices of a rank, and their precision."""

    device: Literal["auto", "cpu", "gpu"] = _option("auto", "Device of the workers; auto: GPUs if there are any.")
    devices_per_rank: int = _option(1, "Split a rank's batch over this many devices.", "N")
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = _option(
        "float32",
        "GPU compute precision. tf32: matrix products round their inputs to TF32; bfloat16, float16: activations and "
        "a copy of the parameters are 16-bit. Parameters, gradients and sums stay float32.",
    )
    threads: int | None = _option(None, "BLAS threads per rank.  [default: cores / ranks of the node]", "N")
    soft_placement: bool = _option(True, "Workers without a GPU use the CPU if other workers have GPUs.")
    gpu_memory_fraction: float | None = _option(
        None, "Maximum fraction of a GPU's memory that a worker may use.  [default: an equal share]", "FRACTION"
    )
    gpu_memory_growth: bool = _option(
        True, "Allocate GPU memory as needed; --no-gpu-memory-growth allocates the worker's share at startup."
    )
    gpu_transport: Literal["auto", "nccl", "ipc", "cuda-aware", "host"] = _option(
        "auto", "sync: how workers exchange GPU gradients; auto: the fastest transport, measured at startup."
    )


@dataclass(frozen=True)
class SavingConfig:
    """When and how checkpoints are written."""

    save_steps: int = _option(0, "Save a checkpoint every N steps; 0: only at the end.", "N")
    save_secs: float = _option(0.0, "Save a checkpoint every S seconds; 0: never.", "S")
    keep: int = _option(0, "Keep the newest N checkpoints, and always at least one complete one; 0: keep all.", "N")
    keep_every: int = _option(0, "With --keep: also keep the checkpoint of every M-th step.", "M")
    save_compression: Literal["none", "gzip"] = _option("none", "Compression of checkpoints.")
    save_background: bool = _option(True, "Write checkpoints in the background, from a copy of the state.")
    save_per_node: bool | None = _option(
        None,
        "sync, local: each node writes a shard of the checkpoint.  [default: on several nodes, from 1 GiB of state]",
    )
    save_one_file: bool | None = _option(
        None, "sync, local: all nodes write their shards into one shared file.  [default: if HDF5 is parallel]"
    )


@dataclass(frozen=True)
class RunDirConfig:
    """The run directory, and when a run resumes and ends."""

    run_dir: Path | None = _option(None, "Output directory.  [default: runs/JOB-TIME]", "DIR")
    resume: str = _option(
        "auto",
        "auto: resume from the newest checkpoint in the run directory; never; or from PATH: a checkpoint, or a run "
        "directory (uses its newest checkpoint).",
        "auto|never|PATH",
    )
    time_limit: float | None = _option(
        None, "Save and exit before S seconds have passed; Slurm's limit (SLURM_JOB_END_TIME) always applies.", "S"
    )
    hang_timeout: float | None = _option(
        None,
        "End the run and report the rank if a rank makes no progress for S seconds; 0: never.  "
        "[default: 10 times the longest activity so far, at least 60]",
        "S",
    )
    long_timeout: float = _option(1800.0, "The same for starting, compiling, validating, saving and ending.", "S")


@dataclass(frozen=True)
class OutputConfig:
    """Output and records of a run."""

    log_steps: int = _option(100, "Report the loss every N steps; 0: never.", "N")
    log_secs: float = _option(
        10.0, "Without a terminal, print at most one of these reports in S seconds; 0: print all.", "S"
    )
    tensorboard: bool | None = _option(None, "Write TensorBoard event files.  [default: if tensorboardX is installed]")
    histogram_steps: int = _option(
        0, "Add histograms of parameters and gradients to TensorBoard every N steps; 0: never.", "N"
    )
    trace: bool = _option(False, "Record a timeline of each rank, for trace viewers and mpitrain report.")
    trace_steps: int = _option(
        1000, "Keep the individual spans of the last N steps in a trace; totals cover all steps.", "N"
    )
    log_device_placement: bool = _option(False, "Print the location of each rank, layer and vector.")


@dataclass(frozen=True)
class RunConfig:
    """Options of a training run, grouped. Flags and TOML keys are flat. Options left at None are set by the job file.

    Raises:
        ConfigError: An option is out of range; the message states what is valid.
    """

    parallel: ParallelConfig = ParallelConfig()
    servers: ServerConfig = ServerConfig()
    training: TrainingConfig = TrainingConfig()
    device: DeviceConfig = DeviceConfig()
    saving: SavingConfig = SavingConfig()
    run: RunDirConfig = RunDirConfig()
    output: OutputConfig = OutputConfig()

    @classmethod
    def of(cls, **options: Any) -> RunConfig:
        """Return the configuration with these options, by their flat names; all others have their defaults."""
        groups = {}
        for name, group in typing.get_type_hints(cls).items():
            given = {field.name for field in dataclasses.fields(group)} & set(options)
            groups[name] = group(**{option: options.pop(option) for option in given})
        if options:
            raise TypeError(f"unknown options: {', '.join(sorted(options))}")
        return cls(**groups)

    def options(self) -> dict[str, Any]:
        """Return all options by their flat names."""
        groups = [getattr(self, group.name) for group in dataclasses.fields(self)]
        return {name: value for group in groups for name, value in vars(group).items()}

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUM.items():
            value = self.options()[name]
            if value is not None and value < minimum:
                raise ConfigError(f"{flag(name)} is {value}: must be >= {minimum}")
        self._check_modes()
        self._check_device()
        rho, saving, output = self.parallel.elastic_rho, self.saving, self.output
        if rho is not None and not 0 < rho < 1:
            raise ConfigError(f"--elastic-rho is {rho}: must be > 0 and < 1")
        if saving.save_one_file and saving.save_compression != "none":
            raise ConfigError(
                f"--save-compression {saving.save_compression} cannot be combined with --save-one-file; remove one"
            )
        if saving.keep_every and not saving.keep:
            raise ConfigError(
                f"--keep-every {saving.keep_every} requires --keep N; without --keep all checkpoints are kept"
            )
        if output.histogram_steps and output.tensorboard is False:
            raise ConfigError(
                f"--histogram-steps {output.histogram_steps} requires TensorBoard events; remove --no-tensorboard"
            )

    def _check_device(self) -> None:
        device, dtype, mode = self.device, self.training.dtype, self.parallel.mode
        fraction, on_cpu = device.gpu_memory_fraction, device.device == "cpu"
        if fraction is not None and not 0 < fraction <= 1:
            raise ConfigError(f"--gpu-memory-fraction is {fraction}: must be > 0 and <= 1")
        if device.precision != "float32" and (dtype != "float32" or (on_cpu and device.precision != "bfloat16")):
            other = "--device cpu" if on_cpu else f"--dtype {dtype}"
            raise ConfigError(
                f"--precision {device.precision} requires GPUs and --dtype float32, but {other} is set; remove one"
            )
        if device.precision == "float16" and mode != "sync":
            raise ConfigError(
                f"--precision float16 scales the loss over all GPUs and requires --mode sync, but the mode is {mode}; "
                "use bfloat16 or change --mode"
            )
        if on_cpu and device.gpu_transport != "auto":
            raise ConfigError(
                f"--gpu-transport {device.gpu_transport} requires GPUs, but --device cpu is set; remove one"
            )
        if on_cpu and not device.soft_placement:
            raise ConfigError("--no-soft-placement requires GPUs, but --device cpu is set; remove one")

    def _check_modes(self) -> None:
        """Reject options that have no effect in this mode; the user probably meant another mode."""
        mode, hosts, ps = self.parallel.mode, self.servers.ps_hosts, self.servers.ps
        if mode not in MODES and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", mode):
            near = difflib.get_close_matches(mode, MODES, n=1)
            raise ConfigError(
                f"--mode is {mode!r}: must be {', '.join(MODES)}, or package.module:Class"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        for name, modes in _MODES_OF.items():
            value = self.options()[name]
            given = flag("no_" + name if value is False else name)
            own_mode = ":" in mode and "sync" in modes  # a user's strategy
            if value != FIELDS[name].default and mode not in modes and not own_mode:
                raise ConfigError(
                    f"{given} requires --mode {', '.join(modes)}, but the mode is {mode}; "
                    f"remove {given} or change --mode"
                )
        if hosts is not None and len(hosts) > ps:
            raise ConfigError(
                f"--ps-hosts names {len(hosts)} hosts ({', '.join(hosts)}) for --ps {ps}; "
                "name at most one host per server"
            )

    def check_ranks(self, ranks: int) -> None:
        """Check that the roles can be assigned to ``ranks`` ranks.

        Raises:
            ConfigError: There is no worker, or not more workers than backup workers.
        """
        parallel, ps = self.parallel, self.servers.ps
        workers = ranks - ps
        if workers < 1:
            raise ConfigError(
                f"--ps {ps} leaves no worker of {ranks} rank{'s' * (ranks != 1)}: "
                f"start at least {ps + 1} ranks or reduce --ps"
            )
        if self.served and not ps and not parallel.shared_memory and ranks > 1:
            raise ConfigError(
                f"--no-shared-memory: {ranks} ranks have no place for the parameters of --mode {parallel.mode}; "
                "set --ps 1 or more, or remove --no-shared-memory"
            )
        if parallel.mode == "backup" and parallel.backup_workers is not None and parallel.backup_workers >= workers:
            raise ConfigError(
                f"--backup-workers is {parallel.backup_workers} with {workers} worker{'s' * (workers != 1)}: "
                f"must be <= {workers - 1}"
            )

    def gradients_per_step(self, workers: int) -> int:
        """Return the number of gradients that one update uses, given the number of workers."""
        mode, backup_workers = self.parallel.mode, self.parallel.backup_workers
        if mode in ("async", "ssp"):
            return 1
        if mode != "backup":
            return workers
        return workers - (min(1, workers - 1) if backup_workers is None else backup_workers)

    @property
    def served(self) -> bool:
        """Whether parameters live on servers and workers run at their own pace."""
        return self.parallel.mode in SERVED

    def merged(self, defaults: Mapping[str, Any]) -> RunConfig:
        """Return a copy in which ``defaults`` replace options that are None."""
        options = self.options()
        return self.of(**options | {n: v for n, v in defaults.items() if n in options and options[n] is None})

    def as_toml(self) -> dict[str, Any]:
        """Return the options as TOML values: paths as text, None left out."""
        return plain(self.options())


GROUPS: list[type] = list(typing.get_type_hints(RunConfig).values())
# The fields of all groups, by the flat names of the options.
FIELDS = {each.name: each for group in GROUPS for each in dataclasses.fields(group)}

_AT_LEAST_0 = (
    "train_steps seed log_steps log_secs validate_steps validate_secs save_steps save_secs histogram_steps keep "
    "keep_every hang_timeout"
)
_AT_LEAST_1 = "batch_size accumulate_steps devices_per_rank trace_steps time_limit long_timeout threads local_steps"
_MINIMUM = dict.fromkeys([*_AT_LEAST_0.split(), "bucket_bytes", "ps", "staleness", "backup_workers"], 0)
_MINIMUM |= dict.fromkeys(_AT_LEAST_1.split(), 1)

_MODES_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys("ps ps_hosts ps_placement placement one_sided push_precision".split(), SERVED),
    "staleness": ("ssp",),
    "staleness_scaling": ("async", "ssp"),
    "backup_workers": ("backup",),
    "gpu_transport": ("sync",),
    **dict.fromkeys(["local_steps", "elastic_rho"], ("local",)),
    **dict.fromkeys(["save_per_node", "save_one_file"], ("sync", "local")),
}


def flag(name: str) -> str:
    """Return the command-line flag of an option or parameter."""
    return "--" + name.replace("_", "-")


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that TOML and JSON can hold: None is left out, other types become their text."""
    return {name: _plain(value) for name, value in options.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else str(value)
