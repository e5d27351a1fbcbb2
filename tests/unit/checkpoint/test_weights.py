"""Files of parameters that other programs have written: values are read exactly, whatever their types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mpitrain import checkpoint  # noqa: E402
from mpitrain.core.layout import Layout  # noqa: E402
from mpitrain.errors import CheckpointError  # noqa: E402

LAYOUT = Layout.pack([("a.weight", (3, 5), "param"), ("a.bias", (3,), "param"), ("n", (), "param")])


def values(dtype: Any) -> dict[str, Any]:
    chance = torch.Generator().manual_seed(0)
    return {
        entry.name: torch.randn(entry.shape, generator=chance, dtype=torch.float64).to(dtype)
        for entry in LAYOUT.entries
    }


def write(path: Path, tensors: dict[str, Any]) -> Path:
    if path.suffix == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_values_of_all_types_are_rounded_once(tmp_path: Path, name: str, stored: Any, dtype: Any) -> None:
    tensors, params = values(stored), np.full(LAYOUT.size, 7, dtype)
    fit = checkpoint.load_matching(write(tmp_path / name, tensors), LAYOUT, params)
    assert fit.fitting == tuple(tensors) and not fit.wrong
    for key, view in LAYOUT.views(params).items():
        assert view.tobytes() == tensors[key].double().numpy().astype(dtype).tobytes()


def test_what_the_model_does_not_have_is_left_out(tmp_path: Path) -> None:
    tensors, params = values(torch.float32), np.full(LAYOUT.size, 7, np.float32)
    del tensors["n"]
    tensors |= {"a.bias": torch.zeros(4), "more": torch.zeros(2), "steps": torch.tensor(3)}
    fit = checkpoint.load_matching(write(tmp_path / "a.pt", tensors), LAYOUT, params)
    assert (fit.fitting, fit.missing, fit.unexpected) == (("a.weight",), ("n",), ("more",))
    assert fit.reshaped == {"a.bias": ((4,), (3,))}
    views = LAYOUT.views(params)
    assert views["a.weight"].tobytes() == tensors["a.weight"].numpy().tobytes()
    assert (views["a.bias"] == 7).all() and views["n"] == 7
    with pytest.raises(CheckpointError):
        checkpoint.load_matching(write(tmp_path / "b.pt", {"more": torch.zeros(2)}), LAYOUT, params)
