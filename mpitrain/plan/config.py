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
SERVED = ("async", "ssp", "backup")  # modes in which parameters live with servers, or in a node's shared memory


def _option(default: Any, help: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True)
class RunConfig:
    """How a job is trained. Options left at None are the job file's to choose.

    Raises:
        ConfigError: An option is out of range; the message says what is valid.
    """

    mode: Mode = _option("sync", "How the ranks agree on the parameters.")
    ps: int = _option(0, "Ranks that are parameter servers (async, ssp, backup); 0: the node's memory serves.", "K")
    ps_placement: Literal["spread", "pack", "first"] = _option(
        "spread", "Which ranks are servers: one a node first, all on as few nodes as hold them, or the first ranks."
    )
    ps_hosts: list[str] | None = _option(None, "Hosts whose ranks are to be servers.", "HOST,...")
    placement: Literal["round_robin", "greedy", "partitioned"] = _option(
        "partitioned", "How variables are laid out over the servers."
    )
    staleness: int | None = _option(None, "ssp: steps a worker may be ahead of the slowest.  [default: 3]", "S")
    staleness_scaling: bool = _option(False, "async, ssp: divide the learning rate by the gradient's staleness.")
    backup_workers: int | None = _option(
        None, "backup: a step takes the first gradients of all workers but so many.  [default: 1]", "B"
    )
    local_steps: int | None = _option(None, "local: steps between two averages.  [default: 8]", "H")
    elastic_rho: float | None = _option(
        None, "local: pull workers and a center towards each other by this part, in place of averaging.", "RHO"
    )
    push_precision: Precision | None = _option(
        None, "Type that gradients have on their way to servers on other nodes.  [default: that of --dtype]"
    )
    one_sided: bool = _option(True, "Reach servers on other nodes by RMA windows; else by messages.")
    log_device_placement: bool = _option(False, "Print where each rank, layer and vector is.")
    batch_size: int | None = _option(None, "Examples a worker takes for one step.", "N")
    train_steps: int | None = _option(None, "Stop after this step.", "N")
    accumulate_steps: int = _option(1, "Compute a worker's batch in this many parts, to save memory.", "N")
    seed: int = _option(0, "Decides initial values, the order of examples and dropout.", "N")
    device: Literal["auto", "cpu", "gpu"] = _option("auto", "Where workers compute; auto: on GPUs where there are any.")
    soft_placement: bool = _option(True, "A worker without a GPU computes on its processor, where others have one.")
    gpu_memory_fraction: float | None = _option(
        None, "Of a GPU's memory, the part that a worker may take.  [default: a fair share]", "PART"
    )
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = _option(
        "float32",
        "What a GPU computes with. tf32: matrices are rounded to it for products; bfloat16, float16: activations and "
        "copies of the parameters have 16 bits. Parameters, gradients and sums stay float32.",
    )
    gpu_transport: Literal["auto", "nccl", "ipc", "cuda-aware", "host"] = _option(
        "auto", "sync: how GPUs' gradients travel between workers; auto: the fastest way, as measured at the start."
    )
    gpu_memory_growth: bool = _option(True, "Take a GPU's memory as it is needed; else all of the part at once.")
    devices_per_rank: int = _option(1, "Cut a rank's batch over so many devices.", "N")
    dtype: Literal["float32", "float64"] = _option("float32", "Type of parameters and of all arithmetic.")
    run_dir: Path | None = _option(None, "Folder for everything the run leaves.  [default: runs/JOB-TIME]", "DIR")
    resume: str = _option(
        "auto",
        "auto: go on from the run directory's newest checkpoint; never; or a checkpoint.",
        "auto|never|PATH",
    )
    log_steps: int = _option(100, "Report the loss every N steps; 0 for never.", "N")
    validate_steps: int = _option(1000, "Validate every N steps; 0 for only at the end.", "N")
    save_steps: int = _option(0, "Save a checkpoint every N steps; 0 for only at the end.", "N")
    tensorboard: bool | None = _option(None, "Write TensorBoard events.  [default: where tensorboardX is installed]")
    histogram_steps: int = _option(0, "Add histograms of parameters and gradients to them every N steps.", "N")
    trace: bool = _option(False, "Record where each rank's time goes, for trace viewers and mpitrain report.")
    trace_steps: int = _option(1000, "Steps whose single spans a trace keeps, the last ones; its sums are of all.", "N")
    save_secs: float = _option(0.0, "Save a checkpoint every S seconds; 0 for never.", "S")
    keep: int = _option(0, "Keep the newest N checkpoints, and never less than one that is whole; 0 for all.", "N")
    keep_every: int = _option(0, "With --keep: keep those of every M-th step, too.", "M")
    save_compression: Literal["none", "gzip"] = _option("none", "Compress checkpoints.")
    save_background: bool = _option(True, "Write checkpoints beside training, from a copy of the state.")
    save_per_node: bool | None = _option(
        None, "sync, local: each node writes its part of a checkpoint.  [default: from 1 GiB of state on]"
    )
    save_one_file: bool | None = _option(
        None,
        "sync, local: nodes write their parts into one file.  [default: where h5py was built with parallel HDF5]",
    )
    time_limit: float | None = _option(
        None, "Save and end before S seconds are over; Slurm's limit (SLURM_JOB_END_TIME) counts without it.", "S"
    )
    init_from: Path | None = _option(
        None, "Begin with the parameters of a checkpoint as far as they fit, if there is none to go on from.", "PATH"
    )
    nan: Literal["stop", "skip", "ignore"] = _option("stop", "What to do when the loss is not finite.")
    threads: int | None = _option(None, "BLAS threads of a rank.  [default: the node's cores / its ranks]", "N")
    shared_memory: bool = _option(True, "Average in memory that the ranks of a node share.")
    bucket_bytes: int = _option(1 << 20, "Average gradients in ranges of at least so many bytes.", "BYTES")

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{flag(name)} is {value}: give {least} or more")
        if self.elastic_rho is not None and not 0 < self.elastic_rho < 1:
            raise ConfigError(f"--elastic-rho is {self.elastic_rho}: give a number between 0 and 1")
        if self.gpu_memory_fraction is not None and not 0 < self.gpu_memory_fraction <= 1:
            raise ConfigError(f"--gpu-memory-fraction is {self.gpu_memory_fraction}: give a number above 0, 1 at most")
        if self.save_one_file and self.save_compression != "none":
            raise ConfigError(
                f"--save-compression {self.save_compression} goes with a file a node or one that the chief writes: "
                "leave it or --save-one-file out"
            )
        if self.precision != "float32" and (self.dtype != "float32" or self.device == "cpu"):
            other = "--device cpu" if self.device == "cpu" else f"--dtype {self.dtype}"
            raise ConfigError(f"--precision {self.precision} goes with GPUs and float32: leave it or {other} out")
        if self.precision == "float16" and self.mode != "sync":
            raise ConfigError(
                f"--precision float16 scales the loss as all GPUs agree, which goes with --mode sync, and the mode is "
                f"{self.mode}: give bfloat16 or change --mode"
            )
        if self.device == "cpu" and self.gpu_transport != "auto":
            raise ConfigError(f"--gpu-transport {self.gpu_transport} is for GPUs: leave it or --device cpu out")
        if self.device == "cpu" and not self.soft_placement:
            raise ConfigError("--no-soft-placement insists on GPUs, and --device cpu on none: leave one out")
        if self.histogram_steps and self.tensorboard is False:
            raise ConfigError("--histogram-steps goes with TensorBoard events: leave out --no-tensorboard")
        if self.keep_every and not self.keep:
            raise ConfigError(f"--keep-every {self.keep_every} goes with --keep N: without it all checkpoints are kept")
        self._check_modes()

    def _check_modes(self) -> None:
        """Refuse options that say nothing in this mode: whoever gives one means another mode."""
        for name, modes in _MODES_OF.items():
            said = flag("no_" + name if getattr(self, name) is False else name)
            if getattr(self, name) != RunConfig.__dataclass_fields__[name].default and self.mode not in modes:
                raise ConfigError(
                    f"{said} goes with --mode {' or '.join(modes)}, and the mode is {self.mode}: "
                    f"leave it out or change --mode"
                )
        if self.ps_hosts is not None and len(self.ps_hosts) > self.ps:
            raise ConfigError(
                f"--ps-hosts names more hosts than --ps {self.ps} has servers: {', '.join(self.ps_hosts)}"
            )

    def check_ranks(self, ranks: int) -> None:
        """Make sure that so many ranks can take the roles asked for.

        Raises:
            ConfigError: There is no worker, or no more of them than backup workers.
        """
        workers = ranks - self.ps
        if workers < 1:
            raise ConfigError(
                f"--ps {self.ps} leaves no worker of {ranks} rank{'s' * (ranks != 1)}: "
                f"start {self.ps + 1} ranks or more, or give a lower --ps"
            )
        if self.served and not self.ps and not self.shared_memory and ranks > 1:
            raise ConfigError(
                f"--no-shared-memory leaves {ranks} ranks without memory for the parameters of --mode {self.mode}: "
                "give --ps 1 or more, or leave it out"
            )
        if self.mode == "backup" and self.backup_workers is not None and self.backup_workers >= workers:
            raise ConfigError(
                f"--backup-workers {self.backup_workers} of {workers} worker{'s' * (workers != 1)} leaves no gradient "
                f"to take: give {workers - 1} or less"
            )

    def gradients_per_step(self, workers: int) -> int:
        """Gradients that one update takes from so many workers."""
        if self.mode in ("async", "ssp"):
            return 1
        if self.mode != "backup":
            return workers
        spare = min(1, workers - 1) if self.backup_workers is None else self.backup_workers
        return workers - spare

    @property
    def served(self) -> bool:
        """Whether parameters live with servers, and workers come and go at their own pace."""
        return self.mode in SERVED

    def merged(self, defaults: Mapping[str, Any]) -> RunConfig:
        """A copy in which ``defaults`` fill what was left at None."""
        known = {f.name for f in dataclasses.fields(self)}
        missing = {n: v for n, v in defaults.items() if n in known and getattr(self, n) is None}
        return dataclasses.replace(self, **missing)

    def as_toml(self) -> dict[str, Any]:
        """The options as TOML has them: paths as text, nothing for None."""
        return plain(dataclasses.asdict(self))


_LEAST = {
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
    """The command line's name of an option or parameter."""
    return "--" + name.replace("_", "-")


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Values that TOML and JSON can hold; None is left out, what has no form there becomes its text."""
    return {name: _plain(value) for name, value in options.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else str(value)
