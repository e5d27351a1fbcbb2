"""The GPU has its own form of every member that the CPU has: one that is missing would silently be the CPU's."""

from __future__ import annotations

import ast

from ...support.launch import ROOT


def members_of(module: str, name: str) -> set[str]:
    """Return the public methods of a class, which is read as text: the module of the GPU imports CuPy."""
    tree = ast.parse((ROOT / "mpitrain" / "models" / f"{module}.py").read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.name for node in found.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}


def test_the_gpu_overrides_every_method_of_the_cpu() -> None:
    of_cpu = members_of("torch_device", "TorchDevice")
    assert {"activate", "to_host", "synchronize"} <= of_cpu <= members_of("torch_gpu", "TorchGpu")
