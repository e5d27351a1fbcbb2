"""One training run of a rank: from a request to the record of how it ended."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..batch_systems.registry import end_of_time
from ..comm.cluster import Cluster
from ..core import activity, subnormals
from ..core.training_state import TrainingState
from ..errors import NonFiniteLoss
from ..monitor.heartbeat import RunEnd
from ..monitor.trace import span
from ..plan.job import errors_located
from ..process.rank_status import RankStatusFile
from ..process.signals import Signals, TimeLimit
from ..strategy.select import make_server, trains_on_gpus
from .loop import Loop
from .memory_recovery import kept_run_dir
from .messages import headline
from .placement_report import placement_report
from .resources import restart_blas_threads
from .restore import restore
from .setup import Setup, TrainRequest, set_up
from .telemetry import Telemetry
from .worker import Worker

_log = logging.getLogger(__name__)
_WAIT = span("wait")


@dataclass
class Session:
    """A training run of this rank.

    Attributes:
        run_dir: The run directory.
        loop: The worker's training loop; None on a server, and if there is nothing to train.
        stopped: Whether the run was asked to stop early; valid at the end of the session, and the same on every rank.
    """

    run_dir: Path
    loop: Loop | None = None
    stopped: bool = False


@contextmanager
def training_session(cluster: Cluster, request: TrainRequest, rank_status: RankStatusFile) -> Iterator[Session]:
    """Prepare to train; the block runs the loop. Collective over all ranks, at the beginning and at the end.

    A parameter server serves before the block, until the workers have ended.
    """
    # Threads that compute are started later, and inherit the flush mode.
    with subnormals.flushed(request.config.device.flush_denormals):
        restart_blas_threads()
        setup = set_up(cluster, request, rank_status)
        session = Session(setup.files.folder.absolute())
        if setup.resume_plan.finished:
            yield session
        else:
            yield from _train(setup, session, rank_status)
    restart_blas_threads()


def _train(setup: Setup, session: Session, rank_status: RankStatusFile) -> Iterator[Session]:
    cluster, files = setup.cluster, setup.files
    activity.describe(role=f"{cluster.role} {cluster.task_index}", run_dir=str(session.run_dir))
    signals = Signals()
    signals.install()  # stays installed: a signal after training must not interrupt the regular exit
    rank_status.set_ready()
    telemetry, end = Telemetry(cluster, setup.plan, files.folder, files.console), RunEnd("failed")
    try:
        _describe(setup)
        if cluster.is_server:
            _serve(setup, telemetry, rank_status)
            end = RunEnd("finished")
            yield session
        else:
            with errors_located(setup.request.job_file, setup.job):
                # Only the chief's clock counts, so only the chief queries the batch system.
                until = end_of_time(setup.plan.config.run.time_limit) if cluster.chief else None
                worker = Worker(setup, telemetry, signals, TimeLimit(until, time.time()), rank_status)
                session.loop = worker.loop
                try:
                    yield session
                except NonFiniteLoss as error:
                    if error.on_all_ranks:  # all ranks end regularly, so a sharded save in progress must be finished
                        worker.finish_saving()
                    raise
                finally:
                    worker.close()
                end = worker.finish()
        telemetry.write_trace()
    finally:
        if files.console is not None:
            files.console.stop()
        telemetry.close(end, sys.exc_info()[1])
    session.stopped = cluster.any(end.state == "stopped")


def _describe(setup: Setup) -> None:
    """Print a description of the training, on the chief. Collective over the workers, or over the servers."""
    cluster, config = setup.cluster, setup.plan.config
    resident = trains_on_gpus(cluster, setup.plan, setup.devices)
    if not cluster.chief:
        return
    if config.output.log_device_placement:
        placements = placement_report(setup.job.network, setup.plan, setup.devices, resident)
        _log.info("%s\n%s", setup.ranks, placements)
    _log.info("%s", headline(cluster, setup.request.name, config, setup.threads, setup.devices))
    for note in setup.notes:
        _log.info("%s", note)


def _serve(setup: Setup, telemetry: Telemetry, rank_status: RankStatusFile) -> None:
    """Run a parameter server until the workers have ended."""
    cluster, plan, network = setup.cluster, setup.plan, setup.job.network
    server = make_server(cluster, plan, TrainingState(plan.layout, network.frozen))
    run_dir = kept_run_dir(setup.files.folder)
    beginning = restore(
        cluster, plan, network, setup.resume_plan, server.initial_vectors, server.shared_vectors, run_dir
    )
    server.start(beginning.progress)
    rank_status.set_training()
    if not beginning.is_complete(plan):
        telemetry.open(None, 0)
    activity.become("wait")  # between requests
    server.serve()  # ends when the workers report that they have saved, also after a signal
    activity.become("end")
    with _WAIT:
        setup.request.loop.free(server.close)
