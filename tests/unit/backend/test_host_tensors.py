"""Tensors of any layout as contiguous tensors, and the sizes of their parts."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mpitrain.backend.host_tensors import check_parts, check_sizes, copy_back, split_rows, to_host  # noqa: E402

MATRIX = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("tensor", "is_view"),
    [
        (MATRIX, True),
        (MATRIX.t(), False),
        (MATRIX[:, 1:], False),
        (MATRIX[1], True),
        (torch.tensor(3.0), True),
        (torch.empty(0, 4), True),
        ((MATRIX + 2j * MATRIX).conj(), False),
        ((MATRIX + 2j * MATRIX).conj().imag, False),
    ],
)
def test_elements_in_order_and_a_view_if_possible(tensor: Any, is_view: bool) -> None:
    tensor = tensor.requires_grad_(tensor.is_floating_point() and tensor.is_leaf)
    flat = to_host(tensor)
    assert flat.tolist() == tensor.resolve_conj().resolve_neg().flatten().tolist()
    assert flat.is_contiguous() and not flat.requires_grad
    assert (flat.data_ptr() == tensor.data_ptr()) == is_view
    written = to_host(tensor, reads=False)
    assert written.shape == flat.shape and written.dtype == flat.dtype
    assert (written.data_ptr() == tensor.data_ptr()) == is_view


@pytest.mark.parametrize(
    "make", [lambda: torch.zeros(2, 3), lambda: torch.zeros(3, 2).t(), lambda: torch.zeros(2, 6)[:, ::2]]
)
def test_results_are_copied_back_unless_they_are_there(make: Any) -> None:
    tensor = make()
    flat = to_host(tensor, reads=False)
    flat.copy_(torch.arange(6.0))
    copy_back(tensor, flat)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="sparse_coo"):
        to_host(MATRIX.to_sparse())


@pytest.mark.parametrize(
    ("shape", "sizes", "ranks", "expected"),
    [
        ((6, 2), [], 3, [4, 4, 4]),
        ((6, 2), [1, 0, 5], 3, [2, 0, 10]),
        ((0, 2), [], 3, [0, 0, 0]),
        ((4,), [], 2, [2, 2]),
        ((), [], 1, [1]),
        ((6, 2), [], 4, None),
        ((6, 2), [3, 4], 2, None),
        ((6, 2), [3, 3], 3, None),
    ],
)
def test_rows_are_split(shape: tuple[int, ...], sizes: list[int], ranks: int, expected: list[int] | None) -> None:
    tensor = torch.zeros(shape)
    if expected is None:
        with pytest.raises(ValueError, match="6 rows"):
            split_rows(tensor, sizes, ranks)
    else:
        assert split_rows(tensor, sizes, ranks) == expected


def test_parts_must_fit() -> None:
    half = torch.zeros(3)
    check_sizes([half, torch.ones(1, 3)], half, 2, "gather")
    check_parts([torch.zeros(6)], [half], 2, "the output")
    for row in ([half], [half, torch.zeros(2)], [half, half.double()]):
        with pytest.raises(ValueError, match="gather"):
            check_sizes(row, half, 2, "gather")
    for whole in (torch.zeros(5), torch.zeros(6, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"\(5,\)|float64"):
            check_parts([whole], [half], 2, "the output")
