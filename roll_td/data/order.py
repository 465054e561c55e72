"""Which row comes when: a function of the seed and of a place in an endless stream of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from roll_td.config.data import PERIOD

Numbers = NDArray[np.int64]


def permutation(size: int, *key: object) -> Numbers:
    """The numbers below `size` (size,) in an order that follows from `key`.

    It is the same with every version of numpy: raw bits of a bit generator are (NEP 19), what
    Generator.permutation makes of them need not be.
    """
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little")
    bits = np.random.PCG64(seed).random_raw(size)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)


class Order:
    """An endless stream of the rows of one or several data sets.

    Of any PERIOD places that start at a multiple of it, each data set has its share, evenly
    spread. Of each data set come all rows once, then all once more in another order, and so on;
    without `shuffle` in their own order. Nothing is stored that would be needed to go on from
    some place. ValueError for an empty data set.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool
    ) -> None:
        if min(sizes, default=0) < 1:
            raise ValueError(f"data sets of {list(sizes)} rows: each needs one at least")
        self._sizes = np.array(sizes, np.int64)
        self._seed = seed
        self._shuffle = shuffle
        self._counts = _shares(weights)
        self._set, self._before = _pattern(self._counts)
        self._orders: dict[int, tuple[int, Numbers]] = {}

    def rows(self, position: int, count: int) -> tuple[Numbers, Numbers]:
        """(data set, row in it) of the places position … position + count - 1, each (count,)."""
        periods, places = np.divmod(np.arange(position, position + count), PERIOD)
        which = self._set[places]
        drawn = periods * self._counts[which] + self._before[places]
        epochs, rows = np.divmod(drawn, self._sizes[which])
        for data_set, epoch in np.unique(np.stack([which, epochs]), axis=1).T.tolist():
            here = (which == data_set) & (epochs == epoch)
            rows[here] = self._order(data_set, epoch)[rows[here]]
        return which, rows

    def _order(self, data_set: int, epoch: int) -> Numbers:
        """The order of an epoch; the last one asked for of each data set is kept."""
        kept = self._orders.get(data_set)
        if kept is None or kept[0] != epoch:
            size = int(self._sizes[data_set])
            key = (self._seed, "epoch", data_set, epoch)
            kept = epoch, permutation(size, *key) if self._shuffle else np.arange(size)
            self._orders[data_set] = kept
        return kept[1]


def _shares(weights: Sequence[float]) -> Numbers:
    """Whole numbers that sum to PERIOD, as the weights do (largest remainders)."""
    exact = np.array(weights) / sum(weights) * PERIOD
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")
    counts[largest[: PERIOD - counts.sum()]] += 1
    return counts


def _pattern(counts: Numbers) -> tuple[Numbers, Numbers]:
    """Of each place of a period (PERIOD,): its data set, and how many before it are of the same."""
    data_sets = np.repeat(np.arange(len(counts)), counts)
    before = np.concatenate([np.arange(count) for count in counts])
    spread = np.argsort((before + 0.5) / counts[data_sets], kind="stable")
    return data_sets[spread], before[spread]
