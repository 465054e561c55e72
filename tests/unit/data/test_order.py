"""The order of rows: a function of seed and place, exact over epochs and mixtures."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_td.config.data import PERIOD
from roll_td.data.order import Order, permutation


def drawn(order: Order, position: int, count: int) -> list[tuple[int, int]]:
    which, rows = order.rows(position, count)
    return list(zip(which.tolist(), rows.tolist(), strict=True))


def test_an_order_is_recorded() -> None:
    """It must not change with numpy, or a run that goes on would see other data."""
    assert permutation(10, 42, "epoch", 0, 0).tolist() == [4, 6, 0, 7, 2, 1, 5, 8, 3, 9]


def test_without_shuffle_rows_come_as_they_are() -> None:
    assert drawn(Order([3], [1.0], 0, shuffle=False), 1, 6) == [
        (0, row) for row in (1, 2, 0, 1, 2, 0)
    ]


def test_d12_steps_after_a_resume_use_the_rows_not_used_yet() -> None:
    first, resumed = (Order([10], [1.0], 7, shuffle=True) for _ in range(2))
    used = [row for step in range(3) for _, row in drawn(first, 2 * step, 2)]
    rest = [row for step in range(3, 5) for _, row in drawn(resumed, 2 * step, 2)]
    assert sorted(used + rest) == list(range(10))
    assert rest == [row for step in range(3, 5) for _, row in drawn(first, 2 * step, 2)]


def test_d12_also_when_steps_take_unlike_numbers_of_rows() -> None:
    order = Order([10], [1.0], 7, shuffle=True)
    pieces = [drawn(order, at, n) for at, n in ((0, 2), (2, 5), (7, 1), (8, 2))]
    assert list(chain(*pieces)) == drawn(Order([10], [1.0], 7, shuffle=True), 0, 10)


def test_epochs_and_seeds_differ() -> None:
    order = drawn(Order([50], [1.0], 1, shuffle=True), 0, 100)
    assert order[:50] != order[50:]
    assert order[:50] != drawn(Order([50], [1.0], 2, shuffle=True), 0, 50)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 10), min_size=4, max_size=4),
    seed=st.integers(-5, 2**70),
    cuts=st.lists(st.integers(1, 60), max_size=5),
)
def test_each_epoch_of_each_data_set_has_each_row_once(
    sizes: list[int], weights: list[float], seed: int, cuts: list[int]
) -> None:
    order = Order(sizes, weights[: len(sizes)], seed, shuffle=True)
    stream = drawn(order, 0, 200)
    for number, size in enumerate(sizes):
        own = [row for data_set, row in stream if data_set == number]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
        last = own[len(own) // size * size :]
        assert len(set(last)) == len(last)
    at = 0
    for count in cuts:  # any cut of the stream, also from a new object, is the same stream
        fresh = Order(sizes, weights[: len(sizes)], seed, shuffle=True)
        whole = drawn(order, at, count)
        assert drawn(fresh, at, count) == whole
        at += count


def test_a_mixture_is_even_at_every_place_and_exact_in_a_period() -> None:
    weights = [0.2, 0.5, 0.3]
    order = Order([7, 11, 13], weights, 3, shuffle=True)
    which, _ = order.rows(0, 3 * PERIOD)
    for start in range(0, 3 * PERIOD - 100, 997):
        counts = Counter(which[start : start + 100].tolist())
        assert all(abs(counts[i] - 100 * w) <= 2 for i, w in enumerate(weights))
    assert Counter(which.tolist()) == {0: 6_000, 1: 15_000, 2: 9_000}


def test_weights_that_do_not_divide_a_period_still_fill_it() -> None:
    which, _ = Order([5, 5, 5], [1, 1, 1], 0, shuffle=True).rows(0, PERIOD)
    assert np.bincount(which).tolist() == [3334, 3333, 3333]


def test_far_places_cost_nothing_more() -> None:
    order = Order([999], [1.0], 0, shuffle=True)
    rows = [row for _, row in drawn(order, 999 * (10**9 + 10), 999)]
    assert sorted(rows) == list(range(999))


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data sets of \[3, 0\] rows: each needs one"):
        Order([3, 0], [1.0, 1.0], 0, shuffle=True)
