"""One rank of ``mpitrain probe``, from its start to the file that it writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from ..comm.cluster import Cluster
from ..comm.powersgd import matrices
from ..core import subnormals
from ..core.files import writing
from ..gpu.discovery import choose_devices
from ..plan.compression import CODECS
from ..plan.job import Job, errors_located
from ..plan.plan import Plan, make_plan
from ..predict.measurements import VERSION, CodecTimes, ComputeTimes, JobFacts, Noise, Probe, RankFacts
from ..process.rank_status import RankStatusFile
from ..training.rank import Rank
from ..training.resources import limit_threads, limit_threads_of_torch
from ..training.setup import TrainRequest
from .compute import ROWS, BatchTimes, RankModel
from .exchanges import LOW_RANK, measure_exchanges
from .steps import StepTimes, step_times
from .transfers import measure_links
from .turns import all_at_once, median_of_ranks, median_over_ranks, one_at_a_time

_COMPUTING_S = 12.0  # total time for all batch sizes and ranks
_STEPS_S = 4.0
_TRAINING_S = 1.0  # duration of training before the noise scale is measured
_SHORT_S, _CODEC_S = 0.1, 0.3
_KEPT_FACTORS = 500


@dataclass(frozen=True)
class ProbeRequest:
    """The measurements that a rank makes, and the file for the result."""

    train: TrainRequest
    output: Path


def run_probe(parse: Callable[[], ProbeRequest]) -> NoReturn:
    """Measure on this rank, and exit. Collective over all ranks; the first rank writes the file."""
    rank = Rank()
    with rank.errors_end_the_run():
        rank.start()
        cluster = rank.cluster
        with cluster.agree("reading the command line and the job file"):
            request = parse()
        probe = _measure(cluster, request.train, rank.status)
        with cluster.agree("writing the result"):
            if cluster.rank == 0:
                with writing(request.output, "--output"):
                    probe.write(request.output)
    rank.finish(False)
    sys.exit(0)


def _measure(cluster: Cluster, request: TrainRequest, rank_status: RankStatusFile) -> Probe:
    """Return all measurements, the same on every rank. Collective over all ranks."""
    load = cluster.comm.bcast(os.getloadavg()[0])
    config = request.config
    cluster.assign(config)
    devices, _ = choose_devices(cluster, config)
    threads = limit_threads(cluster, config.device.threads, len(devices))
    with cluster.agree("making the job"):
        job = request.make()
        with errors_located(request.job_file, job):
            plan = make_plan(job, job.completed(config), 1)
        # Each rank uses other examples, for independent estimates of the noise scale.
        position = cluster.rank * len(job.train_split) // cluster.size
        model = RankModel(job, plan, list(devices), position)
    limit_threads_of_torch(threads)
    cluster.check_layout(plan.layout)
    ranks = RankFacts(tuple(np.unique(cluster.node_of, return_counts=True)[1].tolist()), cluster.cores, load)
    within, between = measure_links(cluster)
    with subnormals.flushed(config.device.flush_denormals):
        exchanges = measure_exchanges(cluster, plan, model.gradient)
        all_at_once(cluster, lambda: model.train(_TRAINING_S))
        noise = all_at_once(cluster, lambda: model.noise(plan.batch))
        compute, times = _compute_times(cluster, model)
        server = one_at_a_time(cluster, lambda: model.server_times(cluster, _SHORT_S))
        codecs = _codec_times(cluster, model, ranks.stretch)
    model.close()
    steps = step_times(cluster, request, rank_status, sum(_at(compute, plan.batch)), _STEPS_S)
    factors = np.concatenate(cluster.comm.allgather(steps.compute_s / np.median(steps.compute_s)))
    apply_s, read_s = median_over_ranks(cluster.comm, [server.apply_s, server.read_s])
    return Probe(
        version=VERSION,
        job=_job_facts(request.name, job, plan, model, times),
        ranks=ranks,
        compute=_as_in_steps(cluster, compute, plan.batch, steps, ranks.stretch),
        server=type(server)(apply_s, read_s),
        codecs=codecs,
        within=within,
        between=between,
        exchanges=exchanges,
        step_factors=tuple(np.quantile(factors, np.linspace(0, 1, min(len(factors), _KEPT_FACTORS))).round(4).tolist()),
        noise=Noise(median_of_ranks(cluster.comm, noise.scale_examples), noise.steps),
    )


def _batches(batch: int) -> list[int]:
    """Return the numbers of examples to measure."""
    return sorted({max(1, batch // 4), max(1, batch // 2), batch, 2 * batch})


def _compute_times(cluster: Cluster, model: RankModel) -> tuple[ComputeTimes, BatchTimes]:
    """Return the times of one rank at a time, and this rank's times for the job's batch. Collective over all ranks."""
    batches = _batches(model.plan.batch)
    seconds = _COMPUTING_S / ((cluster.size + 2) * len(batches))
    alone = [one_at_a_time(cluster, lambda n=n: model.measure_batch(n, seconds)) for n in batches]  # type: ignore[misc]
    at_batch = alone[batches.index(model.plan.batch)]
    updates = one_at_a_time(cluster, lambda: [model.update_s(rows, _SHORT_S) for rows in ROWS])
    copies = one_at_a_time(cluster, lambda: [model.copy_s(_SHORT_S), model.handover_s(_SHORT_S)])
    comm = cluster.comm
    copy_s, handover_s = median_over_ranks(comm, copies)
    times = ComputeTimes(
        batches=tuple(batches),
        load_s=median_over_ranks(comm, [b.load_s for b in alone]),
        forward_s=median_over_ranks(comm, [b.forward_s for b in alone]),
        backward_s=median_over_ranks(comm, [b.backward_s for b in alone]),
        together=1.0,
        update_rows=ROWS,
        update_s=median_over_ranks(comm, updates),
        copy_s=copy_s,
        handover_s=handover_s,
        loop_s=0.0,
    )
    return times, at_batch


def _at(compute: ComputeTimes, batch: int) -> tuple[float, float, float]:
    """Return the times of loading, forward and backward for a batch that was measured."""
    index = compute.batches.index(batch)
    return compute.load_s[index], compute.forward_s[index], compute.backward_s[index]


def _as_in_steps(cluster: Cluster, compute: ComputeTimes, batch: int, steps: StepTimes, stretch: float) -> ComputeTimes:
    """Return the compute times, with the times that only steps of all ranks at once show. Collective over all ranks."""
    _, forward_s, backward_s = _at(compute, batch)
    together, update_s, loop_s = median_over_ranks(
        cluster.comm, [float(np.median(steps.compute_s)) / (forward_s + backward_s), steps.update_s, steps.loop_s]
    )
    more_s = max(0.0, update_s / stretch - compute.update_s[0])
    return replace(
        compute,
        together=max(1.0, together),
        update_s=tuple(seconds + more_s for seconds in compute.update_s),
        loop_s=loop_s / stretch,
    )


def _codec_times(cluster: Cluster, model: RankModel, stretch: float) -> dict[str, CodecTimes]:
    """Return the times of all compressions while all ranks encode at once. Collective over all ranks."""
    codecs = {}
    for name in filter(None, (codec.measured for codec in CODECS.values())):
        times = all_at_once(cluster, lambda name=name: [model.codec_times(name, _CODEC_S)])[0]  # type: ignore[misc]
        if times is not None:
            encode_s, decode_s = median_over_ranks(cluster.comm, [times.encode_s / stretch, times.decode_s / stretch])
            share = times.share if not name.startswith("powersgd") else _low_rank_share(model.plan)
            codecs[name] = CodecTimes(share, encode_s, decode_s)
    return codecs


def _job_facts(name: str, job: Job, plan: Plan, model: RankModel, times: BatchTimes) -> JobFacts:
    layout, optimizer = plan.layout, plan.optimizer
    return JobFacts(
        name=name,
        batch=plan.batch,
        examples=len(job.train_split),
        elements=layout.size,
        itemsize=plan.dtype.itemsize,
        vectors=len(plan.vectors),
        layer_starts=tuple(plan.layer_starts),
        ready=tuple(ready / times.backward_s for ready in times.ready_s),
        awaits_params=model.model.can_await_params,
        by_norms=optimizer.needs_sums,
    )


def _low_rank_share(plan: Plan) -> float:
    """Return the ratio of the elements that PowerSGD sends to the elements of the vector."""
    sent = plan.layout.size
    for matrix in matrices(plan.layout, LOW_RANK):
        sent += LOW_RANK * (matrix.n + matrix.m) - matrix.n * matrix.m
    return sent / plan.layout.size
