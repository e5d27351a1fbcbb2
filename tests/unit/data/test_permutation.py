"""The order of examples: for any number of examples, each is in each epoch once, and equally likely in every place."""

import numpy as np
import pytest

from mpitrain.data.permutation import MIXED_BLOCKS, order


@pytest.mark.parametrize("block", [None, 1, 3, 16])
def test_every_epoch_has_every_example_once(block):
    for n in range(max(1, block or 1), 201):
        for epoch in (0, 1, 1000):
            assert np.array_equal(np.sort(order(epoch * n, n, n, 7, block)), np.arange(n)), (n, epoch)


@pytest.mark.parametrize(("n", "block"), [(65_536, None), (65_537, None), (60_000, 1000), (99_991, 64)])
def test_large_data_sets_too(n, block):
    assert np.array_equal(np.sort(order(3 * n, n, n, 1, block)), np.arange(n))


@pytest.mark.parametrize("block", [None, 5])
def test_a_position_has_its_example_however_it_is_asked_for(block):
    n = 23
    stream = order(0, 5 * n, n, 2, block)
    for start, count in ((0, 1), (22, 2), (17, 60), (114, 1), (40, 0)):
        assert np.array_equal(order(start, count, n, 2, block), stream[start : start + count])


def test_positions_far_out_are_still_examples():
    assert np.array_equal(np.sort(order(7 * 10**15, 7, 7, 1)), np.arange(7))


@pytest.mark.parametrize("block", [None, 50])
def test_epochs_and_seeds_have_orders_of_their_own(block):
    n = 1000
    orders = [order(epoch * n, n, n, seed, block) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert np.count_nonzero(one == other) < 30  # 1 is expected by chance


def test_few_blocks_are_mixed_at_a_time_and_well():
    block = 100
    n = 20 * block + 3
    first = order(0, n, n, 4, block)
    groups = np.split(first[: 20 * block], [MIXED_BLOCKS * block, 2 * MIXED_BLOCKS * block])
    blocks = [np.unique(group // block, return_counts=True) for group in groups]
    assert [len(which) for which, _ in blocks] == [MIXED_BLOCKS, MIXED_BLOCKS, 20 - 2 * MIXED_BLOCKS]
    assert all((counts == block).all() for _, counts in blocks)
    assert sorted(np.concatenate([which for which, _ in blocks])) == list(range(20))
    assert not np.array_equal(np.sort(blocks[0][0]), np.arange(MIXED_BLOCKS))  # not the first blocks of the file
    assert len(np.unique(groups[0][:50] // block)) == MIXED_BLOCKS  # a batch has examples of all of them
    assert sorted(first[20 * block :]) == [2000, 2001, 2002]


@pytest.mark.parametrize("by", ["epoch", "seed"])
@pytest.mark.parametrize("n", [2, 3, 7, 16, 30])
def test_every_example_is_equally_often_in_every_place(n, by):
    draws = 20_000
    if by == "epoch":
        orders = order(0, draws * n, n, 11).reshape(draws, n)
    else:
        orders = np.stack([order(0, n, n, seed) for seed in range(draws)])
    counts = np.stack([np.bincount(orders[:, place], minlength=n) for place in range(n)])
    chi2 = ((counts - draws / n) ** 2 / (draws / n)).sum()
    freedom = (n - 1) ** 2
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5


def test_neighbours_in_the_file_are_no_neighbours_in_the_order():
    n, epochs = 50, 4000
    orders = order(0, n * epochs, n, 5).reshape(epochs, n)
    follows = np.count_nonzero(np.diff(orders, axis=1) == 1) / epochs
    assert abs(follows - (n - 1) / n) < 0.1
