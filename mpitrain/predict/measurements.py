"""The values that ``mpitrain probe`` measures, and the file ``probe.json``."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RecordError

VERSION = 2


@dataclass(frozen=True)
class JobFacts:
    """The job that was measured.

    Attributes:
        name: Its name.
        batch: Examples per worker and step.
        examples: Number of training examples.
        elements: Length of the flat vector of parameters.
        itemsize: Bytes of an element.
        vectors: Number of vectors that training changes: the parameters, the optimizer's slots, moving averages.
        layer_starts: First element of each layer.
        ready: For each layer, the fraction of the backward pass after which its gradient is final.
        awaits_params: Whether the forward pass can begin before all parameters have arrived.
        by_norms: Whether an update needs norms of the whole gradient.
    """

    name: str
    batch: int
    examples: int
    elements: int
    itemsize: int
    vectors: int
    layer_starts: tuple[int, ...]
    ready: tuple[float, ...]
    awaits_params: bool
    by_norms: bool

    @property
    def nbytes(self) -> int:
        """Bytes of one vector."""
        return self.elements * self.itemsize


@dataclass(frozen=True)
class RankFacts:
    """The ranks that were measured.

    Attributes:
        ranks_per_node: Number of ranks of each node.
        cores_per_node: Cores that the ranks of a node may use.
        load: The load average of the first host before the measurement.
    """

    ranks_per_node: tuple[int, ...]
    cores_per_node: int
    load: float

    @property
    def stretch(self) -> float:
        """Factor of the times of a node's ranks because they share cores."""
        return max(1.0, max(self.ranks_per_node) / self.cores_per_node)


@dataclass(frozen=True)
class ComputeTimes:
    """Times of one rank, the medians over the ranks.

    Attributes:
        batches: Numbers of examples, ascending.
        load_s, forward_s, backward_s: Seconds for a batch of each of these sizes, one rank at a time.
        together: Factor of these times if all ranks compute at once.
        update_rows: Numbers of gradients that an update sums.
        update_s: Seconds to update the whole vector by the sum of each of these numbers of gradients.
        copy_s: Seconds to copy one vector.
        handover_s: Additional seconds if another core has written the vector; 0 if there is one core.
        loop_s: Seconds of a step outside of loading, computing, and updating.
    """

    batches: tuple[int, ...]
    load_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    together: float
    update_rows: tuple[int, ...]
    update_s: tuple[float, ...]
    copy_s: float
    handover_s: float
    loop_s: float


@dataclass(frozen=True)
class ServerTimes:
    """Times of a parameter server for the whole vector.

    Attributes:
        apply_s: Seconds to apply a gradient.
        read_s: Seconds to copy the parameters under the shard's lock.
    """

    apply_s: float
    read_s: float


@dataclass(frozen=True)
class CodecTimes:
    """A compression of the whole vector.

    Attributes:
        share: Compressed bytes relative to the uncompressed vector.
        encode_s, decode_s: Seconds for the whole vector.
    """

    share: float
    encode_s: float
    decode_s: float


@dataclass(frozen=True)
class LinkTimes:
    """Transfers between two ranks.

    Attributes:
        latency_s: Half the time in which a message of 8 bytes goes to the other rank and back.
        message_s: Time for one message of 8 bytes in each direction, if many are posted at once.
        bytes_per_s: Bandwidth of one pair of ranks, in each direction, while both directions are used.
        node_bytes_per_s: Total bandwidth of all pairs of ranks of two nodes at once, in each direction.
        burst_bytes: Bytes that a shaped link carries at once after a pause; 0 if it has one rate.
        cpu_s_per_byte: Processor time to send and receive one byte of a plain TCP connection.
    """

    latency_s: float
    message_s: float
    bytes_per_s: float
    node_bytes_per_s: float
    burst_bytes: float
    cpu_s_per_byte: float


@dataclass(frozen=True)
class ExchangeTimes:
    """Exchanges between all nodes, as the strategies make them.

    Attributes:
        sum_s_per_byte: Seconds in which nodes sum a gradient and return parameters, for each byte that a node sends.
        low_rank_s: Seconds in which nodes sum a gradient with ``powersgd:4``; 0 if no parameter can be compressed.
        request_s: Seconds of a request to a server on another node, without a vector.
        push_s_per_byte, pull_s_per_byte: Additional seconds for each byte of a vector.
    """

    sum_s_per_byte: float
    low_rank_s: float
    request_s: float
    push_s_per_byte: float
    pull_s_per_byte: float


@dataclass(frozen=True)
class Noise:
    """The gradient noise scale (McCandlish, Kaplan, Amodei et al., An empirical model of large-batch training, 2018).

    Attributes:
        scale_examples: The simple noise scale, in examples; 0 if the estimate is not positive.
        steps: Number of training steps before the measurement.
    """

    scale_examples: float
    steps: int


@dataclass(frozen=True)
class Probe:
    """All measurements of a probe.

    Attributes:
        step_factors: Times of single steps, relative to their median, of all ranks.
        codecs: Times of compressions, by the value of ``--compress``.
        within: Transfers between ranks of a node; None if no node has two.
        between: Transfers between nodes; None if there is one node.
        exchanges: Exchanges between nodes by the code of the strategies; None if there is one node.
    """

    version: int
    job: JobFacts
    ranks: RankFacts
    compute: ComputeTimes
    server: ServerTimes
    codecs: dict[str, CodecTimes]
    within: LinkTimes | None
    between: LinkTimes | None
    exchanges: ExchangeTimes | None
    step_factors: tuple[float, ...]
    noise: Noise

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            OSError: The file cannot be written.
        """
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def read_probe(path: Path) -> Probe:
    """Return the measurements in a file of ``mpitrain probe``.

    Raises:
        RecordError: The file cannot be read, has another version, or is not complete.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON, {error}"
        raise RecordError(f"{path} cannot be read: {reason}; give a file that mpitrain probe has written") from error
    version = values.get("version") if isinstance(values, dict) else None
    if version != VERSION:
        raise RecordError(f"{path} has version {version}, must be {VERSION}: run mpitrain probe again")
    try:
        return from_values(Probe, values)  # type: ignore[no-any-return]
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} is not complete ({error}): run mpitrain probe again") from error


def from_values(kind: Any, values: Any) -> Any:
    """Return a value of this type from numbers, lists and dicts of JSON.

    Raises:
        KeyError, TypeError, ValueError: The values do not match the type.
    """
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: from_values(hint, values[name]) for name, hint in hints.items()})  # type: ignore[operator]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(from_values(arguments[0], value) for value in values)
    if origin is dict:
        if not isinstance(values, Mapping):
            raise TypeError(f"{values!r} is not an object")
        return {name: from_values(arguments[1], value) for name, value in values.items()}
    if origin in (types.UnionType, typing.Union):
        return None if values is None else from_values(arguments[0], values)
    return kind(values)
