"""The placement report: which device computes which layer, and which memory holds which vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.device import Device
from ..core.words import counted
from ..monitor.format import format_table, size_of
from ..nn.conv import Conv2D
from ..nn.layer import Layer, walk
from ..plan.network import Network
from ..plan.plan import Plan

_ON_DEVICES = "every worker's device"


def placement_report(network: Network, plan: Plan, devices: Sequence[Device], resident: bool) -> str:
    """Return the tables of layers and vectors for ``--log-device-placement``.

    Args:
        devices: The devices of one worker.
        resident: Whether the vectors are in the memory of every worker's device.
    """
    alone = plan.workers == 1
    names = ", ".join(device.name for device in devices) if alone else "own device, as above"
    layers = [(*component, names) for component in network.components()]
    holder = _holder(plan, resident)
    vectors = [(name, size_of(plan.nbytes), holder) for name in plan.vectors]
    vectors.append(
        ("gradients", f"{len(devices)} x {size_of(plan.nbytes)}", _ON_DEVICES if resident else "every worker's host")
    )
    return "\n".join(
        [
            format_table(("layer", "kind", "parameters", "device" if alone else "device of each worker"), layers),
            format_table(("vector", "size", "in the memory of"), vectors),
            *_convolutions(network.model, devices[0]),
        ]
    )


def _convolutions(model: object, device: Any) -> list[str]:
    """Return a line on how a GPU computes convolutions, if there are any."""
    if not device.is_gpu or not isinstance(model, Layer):
        return []
    if not any(isinstance(layer, Conv2D) for _, layer in walk(model)):
        return []
    why = device.why_no_cudnn
    if why:
        return [f"convolutions use matrix products: {why}"]
    return ["convolutions use cuDNN if it has an execution plan"]


def _holder(plan: Plan, resident: bool) -> str:
    """Return a description of the memory that holds the vectors that training changes."""
    config = plan.config
    if resident:
        return _ON_DEVICES
    if config.servers.ps:
        return counted(config.servers.ps, "server")
    return "each node" if config.parallel.shared_memory and not config.mode.averages_params else "every worker"
