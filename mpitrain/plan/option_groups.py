"""The options of a run, in groups. Options for the agreement between workers are in ``parallel``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..core.activity import LONG_LIMIT_S, SHORTEST_LIMIT_S, TIMES_LONGEST
from .metric import Goal, parse_goal
from .modes import Mode
from .option import OptionGroup, option, value_of


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
        is_simulated=True,
        change="servers",
    )
    ps_placement: Literal["spread", "pack", "first"] = option(
        "spread",
        "Ranks that become servers: spread over nodes, packed on few nodes, or the first ranks.",
        modes=_with_servers,
        is_simulated=True,
    )
    ps_hosts: list[str] | None = option(
        None, "Hosts to which the servers are assigned in turn.", "HOST,...", modes=_with_servers
    )
    placement: Literal["round_robin", "greedy", "partitioned"] = option(
        "partitioned", "How variables are distributed over the servers.", modes=_with_servers
    )
    one_sided: bool = option(
        True,
        "Use RMA windows to reach servers on other nodes; --no-one-sided uses point-to-point messages.",
        modes=_with_servers,
    )
    prefetch_params: bool = option(
        False,
        "Read the parameters of the next step from servers on other nodes during "
        "the present step; they may be one step older.",
        modes=lambda mode: mode.is_asynchronous and not mode.bounds_staleness,
        is_simulated=True,
    )


@dataclass(frozen=True)
class TrainingConfig(OptionGroup):
    """The steps of training, and validation."""

    batch_size: int | None = option(
        None,
        "Examples per worker and step.",
        "N",
        minimum=1,
        is_common=True,
        change="batch",
        is_part_of_model=True,
        in_scripts="pass it to trainer.loader",
    )
    train_steps: int | None = option(
        None,
        "Number of training steps.",
        "N",
        minimum=0,
        is_common=True,
        excludes="train_epochs",
        is_part_of_model=True,
        in_scripts="pass the number of epochs to trainer.epochs",
    )
    train_epochs: int | None = option(
        None,
        "Number of epochs instead of steps.",
        "E",
        minimum=1,
        is_common=True,
        excludes="train_steps",
        is_part_of_model=True,
        in_scripts="pass it to trainer.epochs",
    )
    accumulate_steps: int = option(
        1, "Split a worker's batch into this many micro-batches, to save memory.", "N", minimum=1, is_part_of_model=True
    )
    exact_mean: bool = option(
        False,
        "Use the mean loss over the labels of all workers and micro-batches, with ignore_index and class weights too, "
        "not the mean of their means.",
        modes=lambda mode: mode.averages_gradients,
    )
    seed: int = option(
        0, "Random seed for initialization, data order and dropout.", "N", minimum=0, is_part_of_model=True
    )
    dtype: Literal["float32", "float64"] = option(
        "float32", "Data type of parameters and arithmetic.", is_part_of_model=True
    )
    data_workers: int | None = option(
        None,
        "Number of processes per rank that load the examples of a dataset; 0: the rank loads them itself.",
        "N",
        minimum=0,
        if_none=0,
    )
    prefetch: int | None = option(
        None, "Number of batches that each data worker loads ahead.", "N", minimum=1, if_none=2
    )
    nan: Literal["stop", "skip", "ignore"] = option("stop", "Action on a non-finite loss.")
    init_from: Path | None = option(
        None,
        "Initialize parameters from a checkpoint or a run directory, where names and shapes match; no effect if the "
        "run resumes.",
        "PATH",
        in_scripts="load the values into the model before making the Trainer",
    )
    validate_steps: int = option(
        1000,
        "Validate every N steps; 0: only at the end.",
        "N",
        minimum=0,
        is_common=True,
        in_scripts="call trainer.evaluate in the loop",
    )
    validate_secs: float = option(
        0.0, "Also validate every S seconds; 0: never.", "S", minimum=0, in_scripts="call trainer.evaluate in the loop"
    )
    stop_metric: str | None = option(
        None, "The validation metric of --patience and --keep-best: loss, accuracy, or NAME:min or NAME:max.", "NAME"
    )
    patience: int | None = option(
        None, "Finish training after N validations in a row without improvement of --stop-metric.", "N", minimum=1
    )

    n_data_workers = value_of("data_workers")
    batches_ahead = value_of("prefetch")

    @property
    def goal(self) -> Goal | None:
        """``stop_metric``, with its direction; None if it is not given."""
        return None if self.stop_metric is None else parse_goal("--stop-metric", self.stop_metric)


@dataclass(frozen=True)
class DeviceConfig(OptionGroup):
    """The devices of a rank, and their precision."""

    device: Literal["auto", "cpu", "gpu"] = option(
        "auto", "Device of the workers; auto: GPUs if available.", is_common=True
    )
    devices_per_rank: int = option(
        1, "Split a rank's batch over this many devices.", "N", minimum=1, in_scripts="start one rank for each device"
    )
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = option(
        "float32",
        "GPU compute precision. tf32: matrix products round their inputs to TF32. bfloat16, float16: activations and "
        "a copy of the parameters are 16-bit. Parameters, gradients and sums stay float32.",
        in_scripts="use torch.autocast in the loop",
    )
    threads: int | None = option(
        None, "BLAS threads per rank.", "N", minimum=1, default_text="cores / ranks of the node"
    )
    flush_denormals: bool = option(
        True,
        "Flush subnormal (denormal) numbers to zero, in float32 below 1.2e-38; many CPUs compute slowly with them.",
        is_part_of_model=True,
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
        True,
        "Allocate GPU memory as needed; --no-gpu-memory-growth allocates the worker's share at startup, except for "
        "PyTorch modules.",
    )
    gpu_transport: Literal["auto", "nccl", "cuda-aware", "host"] = option(
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
        0, "Keep the newest N checkpoints and an undamaged checkpoint; 0: keep all.", "N", minimum=0, is_common=True
    )
    keep_every: int = option(
        0, "With --keep: also keep the checkpoint of every M-th step.", "M", minimum=0, requires="keep"
    )
    keep_best: bool = option(
        False, "Save whenever --stop-metric is the best so far, and keep the best checkpoint, RUN/best."
    )
    save_compression: Literal["none", "gzip"] = option("none", "Compression of checkpoints.")
    save_background: bool = option(True, "Write checkpoints in the background, from a copy of the state.")
    save_per_node: bool | None = option(
        None,
        "Write one shard of the checkpoint per node.",
        default_text="on several nodes, from 1 GiB of state",
        modes=_without_servers,
    )
    save_one_file: bool = option(False, "Write the shards of all nodes into one shared file.", modes=_without_servers)


@dataclass(frozen=True)
class RunDirConfig(OptionGroup):
    """The run directory, and when a run resumes and ends."""

    run_dir: Path | None = option(
        None, "Output directory.", "DIR", default_text="runs/JOB-TIME", is_common=True, is_place=True
    )
    resume: str = option(
        "auto",
        "auto: resume from the newest checkpoint in the run directory. never: do not resume. PATH: resume from this "
        "checkpoint or run directory.",
        "auto|never|PATH",
        is_common=True,
        is_place=True,
    )
    join: Path | None = option(
        None,
        "Train as one of several learners of the run in this directory, which share their results through it and do "
        "not wait for each other; also takes the options of local with an outer optimizer.",
        "RUN",
        modes=lambda mode: mode.averages_gradients,
    )
    time_limit: float | None = option(
        None,
        "Save and exit before S seconds have passed; Slurm's limit (SLURM_JOB_END_TIME) always applies.",
        "S",
        minimum=1,
        is_place=True,
    )
    hang_timeout: float | None = option(
        None,
        "End the run and report the rank if a rank makes no progress for S seconds; 0: never.",
        "S",
        minimum=0,
        default_text=f"{TIMES_LONGEST} times the longest activity so far, at least {SHORTEST_LIMIT_S:g}",
    )
    long_timeout: float = option(
        LONG_LIMIT_S,
        "Used in place of --hang-timeout while a rank starts, compiles, validates, saves or ends.",
        "S",
        minimum=1,
    )


@dataclass(frozen=True)
class OutputConfig(OptionGroup):
    """Output and records of a run."""

    log_steps: int = option(100, "Report the loss every N steps; 0: never.", "N", minimum=0, is_common=True)
    log_secs: float = option(
        10.0, "Without a terminal, print at most one loss report in S seconds; 0: print all.", "S", minimum=0
    )
    log_grad_norm: bool = option(
        False,
        "Record the norm of the averaged gradient, before clipping, with every report of --log-steps.",
        modes=lambda mode: mode.averages_gradients,
        requires="log_steps",
    )
    tensorboard: bool | None = option(
        None, "Write TensorBoard event files.", default_text="if tensorboardX is installed"
    )
    histogram_steps: int = option(
        0, "Add histograms of parameters and gradients to TensorBoard every N steps; 0: never.", "N", minimum=0
    )
    logger: Literal["wandb", "mlflow"] | None = option(
        None, "Also record options and metrics of the run in Weights & Biases or MLflow."
    )
    trace: bool = option(False, "Record a timeline of each rank, for trace viewers and mpitrain report.")
    trace_steps: int = option(
        1000, "Keep the individual spans of the last N steps in a trace; totals cover all steps.", "N", minimum=1
    )
    log_device_placement: bool = option(False, "Print the devices of ranks, layers, parameters, gradients and slots.")
