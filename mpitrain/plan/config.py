"""Every option of a run, validated in one place."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.words import counted
from ..errors import ConfigError
from .compression import Compression, codecs_of, parse_compression, values_of
from .modes import Mode, find_mode, names_of_modes
from .option import flag as flag, info_of
from .option_groups import DeviceConfig, OutputConfig, RunDirConfig, SavingConfig, ServerConfig, TrainingConfig
from .parallel import ParallelConfig


@dataclass(frozen=True)
class RunConfig:
    """Options of a training run, grouped. Flags and TOML keys are flat. ``merged`` replaces None with the job's values.

    Raises:
        ConfigError: An option is not valid, or options contradict each other.
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
        self._check_pairs()
        self._check_compression()
        self._check_virtual_workers()
        self.parallel.check_outer_optimizer(self.mode, self.run.join is not None)
        self._check_device()
        self._check_goal()
        saving, output = self.saving, self.output
        if saving.save_one_file and saving.save_compression != "none":
            raise ConfigError(
                f"--save-compression {saving.save_compression} cannot be combined with --save-one-file; remove one"
            )
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
        text = self.parallel.compress
        compression = None if text is None else parse_compression(text)
        return None if compression is None or compression.name == self.training.dtype else compression

    def _check_compression(self) -> None:
        """Reject options of compression that conflict, have no effect, or that the mode does not support."""
        compression, mode, parallel = self.compression, self.mode, self.parallel
        if compression is not None and not compression.is_class and compression.name not in codecs_of(mode):
            valid = values_of(codecs_of(mode))
            raise ConfigError(f"--compress {compression} is not supported in --mode {mode.name}; must be {valid}")
        if compression is None and parallel.compress is not None:
            raise ConfigError(
                f"--compress {parallel.compress} has no effect with --dtype {self.training.dtype}; remove --compress"
            )

    def _check_virtual_workers(self) -> None:
        """Reject options whose result depends on the number of workers."""
        for option, is_given in (
            (f"--compress {self.parallel.compress}", self.compression is not None),
            ("--exact-mean", self.training.exact_mean),
            (f"--local-after {self.parallel.local_after}", self.parallel.first_local_step > 0),
        ):
            if self.virtual_workers is not None and is_given:
                raise ConfigError(
                    f"--virtual-workers {self.virtual_workers} does not work with {option}, whose result depends on "
                    "the number of workers; remove one"
                )

    def _check_goal(self) -> None:
        """Reject options of early stopping if other options that they need are missing."""
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
        """Reject options that have no effect in this mode, and more ``--ps-hosts`` than servers."""
        mode, hosts, ps = self.mode, self.servers.ps_hosts, self.servers.ps
        options = self.options()
        for name, field in FIELDS.items():
            info, value = info_of(field), options[name]
            is_valid = info.is_valid_in(mode) or (info.with_join and self.run.join is not None)
            if not is_valid and value != field.default:
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

    def _check_pairs(self) -> None:
        """Reject options without those that they require, and options that exclude each other."""
        options = self.options()
        for name, field in FIELDS.items():
            info, value = info_of(field), options[name]
            if value == field.default:
                continue
            if info.with_join and self.run.join is not None:
                continue
            if info.requires and not (required := options[info.requires]):
                given = flag(name) if value is True else f"{flag(name)} {value}"
                unset = "" if required is None else f", which is {required}"
                raise ConfigError(f"{given} requires {flag(info.requires)}{unset}: set it, or remove {flag(name)}")
            if info.excludes and (other := options[info.excludes]) is not None:
                raise ConfigError(
                    f"{flag(name)} {value} and {flag(info.excludes)} {other} contradict each other; remove one"
                )

    def check_ranks(self, ranks: int) -> None:
        """Check that the roles can be assigned to ``ranks`` ranks.

        Raises:
            ConfigError: The ranks are too few for the servers or backup workers, or cannot share the parameters.
        """
        parallel, ps = self.parallel, self.servers.ps
        workers = ranks - ps
        if workers < 1:
            raise ConfigError(
                f"--ps {ps} leaves no worker of {counted(ranks, 'rank')}: start at least {ps + 1} ranks or reduce --ps"
            )
        if self.uses_servers and not ps and not parallel.shared_memory and ranks > 1:
            raise ConfigError(
                f"--no-shared-memory: {ranks} ranks cannot share the parameters of --mode {parallel.mode}; "
                f"set --ps 1 or more, or remove --no-shared-memory"
            )
        if self.virtual_workers is not None and workers > self.virtual_workers:
            raise ConfigError(
                f"--virtual-workers is {self.virtual_workers} with {counted(workers, 'worker')}: start at most "
                f"{counted(self.virtual_workers + ps, 'rank')}, or set --virtual-workers {workers} or more"
            )
        if parallel.backup_workers is not None and parallel.backup_workers >= workers:
            raise ConfigError(
                f"--backup-workers is {parallel.backup_workers} with {counted(workers, 'worker')}: "
                f"must be <= {workers - 1}"
            )

    def gradients_per_step(self, workers: int) -> int:
        """Return the number of gradients that one update uses, given the number of workers."""
        if self.mode.is_asynchronous:
            return 1
        if not self.mode.drops_late_gradients:
            return self.virtual_workers or workers
        return workers - self.parallel.spare_workers(workers)

    @property
    def virtual_workers(self) -> int | None:
        """The number of virtual workers; None if there are none."""
        return self.parallel.n_virtual_workers or None

    @property
    def mode(self) -> Mode:
        """The consistency mode that ``parallel.mode`` names."""
        return find_mode(self.parallel.mode)

    @property
    def uses_servers(self) -> bool:
        """Whether workers run at their own pace, with the parameters on servers or in one node's shared memory."""
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
    """Return values that TOML and JSON can hold: None is left out, objects of other types become text."""
    return {name: _plain(value) for name, value in options.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else str(value)
