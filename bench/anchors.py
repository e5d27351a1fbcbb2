"""Simulate the published scaling results of Horovod and ChainerMN from the hardware that their authors state.

    python bench/anchors.py

The inputs with their sources are in ``predicted/hardware.toml``, which was committed before the first simulation.
The columns are:

- the published and the predicted efficiency (or duration), and their difference in percentage points;
- the predicted efficiency with other latencies of a network hop;
- the predicted efficiency with a GPU that takes 5 % longer per step, which the papers do not mention.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mpitrain.core.toml import read_toml  # noqa: E402
from tests.support.ring import FusedBuffer, Ring, fuse, step_s  # noqa: E402

SLOWEST = 1.05
IMAGES = 1_281_167


def layers_of(model: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return each layer's number of parameters in millions, and its share of the operations."""
    if "layers" in model:
        return [(parameters, share) for parameters, share in model["layers"]]
    return [(total / count, share / count) for count, total, share in model["stages"] for _ in range(count)]


def simulated_step_s(result: Mapping[str, Any], tables: Mapping[str, Any], hop_s: float, factor: float = 1.0) -> float:
    """Return the seconds of a step on all GPUs."""
    assumed = tables["assumptions"]
    compute_s = result["batch"] / result["images_per_s"]
    backward_s = assumed["backward_share"] * compute_s
    width = 1e6 * result.get("bytes_per_parameter", 4)
    layers = [(parameters * width, share) for parameters, share in layers_of(tables["models"][result["model"]])]
    buffers = fuse(layers, compute_s - backward_s, backward_s, result["fused_bytes"])
    if result.get("after_backward"):
        buffers = [FusedBuffer(buffer.nbytes, compute_s) for buffer in buffers]
    rate = result["link_bits_per_s"] / 8 * assumed["link_share"]
    if not result.get("hierarchical"):
        ring = Ring(result["nodes"], result["gpus_per_node"], rate, assumed["pci_hop_s"], hop_s)
        return step_s(buffers, compute_s, ring, factor)
    within_s = 2 * sum(nbytes for nbytes, _ in layers) / assumed["pci_bytes_per_s"]  # reduce, and broadcast
    return step_s(buffers, compute_s, Ring(result["nodes"], 1, rate, 0.0, hop_s), factor) + within_s


def main() -> None:
    tables = read_toml(ROOT / "bench" / "predicted" / "hardware.toml")
    assumed = tables["assumptions"]
    print(f"{'result':36} {'published':>10} {'predicted':>10} {'points':>7}   at other hops   slowest GPU + 5 %")
    for result in tables["results"]:
        compute_s = result["batch"] / result["images_per_s"]

        def efficiency(hop_s: float, factor: float = 1.0, result: Any = result, compute_s: float = compute_s) -> float:
            return 100 * compute_s / simulated_step_s(result, tables, hop_s, factor)

        predicted = efficiency(assumed["network_hop_s"])
        others = ", ".join(f"{efficiency(hop_s):.1f}" for hop_s in assumed["network_hops_s"])
        slow = efficiency(assumed["network_hop_s"], SLOWEST)
        if "published" in result:
            published = 100 * result["published"]
            print(
                f"{result['name']:36} {published:8.0f} % {predicted:8.1f} % {predicted - published:+7.1f}   "
                f"{others:13}   {slow:.1f}"
            )
        else:
            steps = result["epochs"] * IMAGES / (result["batch"] * result["nodes"] * result["gpus_per_node"])
            minutes = steps * simulated_step_s(result, tables, assumed["network_hop_s"]) / 60
            print(
                f"{result['name']:36} {result['published_minutes']:6.0f} min {minutes:6.1f} min           "
                f"{others:13}   {slow:.1f}  (efficiency {predicted:.1f} %)"
            )


if __name__ == "__main__":
    main()
