"""Every option of a run, validated in one place."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..core.activity import LONG_LIMIT_S
from ..errors import ConfigError
from .compression import Compression, parse_compression, values_of
from .metric import Goal, parse_goal
from .modes import Mode, find_mode, names_of_modes
from .option import OptionGroup, flag as flag, info_of, option
from .parallel import ParallelConfig


def _with_servers(mode: Mode) -> bool:
    return mode.uses_servers


def _without_servers(mode: Mode) -> bool:
    return not mode.uses_servers


@dataclass(frozen=True)
class ServerConfig(OptionGroup):
    """Parameter servers, and the gradients sent to them."""

    ps: int = option(
        0,
        "Number of parameter servers; 0 keeps the parameters in the node's shared memory.",
        "K",
        minimum=0,
        modes=_with_servers,
        is_common=True,
    )
    ps_placement: Literal["spread", "pack", "first"] = option(
        "spread",
        "Ranks that become servers: spread over nodes, packed on few nodes, or the first ranks.",
        modes=_with_servers,
    )
    ps_hosts: list[str] | None = option(None, "Hosts whose ranks become servers.", "HOST,...", modes=_with_servers)
    placement: Literal["round_robin", "greedy", "partitioned"] = option(
        "partitioned", "How variables are distributed over the servers.", modes=_with_servers
    )
    push_precision: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "Former name of --compress.", modes=_with_servers
    )
    one_sided: bool = option(
        True,
        "Use RMA windows to reach servers on other nodes; --no-one-sided uses point-to-point messages.",
        modes=_with_servers,
    )
    prefetch_params: bool = option(
        False,
        "Read the parameters of the next step from servers on other nodes during this one; they may be a step older.",
        modes=lambda mode: mode.is_asynchronous and not mode.bounds_staleness,
    )


@dataclass(frozen=True)
class TrainingConfig(OptionGroup):
    """The steps of training, and validation."""

    batch_size: int | None = option(None, "Examples per worker and step.", "N", minimum=1, is_common=True)
    train_steps: int | None = option(None, "Number of training steps.", "N", minimum=0, is_common=True)
    accumulate_steps: int = option(
        1, "Split a worker's batch into this many micro-batches, to save memory.", "N", minimum=1
    )
    seed: int = option(0, "Random seed for initialization, data order and dropout.", "N", minimum=0)
    dtype: Literal["float32", "float64"] = option("float32", "Data type of parameters and arithmetic.")
    data_workers: int | None = option(
        None,
        "Processes of each rank that load the examples of a dataset; 0: the rank loads them itself.",
        "N",
        minimum=0,
        default_text=0,
    )
    prefetch: int | None = option(
        None, "Batches that each of these processes loads ahead.", "N", minimum=1, default_text=2
    )
    nan: Literal["stop", "skip", "ignore"] = option("stop", "Action on a non-finite loss.")
    init_from: Path | None = option(
        None,
        "Initialize parameters from a checkpoint or a run directory where they match, unless the run resumes from its "
        "own checkpoint.",
        "PATH",
    )
    validate_steps: int = option(1000, "Validate every N steps; 0: only at the end.", "N", minimum=0, is_common=True)
    validate_secs: float = option(0.0, "Also validate every S seconds; 0: never.", "S", minimum=0)
    stop_metric: str | None = option(
        None, "The validation metric of --patience and --keep-best: loss, accuracy, or NAME:min or NAME:max.", "NAME"
    )
    patience: int | None = option(
        None, "Finish training after N validations without improvement of --stop-metric.", "N", minimum=1
    )

    @property
    def goal(self) -> Goal | None:
        """``stop_metric``, with its direction."""
        return None if self.stop_metric is None else parse_goal("--stop-metric", self.stop_metric)


@dataclass(frozen=True)
class DeviceConfig(OptionGroup):
    """The devices of a rank, and their precision."""

    device: Literal["auto", "cpu", "gpu"] = option(
        "auto", "Device of the workers; auto: GPUs if there are any.", is_common=True
    )
    devices_per_rank: int = option(1, "Split a rank's batch over this many devices.", "N", minimum=1)
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = option(
        "float32",
        "GPU compute precision. tf32: matrix products round their inputs to TF32; bfloat16, float16: activations and "
        "a copy of the parameters are 16-bit. Parameters, gradients and sums stay float32.",
    )
    threads: int | None = option(
        None, "BLAS threads per rank.", "N", minimum=1, default_text="cores / ranks of the node"
    )
    flush_denormals: bool = option(
        True,
        "Flush subnormal (denormal) numbers to zero, in float32 below 1.2e-38; many CPUs compute slowly with them.",
    )
    soft_placement: bool = option(True, "Workers without a GPU use the CPU if other workers have GPUs.")
    gpu_memory_fraction: float | None = option(
        None,
        "Maximum fraction of a GPU's memory that a worker may use.",
        "FRACTION",
        above=0,
        maximum=1,
        default_text="an equal share",
    )
    gpu_memory_growth: bool = option(
        True, "Allocate GPU memory as needed; --no-gpu-memory-growth allocates the worker's share at startup."
    )
    gpu_transport: Literal["auto", "nccl", "ipc", "cuda-aware", "host"] = option(
        "auto",
        "How workers exchange GPU gradients; auto: the fastest transport, measured at startup.",
        modes=lambda mode: mode.averages_gradients,
    )


@dataclass(frozen=True)
class SavingConfig(OptionGroup):
    """When and how checkpoints are written."""

    save_steps: int = option(0, "Save a checkpoint every N steps; 0: only at the end.", "N", minimum=0, is_common=True)
    save_secs: float = option(0.0, "Save a checkpoint every S seconds; 0: never.", "S", minimum=0)
    keep: int = option(
        0,
        "Keep the newest N checkpoints, and always at least one complete one; 0: keep all.",
        "N",
        minimum=0,
        is_common=True,
    )
    keep_every: int = option(0, "With --keep: also keep the checkpoint of every M-th step.", "M", minimum=0)
    keep_best: bool = option(
        False, "Save whenever --stop-metric is the best so far, and keep the best checkpoint, RUN/best."
    )
    save_compression: Literal["none", "gzip"] = option("none", "Compression of checkpoints.")
    save_background: bool = option(True, "Write checkpoints in the background, from a copy of the state.")
    save_per_node: bool | None = option(
        None,
        "Each node writes a shard of the checkpoint.",
        default_text="on several nodes, from 1 GiB of state",
        modes=_without_servers,
    )
    save_one_file: bool | None = option(
        None,
        "All nodes write their shards into one shared file.",
        default_text="if HDF5 is parallel",
        modes=_without_servers,
    )


@dataclass(frozen=True)
class RunDirConfig(OptionGroup):
    """The run directory, and when a run resumes and ends."""

    run_dir: Path | None = option(None, "Output directory.", "DIR", default_text="runs/JOB-TIME", is_common=True)
    resume: str = option(
        "auto",
        "auto: resume from the newest checkpoint in the run directory; never; or from PATH: a checkpoint, or a run "
        "directory (uses its newest checkpoint).",
        "auto|never|PATH",
        is_common=True,
    )
    time_limit: float | None = option(
        None,
        "Save and exit before S seconds have passed; Slurm's limit (SLURM_JOB_END_TIME) always applies.",
        "S",
        minimum=1,
    )
    hang_timeout: float | None = option(
        None,
        "End the run and report the rank if a rank makes no progress for S seconds; 0: never.",
        "S",
        minimum=0,
        default_text="10 times the longest activity so far, at least 60",
    )
    long_timeout: float = option(
        LONG_LIMIT_S, "The same for starting, compiling, validating, saving and ending.", "S", minimum=1
    )


@dataclass(frozen=True)
class OutputConfig(OptionGroup):
    """Output and records of a run."""

    log_steps: int = option(100, "Report the loss every N steps; 0: never.", "N", minimum=0, is_common=True)
    log_secs: float = option(
        10.0, "Without a terminal, print at most one of these reports in S seconds; 0: print all.", "S", minimum=0
    )
    log_grad_norm: bool = option(
        False,
        "Record the norm of the averaged gradient, before clipping, with every report of --log-steps.",
        modes=lambda mode: mode.averages_gradients,
    )
    tensorboard: bool | None = option(
        None, "Write TensorBoard event files.", default_text="if tensorboardX is installed"
    )
    histogram_steps: int = option(
        0, "Add histograms of parameters and gradients to TensorBoard every N steps; 0: never.", "N", minimum=0
    )
    logger: Literal["wandb", "mlflow"] | None = option(
        None, "Also record options and numbers of the run in Weights & Biases or MLflow."
    )
    trace: bool = option(False, "Record a timeline of each rank, for trace viewers and mpitrain report.")
    trace_steps: int = option(
        1000, "Keep the individual spans of the last N steps in a trace; totals cover all steps.", "N", minimum=1
    )
    log_device_placement: bool = option(False, "Print the location of each rank, layer and vector.")


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
            names = {field.name for field in dataclasses.fields(group)} & set(options)
            groups[name] = group(**{option: options.pop(option) for option in names})
        if options:
            raise TypeError(f"unknown options: {', '.join(sorted(options))}")
        return cls(**groups)

    def options(self) -> dict[str, Any]:
        """Return all options by their flat names."""
        groups = [getattr(self, group.name) for group in dataclasses.fields(self)]
        return {name: value for group in groups for name, value in vars(group).items()}

    def __post_init__(self) -> None:
        self._check_modes()
        self._check_compression()
        self.parallel.check_outer_optimizer(self.mode)
        self._check_device()
        self._check_goal()
        saving, output = self.saving, self.output
        if saving.save_one_file and saving.save_compression != "none":
            raise ConfigError(
                f"--save-compression {saving.save_compression} cannot be combined with --save-one-file; remove one"
            )
        if saving.keep_every and not saving.keep:
            raise ConfigError(
                f"--keep-every {saving.keep_every} requires --keep N; without --keep all checkpoints are kept"
            )
        if output.log_grad_norm and not output.log_steps:
            raise ConfigError("--log-grad-norm has no effect with --log-steps 0; remove one")
        if output.histogram_steps and output.tensorboard is False:
            raise ConfigError(
                f"--histogram-steps {output.histogram_steps} requires TensorBoard events; remove --no-tensorboard"
            )

    @property
    def compression(self) -> Compression | None:
        """How gradients are compressed between nodes; None if they are not.

        Raises:
            ConfigError: The value of ``--compress`` is not valid.
        """
        text = self.servers.push_precision if self.parallel.compress is None else self.parallel.compress
        compression = None if text is None else parse_compression(text)
        return None if compression is None or compression.name == self.training.dtype else compression

    def _check_compression(self) -> None:
        """Reject a compression that the mode does not support."""
        compression, mode, parallel = self.compression, self.mode, self.parallel
        if parallel.compress_after and parallel.compress is None:
            raise ConfigError(f"--compress-after {parallel.compress_after} requires --compress; add it, or remove this")
        if self.servers.push_precision is not None and parallel.compress is not None:
            raise ConfigError("--push-precision is the former name of --compress; remove it")
        if compression is not None and not compression.is_class and compression.name not in mode.compressions:
            valid = values_of(mode.compressions)
            raise ConfigError(f"--compress {compression} is not supported in --mode {mode.name}; must be {valid}")
        if compression is None and parallel.compress is not None:
            raise ConfigError(
                f"--compress {parallel.compress} has no effect, because --dtype is {self.training.dtype}; remove it"
            )

    def _check_goal(self) -> None:
        """Reject options of early stopping without the others that they need."""
        training, keep_best = self.training, self.saving.keep_best
        uses = [f"--patience {training.patience}"] * (training.patience is not None) + ["--keep-best"] * keep_best
        if training.goal is None:
            if uses:
                raise ConfigError(f"{uses[0]} requires a validation metric; pass --stop-metric NAME, such as loss")
        elif not uses:
            raise ConfigError(
                f"--stop-metric {training.stop_metric} has no effect alone; add --patience N, --keep-best, or both"
            )
        elif training.patience is not None and not training.validate_steps and not training.validate_secs:
            raise ConfigError(
                f"--patience {training.patience} requires validation during training; pass --validate-steps N or "
                "--validate-secs S"
            )

    def _check_device(self) -> None:
        device, dtype, mode = self.device, self.training.dtype, self.mode
        on_cpu = device.device == "cpu"
        if device.precision != "float32" and (dtype != "float32" or (on_cpu and device.precision != "bfloat16")):
            other = "--device cpu" if on_cpu else f"--dtype {dtype}"
            raise ConfigError(
                f"--precision {device.precision} requires GPUs and --dtype float32, but {other} is set; remove one"
            )
        if device.precision == "float16" and not mode.keeps_vectors_on_gpus:
            valid = ", ".join(names_of_modes(lambda other: other.keeps_vectors_on_gpus))
            raise ConfigError(
                f"--precision float16 scales the loss over all GPUs and requires --mode {valid}, but the mode is "
                f"{mode.name}; use bfloat16 or change --mode"
            )
        if on_cpu and device.gpu_transport != "auto":
            raise ConfigError(
                f"--gpu-transport {device.gpu_transport} requires GPUs, but --device cpu is set; remove one"
            )
        if on_cpu and not device.soft_placement:
            raise ConfigError("--no-soft-placement requires GPUs, but --device cpu is set; remove one")

    def _check_modes(self) -> None:
        """Reject options that have no effect in this mode; the user probably meant another mode."""
        mode, hosts, ps = self.mode, self.servers.ps_hosts, self.servers.ps
        options = self.options()
        for name, field in FIELDS.items():
            info, value = info_of(field), options[name]
            if not info.is_valid_in(mode) and value != field.default:
                flag_name = flag("no_" + name if value is False else name)
                raise ConfigError(
                    f"{flag_name} requires --mode {', '.join(info.mode_names)}, but the mode is {mode.name}; "
                    f"remove {flag_name} or change --mode"
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
        if self.uses_servers and not ps and not parallel.shared_memory and ranks > 1:
            raise ConfigError(
                f"--no-shared-memory: {ranks} ranks have no place for the parameters of --mode {parallel.mode}; "
                "set --ps 1 or more, or remove --no-shared-memory"
            )
        if parallel.backup_workers is not None and parallel.backup_workers >= workers:
            raise ConfigError(
                f"--backup-workers is {parallel.backup_workers} with {workers} worker{'s' * (workers != 1)}: "
                f"must be <= {workers - 1}"
            )

    def gradients_per_step(self, workers: int) -> int:
        """Return the number of gradients that one update uses, given the number of workers."""
        if self.mode.is_asynchronous:
            return 1
        if not self.mode.drops_late_gradients:
            return workers
        return workers - self.parallel.spare_workers(workers)

    @property
    def mode(self) -> Mode:
        """The consistency mode that ``parallel.mode`` names."""
        return find_mode(self.parallel.mode)

    @property
    def uses_servers(self) -> bool:
        """Whether parameters live on servers, or in a node's shared memory, and workers run at their own pace."""
        return self.mode.uses_servers

    def merged(self, defaults: Mapping[str, Any]) -> RunConfig:
        """Return a copy in which ``defaults`` replace options that are None."""
        options = self.options()
        return self.of(**options | {n: v for n, v in defaults.items() if n in options and options[n] is None})

    def as_toml(self) -> dict[str, Any]:
        """Return the options as TOML values: paths as text, None left out."""
        return plain(self.options())


GROUPS: list[type] = list(typing.get_type_hints(RunConfig).values())
# The fields of all groups, by the flat names of the options.
FIELDS = {field.name: field for group in GROUPS for field in dataclasses.fields(group)}


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that TOML and JSON can hold: None is left out, other types become their text."""
    return {name: _plain(value) for name, value in options.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else str(value)
