"""The training of a script's own loop: from the first epoch to the end, on workers and servers."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from typing import Any

from ..data.split import DescribedSplit, Split
from ..errors import CheckpointError, JobError
from ..inference.model import load
from ..plan.job import Job
from ..process.signals import STOPPED_EARLY
from ..pytorch.network import LossInLoop
from ..training.session import Session, training_session
from ..training.setup import TrainRequest, resumes_at
from ..training.stepped_loop import SteppedLoop
from .collectives import share
from .script_optimizers import ScriptOptimizers
from .script_run import ScriptRun
from .script_state import ScriptState
from .train import script_path
from .train_loader import TrainLoader

_log = logging.getLogger(__name__)


class ScriptTraining(ScriptRun):
    """A base class of ``Trainer``: begins and ends training."""

    chief: bool
    _source: tuple[str, int]  # file and line where the Trainer is made, for error messages
    _optimizers: ScriptOptimizers
    _script: ScriptState
    _loader: TrainLoader | None = None
    _session: Session
    _began_at = 0  # step

    def _open(self, method: str, epochs: int = 0, steps: int = 0) -> SteppedLoop | None:
        """Begin training; return None if there is nothing to train. Collective over all ranks.

        Args:
            method: The name of the method that the script has called.
            epochs, steps: Number of epochs or steps to train; only one of the two is given.
        """
        rank, loader = self._rank, self._loader
        with rank.errors_end_the_run():
            if loader is None or self._epoch is not None:
                raise JobError(
                    f"trainer.{method} was called without a loader, or after training: "
                    f"call trainer.loader first, and train once"
                )
            check_positive(method, epochs or steps)
            accumulate, workers = self._config.training.accumulate_steps, self.size
            batch = loader.batch_size * accumulate
            self._examples, self._last = len(loader.split), epochs - 1
            step_examples = batch * self._config.gradients_per_step(workers)
            split, training_data = loader.split, None
            if self.chief:
                # An earlier start of the run may have had another number of workers.
                step, cursor = resumes_at(self._config)
                steps = steps or step + math.ceil(max(0, epochs * self._examples - cursor) / step_examples)
                training_data = (len(split), split.shape, split.sample_digest(), batch, steps)
            *_, steps = share(rank, training_data)
            rank.claim_run_dir(self._config)
            self._optimizers.check_states()
            request = self._request(split, batch, steps)
            stack = contextlib.ExitStack()
            session = stack.enter_context(training_session(rank.cluster, request, rank.status))
            self._session, rank.session = session, stack
            if session.loop is None:  # the run has already finished early
                training = self.model.training
                load(self._config.run.join or session.run_dir, model=self.model)
                self.model.train(training)
                return None
            assert isinstance(session.loop, SteppedLoop)
            self._loop = session.loop
            self._loop.open(self._optimizers.parameter_names)
            self._began_at = self._loop.step
            self._optimizers.begin(self._loop)
            self._script.extra_state()  # raises an error for values that cannot be saved
            self._optimizers.advance_schedulers(self._loop)  # for a scheduler that has no state in the checkpoint
            return self._loop

    def _close(self) -> None:
        """End training. Collective over all ranks."""
        rank = self._rank
        with rank.errors_end_the_run():
            if self._loop is not None:
                # With servers, the other workers may have taken all batches.
                got_no_batch = self._loop.had_work is False
                if not (self._loop.n_updates or self._began_at or self._session.stopped or got_no_batch):
                    raise JobError("trainer.step() was never called: call it after trainer.backward(loss)")
                self._loop.close()
                self._steps_done = self._loop.step
                if self._config.training.goal is not None and self._loop.validation_step < 0:
                    _log.warning("--stop-metric had no effect, because the script has not called trainer.evaluate")
            self._loop = None
            self._micro_batches.clear()
            stack, rank.session = rank.session, None
            assert stack is not None
            stack.close()
            rank.servers_have_ended = bool(rank.cluster.servers)
            rank.finish(self._session.stopped)
        if self._session.stopped:
            sys.exit(STOPPED_EARLY)

    def _check_options(self) -> None:
        with self._rank.errors_end_the_run():
            self._optimizers.check_options()

    def _serve(self) -> None:
        """Serve parameters until the workers have ended, then exit."""
        rank = self._rank
        count, shape, digest, batch, steps = share(rank, None)
        request = self._request(DescribedSplit(count, shape, digest), batch, steps)
        with training_session(rank.cluster, request, rank.status) as session:
            pass
        rank.finish(session.stopped)
        sys.exit(STOPPED_EARLY if session.stopped else 0)

    def _request(self, split: Split, batch: int, steps: int) -> TrainRequest:
        config = self._config.merged({"batch_size": batch, "train_steps": steps})

        def make() -> Job:
            job = Job(self.model, LossInLoop(), self._optimizers.rule, split, batch_size=batch, train_steps=steps)
            job.source = self._source
            return job

        return TrainRequest(script_path(), {}, config, make, SteppedLoop, self._script)

    def _order(self) -> str:
        """Return the name of the order of the examples."""
        assert self._loader is not None
        return self._loader.split.order_name

    def _check_order(self, order: str) -> None:
        """Check that a resumed run has the same order of the examples as before.

        Raises:
            CheckpointError: The order is different.
        """
        if order != self._order():
            raise CheckpointError(
                f"the run was trained with examples in the order {order}, and trainer.loader has {self._order()}: pass "
                "the same shuffle= and order= to continue it, or --resume never to start a new run"
            )

    def _take(self, loop: SteppedLoop) -> bool:
        with self._rank.errors_end_the_run():
            return loop.take() is not None


def check_positive(method: str, count: Any) -> None:
    """Check the argument of ``epochs``, ``batches`` or ``steps``.

    Raises:
        JobError: It is not an integer, or less than 1.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        unit = "epochs" if method == "epochs" else "steps"
        raise JobError(f"trainer.{method} got {count!r}: must be a number of {unit}, at least 1")
