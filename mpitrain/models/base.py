"""The interface of models: flat parameters in, loss and flat gradient of a micro-batch out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

from ..core.extra_state import ExtraState
from ..core.layout import Array
from ..core.ranges import OnReady
from ..data.batch import Batch
from ..errors import JobError
from ..plan.metric import Totals

# Gets the outputs and the labels of a batch: copies in host memory, 16-bit numbers as float32.
OnOutputs: TypeAlias = Callable[[Any, Any], None]


class Model:
    """Computes the loss and the gradient of a micro-batch, on one device or several.

    Every method is local, except for layers that communicate (see ``nn.Context``). A model on one device
    (``LayerModel``, ``LayerGpuModel``, ``TorchModel``) computes with vectors in its device's memory. Wrappers have the
    same interface: ``HostCopies`` for vectors in host memory, and ``Replicas`` for several devices. A subclass
    implements ``bind``, ``compute_loss``, ``compute_grads``, ``evaluate`` and ``predict``.

    Attributes:
        accepts_raw: Whether batches hold examples as stored, neither converted nor scaled.
        can_await_params: Whether the model can wait for each layer's parameters (``await_params_by``); else all
            parameters must be complete before each call.
    """

    accepts_raw = False
    can_await_params = False

    def bind(self, params: Array, grads: Array) -> None:
        """Compute with ``params`` and write to ``grads``, shape (layout.size,) each, from now on.

        The vectors are in the same kind of memory at each call, and ``grads`` is always the same vector.
        """
        raise NotImplementedError

    def load_params(self) -> None:
        """Copy the bound parameters to the device of the model, and set ``frozen`` of the ``TrainingState``.

        Called at the beginning of each step, and whenever the parameters have changed.
        """

    def begin_step(self, batch: Batch) -> None:
        """Prepare for the micro-batches of a batch. With ``--exact-mean``, collective over the workers; else local."""

    def await_params_by(self, wait: Callable[[int], None]) -> None:
        """Call ``wait(stop)`` whenever the model will use parameters before element ``stop`` of the vector.

        Only if ``can_await_params``.
        """
        raise NotImplementedError

    def compute_loss(self, batch: Batch) -> Any:
        """Return this worker's share of the step's loss: the examples' losses, times ``plan.weight``, summed.

        With ``--exact-mean``, it is the sum of the losses that count, divided by what counts in the whole step.

        Returns:
            A number; or, if the parameters are on a GPU, an array on it, valid until the next call. The conversion to
            ``float`` waits for the device.
        """
        raise NotImplementedError

    def compute_grads(self, on_ready: OnReady) -> None:
        """Write the gradient of the last ``compute_loss``; may call ``on_ready`` with values above 0."""
        raise NotImplementedError

    def evaluate(self, batch: Batch, on_outputs: OnOutputs | None = None) -> Totals:
        """Return the sums of losses and correct predictions of a batch."""
        raise NotImplementedError

    def predict(self, batch: Batch) -> Array:
        """Return the outputs for a batch, in host memory; the labels are not used."""
        raise NotImplementedError

    def add_loss(self, total: Any, loss: Any) -> Any:
        """Return the sum of two results of ``compute_loss``, valid until the caller drops it; ``total`` may be 0.0."""
        return total + float(loss)

    # State.

    def freeze(self, flags: Array) -> None:
        """Freeze the parameters that are frozen in another copy of the model, and no others."""

    def extra_state(self) -> ExtraState:
        """Return state that a checkpoint stores in addition to the vectors."""
        return {}

    def load_extra_state(self, state: ExtraState) -> None:
        """Restore ``extra_state``; ``state`` may have other namespaces, too, or none."""

    # The caller's own loop.

    @property
    def stepped(self) -> SteppedModel:
        """This model for a loop that computes the forward pass by itself.

        Raises:
            JobError: The model is not a PyTorch module on one device.
        """
        raise JobError(
            "your own training loop needs a PyTorch module on one device per rank; remove --devices-per-rank"
        )

    # Devices.

    def memory(self, count: int) -> tuple[Array, Array] | None:
        """Return preferred memory for the next batch of ``count`` examples, and for its labels; None for any."""
        return None

    def has_room(self, examples: Array, labels: Array) -> bool:
        """Return whether the device has room for the training data: the stored arrays, shape (n, ...)."""
        return False

    def cache_dataset(self, examples: Array, labels: Array) -> None:
        """Copy the training data to the device, which must have room. Local; call between two steps, once.

        Every later ``compute_loss`` must be given an ``IndexBatch``.
        """

    def memory_use(self) -> dict[str, int]:
        """Return bytes of device memory by purpose, without parameters and vectors of the same size.

        ``held`` is all device memory that this process has allocated. The result is empty if the model uses no device
        memory.
        """
        return {}

    def activate(self) -> AbstractContextManager[object]:
        """Return a context in which the bound vectors may be used in computations."""
        return nullcontext()

    def to_host(self, vector: Array) -> Array:
        """Return a bound vector in host memory, itself or a copy."""
        return vector

    def close(self) -> None:
        """Stop background work and free memory."""


class SteppedModel(Protocol):
    """A model whose forward pass the user's own loop computes, in place of ``Model.compute_loss``.

    Attributes:
        copies_params: Whether the module has copies of some parameters, of another type, on the same device.
        copies_grads: Whether the script sees copies of some bound gradients.
    """

    copies_params: bool
    copies_grads: bool

    def use_device(self) -> None:
        """Let the calling thread's operations run on the device, and in the stream, of this model from now on."""

    def begin_forward(self, position: int, pending: bool = False) -> None:
        """Prepare a forward pass on the micro-batch at this position of the stream of examples.

        Args:
            pending: Whether changes of averaged state, such as buffers, are still to be applied by an update; they are
                kept then.
        """

    def seed(self, position: int) -> None:
        """Seed the random numbers of the device for what follows, by a number that is the same on all ranks."""

    def end_forward(self, loss: Any, count: int, factor: float = 1.0) -> Any:
        """Set the loss of a forward pass, the mean over ``count`` examples; return it as ``compute_loss`` does.

        Args:
            factor: Factor of the gradient.
        """

    def add_loss(self, total: Any, loss: Any) -> Any:
        """See ``Model.add_loss``."""

    def backward(
        self, on_ready: OnReady, kept: Collection[str] | None = (), computed: Collection[str] | None = None
    ) -> None:
        """Write the gradient of the last loss, in place of ``Model.compute_grads``.

        Args:
            kept: Names of the parameters to whose gradients the new ones are added; None for all.
            computed: Names of the parameters whose gradients are computed; None for all. The others stay as they are.
        """

    def show_grads_in(self, shown: Array, fetch: Callable[[], None]) -> None:
        """Let scripts see ``shown``, shape (layout.size,), from now on; call ``fetch`` before they use a gradient."""

    def collect_grads(self, fetch: Callable[[], None]) -> None:
        """Copy gradients that the script has replaced to the vector that it sees; where it has removed one, set zeros.

        Args:
            fetch: Called before the vector is changed.
        """

    def note_frozen(self) -> None:
        """Set ``frozen`` of the ``TrainingState`` to what the script has frozen."""

    def load_grads(self) -> None:
        """Continue with the bound gradient, which the caller has changed. Before ``end_forward``."""

    def hide_grads(self) -> None:
        """Let the script see no gradients; the bound gradient stays."""

    def show_grads(self) -> None:
        """Copy the gradient to the copies that the script sees."""

    def show_params(self) -> None:
        """Show the parameters and buffers after an update to the script, in those that the module has as copies."""

    def store_params(self) -> None:
        """Write the script's changes of the module's copies of parameters to the bound parameters."""

    def record_params(self) -> None:
        """Record the values of some elements of the parameters, which only updates may change."""

    def check_params(self) -> None:
        """Check that these elements have not changed.

        Raises:
            JobError: The script has changed them.
        """

    def check_data_pointers(self) -> None:
        """Check that the parameters still have the memory that was bound.

        Raises:
            JobError: The script has replaced the data of a parameter.
        """

    def mark_updated(self, names: Collection[str] | None) -> None:
        """On every rank, declare to autograd that the parameters with these names (None: all) have changed."""

    def inference(self) -> AbstractContextManager[None]:
        """Return a context in which the model is in evaluation mode, without gradients."""
