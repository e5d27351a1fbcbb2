"""Where everything of a run lies: which device computes which layer, and which memory holds which vector."""

from __future__ import annotations

from collections.abc import Sequence

from .device import Device
from .monitor.console import format_table, size_of
from .nn.layer import Layer, walk
from .plan import Plan


def whereabouts(model: Layer, plan: Plan, devices: Sequence[Device], host: str) -> str:
    """Tables of layers and of vectors, for ``--log-device-placement``.

    Args:
        devices: A worker's.
        host: Whose memory a node's ranks share, for people.
    """
    names = ", ".join(device.name for device in devices)
    layers = [
        (path or "model", type(layer).__name__, _shapes(layer), names)
        for path, layer in walk(model)
        if not layer.children()
    ]
    config = plan.config
    if config.served:
        shared = f"{config.ps} servers" if config.ps > 1 else "the server" if config.ps else host
    else:
        shared = host if config.mode == "sync" and config.shared_memory else "every worker"
    vectors = [(name, size_of(plan.nbytes), shared) for name in plan.vectors]
    vectors.append(("gradients", f"{len(devices)} x {size_of(plan.nbytes)}", "every worker"))
    return "\n".join(
        [
            format_table(("layer", "kind", "parameters", "on each worker's"), layers),
            format_table(("vector", "size", "in the memory of"), vectors),
        ]
    )


def _shapes(layer: Layer) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, spec.shape))}" for name, spec in layer.declared.items())
