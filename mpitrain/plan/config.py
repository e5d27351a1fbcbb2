"""Every option of a run, validated in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError

Mode = Literal["sync", "async", "ssp", "backup", "local"]
Precision = Literal["float32", "bfloat16", "float16"]
SERVED = ("async", "ssp", "backup")  # parameters live on servers, or in a node's shared memory


def _option(default: Any, help: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True)
class RunConfig:
    """Options of a training run. Options left at None are set by the job file.

    Raises:
        ConfigError: An option is out of range; the message says what is valid.
    """

    mode: Mode = _option("sync", "How workers synchronize the parameters.")
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
    push_precision: Precision | None = _option(
        None, "Data type of gradients sent to servers on other nodes.  [default: that of --dtype]"
    )
    one_sided: bool = _option(
        True, "Use RMA windows to reach servers on other nodes; --no-one-sided uses point-to-point messages."
    )
    log_device_placement: bool = _option(False, "Print the location of each rank, layer and vector.")
    batch_size: int | None = _option(None, "Examples per worker and step.", "N")
    train_steps: int | None = _option(None, "Number of training steps.", "N")
    accumulate_steps: int = _option(1, "Split a worker's batch into this many micro-batches, to save memory.", "N")
    seed: int = _option(0, "Random seed for initialization, data order and dropout.", "N")
    device: Literal["auto", "cpu", "gpu"] = _option("auto", "Device of the workers; auto: GPUs if there are any.")
    soft_placement: bool = _option(True, "Workers without a GPU use the CPU if other workers have GPUs.")
    gpu_memory_fraction: float | None = _option(
        None, "Maximum fraction of a GPU's memory that a worker may use.  [default: an equal share]", "FRACTION"
    )
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = _option(
        "float32",
        "GPU compute precision. tf32: matrix products round their inputs to TF32; bfloat16, float16: activations and "
        "a copy of the parameters are 16-bit. Parameters, gradients and sums stay float32.",
    )
    gpu_transport: Literal["auto", "nccl", "ipc", "cuda-aware", "host"] = _option(
        "auto", "sync: how workers exchange GPU gradients; auto: the fastest transport, measured at startup."
    )
    gpu_memory_growth: bool = _option(
        True, "Allocate GPU memory as needed; --no-gpu-memory-growth allocates the worker's share at startup."
    )
    devices_per_rank: int = _option(1, "Split a rank's batch over this many devices.", "N")
    dtype: Literal["float32", "float64"] = _option("float32", "Data type of parameters and arithmetic.")
    run_dir: Path | None = _option(None, "Output directory.  [default: runs/JOB-TIME]", "DIR")
    resume: str = _option(
        "auto",
        "auto: resume from the newest checkpoint in the run directory; never; or the path of a checkpoint.",
        "auto|never|PATH",
    )
    log_steps: int = _option(100, "Report the loss every N steps; 0: never.", "N")
    validate_steps: int = _option(1000, "Validate every N steps; 0: only at the end.", "N")
    save_steps: int = _option(0, "Save a checkpoint every N steps; 0: only at the end.", "N")
    tensorboard: bool | None = _option(None, "Write TensorBoard event files.  [default: if tensorboardX is installed]")
    histogram_steps: int = _option(
        0, "Add histograms of parameters and gradients to TensorBoard every N steps; 0: never.", "N"
    )
    trace: bool = _option(False, "Record a timeline of each rank, for trace viewers and mpitrain report.")
    trace_steps: int = _option(
        1000, "Keep the individual spans of the last N steps in a trace; totals cover all steps.", "N"
    )
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
    time_limit: float | None = _option(
        None, "Save and exit before S seconds have passed; Slurm's limit (SLURM_JOB_END_TIME) always applies.", "S"
    )
    init_from: Path | None = _option(
        None, "Initialize parameters from a checkpoint where they match, unless the run resumes from its own.", "PATH"
    )
    nan: Literal["stop", "skip", "ignore"] = _option("stop", "Action on a non-finite loss.")
    threads: int | None = _option(None, "BLAS threads per rank.  [default: cores / ranks of the node]", "N")
    shared_memory: bool = _option(True, "Average gradients in memory shared by the ranks of a node.")
    bucket_bytes: int = _option(1 << 20, "Minimum size of a gradient bucket in bytes.", "BYTES")

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUM.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{flag(name)} is {value}: must be >= {minimum}")
        if self.elastic_rho is not None and not 0 < self.elastic_rho < 1:
            raise ConfigError(f"--elastic-rho is {self.elastic_rho}: must be > 0 and < 1")
        if self.gpu_memory_fraction is not None and not 0 < self.gpu_memory_fraction <= 1:
            raise ConfigError(f"--gpu-memory-fraction is {self.gpu_memory_fraction}: must be > 0 and <= 1")
        if self.save_one_file and self.save_compression != "none":
            raise ConfigError(
                f"--save-compression {self.save_compression} cannot be combined with --save-one-file; remove one"
            )
        if self.precision != "float32" and (self.dtype != "float32" or self.device == "cpu"):
            other = "--device cpu" if self.device == "cpu" else f"--dtype {self.dtype}"
            raise ConfigError(
                f"--precision {self.precision} requires GPUs and --dtype float32, but {other} is set; remove one"
            )
        if self.precision == "float16" and self.mode != "sync":
            raise ConfigError(
                f"--precision float16 scales the loss over all GPUs and requires --mode sync, but the mode is "
                f"{self.mode}; use bfloat16 or change --mode"
            )
        if self.device == "cpu" and self.gpu_transport != "auto":
            raise ConfigError(
                f"--gpu-transport {self.gpu_transport} requires GPUs, but --device cpu is set; remove one"
            )
        if self.device == "cpu" and not self.soft_placement:
            raise ConfigError("--no-soft-placement requires GPUs, but --device cpu is set; remove one")
        if self.histogram_steps and self.tensorboard is False:
            raise ConfigError(
                f"--histogram-steps {self.histogram_steps} requires TensorBoard events; remove --no-tensorboard"
            )
        if self.keep_every and not self.keep:
            raise ConfigError(
                f"--keep-every {self.keep_every} requires --keep N; without --keep all checkpoints are kept"
            )
        self._check_modes()

    def _check_modes(self) -> None:
        """Reject options that have no effect in this mode; the user probably meant another mode."""
        for name, modes in _MODES_OF.items():
            given = flag("no_" + name if getattr(self, name) is False else name)
            if getattr(self, name) != RunConfig.__dataclass_fields__[name].default and self.mode not in modes:
                raise ConfigError(
                    f"{given} requires --mode {', '.join(modes)}, but the mode is {self.mode}; "
                    f"remove {given} or change --mode"
                )
        if self.ps_hosts is not None and len(self.ps_hosts) > self.ps:
            raise ConfigError(
                f"--ps-hosts names {len(self.ps_hosts)} hosts ({', '.join(self.ps_hosts)}) for --ps {self.ps}; "
                "name at most one host per server"
            )

    def check_ranks(self, ranks: int) -> None:
        """Check that the roles can be assigned to ``ranks`` ranks.

        Raises:
            ConfigError: There is no worker, or not more workers than backup workers.
        """
        workers = ranks - self.ps
        if workers < 1:
            raise ConfigError(
                f"--ps {self.ps} leaves no worker of {ranks} rank{'s' * (ranks != 1)}: "
                f"start at least {self.ps + 1} ranks or reduce --ps"
            )
        if self.served and not self.ps and not self.shared_memory and ranks > 1:
            raise ConfigError(
                f"--no-shared-memory: {ranks} ranks have no place for the parameters of --mode {self.mode}; "
                "set --ps 1 or more, or remove --no-shared-memory"
            )
        if self.mode == "backup" and self.backup_workers is not None and self.backup_workers >= workers:
            raise ConfigError(
                f"--backup-workers is {self.backup_workers} with {workers} worker{'s' * (workers != 1)}: "
                f"must be <= {workers - 1}"
            )

    def gradients_per_step(self, workers: int) -> int:
        """Return the number of gradients that one update uses, given the number of workers."""
        if self.mode in ("async", "ssp"):
            return 1
        if self.mode != "backup":
            return workers
        spare = min(1, workers - 1) if self.backup_workers is None else self.backup_workers
        return workers - spare

    @property
    def served(self) -> bool:
        """Whether parameters live on servers and workers run at their own pace."""
        return self.mode in SERVED

    def merged(self, defaults: Mapping[str, Any]) -> RunConfig:
        """Return a copy in which ``defaults`` replace options that are None."""
        known = {f.name for f in dataclasses.fields(self)}
        missing = {n: v for n, v in defaults.items() if n in known and getattr(self, n) is None}
        return dataclasses.replace(self, **missing)

    def as_toml(self) -> dict[str, Any]:
        """Return the options as TOML values: paths as text, None left out."""
        return plain(dataclasses.asdict(self))


_MINIMUM = {
    "batch_size": 1,
    "train_steps": 0,
    "accumulate_steps": 1,
    "devices_per_rank": 1,
    "seed": 0,
    "log_steps": 0,
    "validate_steps": 0,
    "save_steps": 0,
    "histogram_steps": 0,
    "trace_steps": 1,
    "save_secs": 0,
    "keep": 0,
    "keep_every": 0,
    "time_limit": 1,
    "threads": 1,
    "bucket_bytes": 0,
    "ps": 0,
    "staleness": 0,
    "backup_workers": 0,
    "local_steps": 1,
}

_MODES_OF: dict[str, tuple[Mode, ...]] = {
    "ps": ("async", "ssp", "backup"),
    "ps_hosts": ("async", "ssp", "backup"),
    "ps_placement": ("async", "ssp", "backup"),
    "placement": ("async", "ssp", "backup"),
    "one_sided": ("async", "ssp", "backup"),
    "push_precision": ("async", "ssp", "backup"),
    "staleness": ("ssp",),
    "staleness_scaling": ("async", "ssp"),
    "backup_workers": ("backup",),
    "local_steps": ("local",),
    "save_per_node": ("sync", "local"),
    "save_one_file": ("sync", "local"),
    "elastic_rho": ("local",),
    "gpu_transport": ("sync",),
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
