"""How the rows of one batch are cut: over dp ranks, then into micro-batches.

The driver makes a StepPlan because it sees the whole batch; dispatch cuts by it; a rank gets
its LocalPlan. Ranks that step together need equally many micro-batches, so a rank that has
fewer ends with fillers: micro-batches that repeat a row, take part in every collective, and
count nowhere.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

MicroBatches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StepPlan:
    """One global mini-batch, cut. Making one checks nothing; `validate` does."""

    micro_batches: tuple[MicroBatches, ...]
    """Per dp rank its micro-batches, each as row numbers of the batch; equal in count."""
    denominators: Mapping[str, float]
    """Global denominators of the losses, by name."""
    fillers: tuple[int, ...] = ()
    """Per dp rank how many of its last micro-batches are fillers; () means none anywhere."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "denominators", dict(self.denominators))
        if not self.fillers:
            object.__setattr__(self, "fillers", (0,) * len(self.micro_batches))

    @property
    def dp_size(self) -> int:
        """Number of dp ranks the plan is for."""
        return len(self.micro_batches)

    def real(self, dp_rank: int) -> MicroBatches:
        """The micro-batches of a dp rank without its fillers."""
        own = self.micro_batches[dp_rank]
        return own[: len(own) - self.fillers[dp_rank]]

    def validate(self, num_rows: int) -> None:
        """Raise ValueError unless this plan fits a batch of num_rows rows.

        Every row is in exactly one micro-batch that is not a filler; dp ranks have equally
        many micro-batches; none is empty; fillers repeat rows of the batch; denominators are
        finite and not negative.
        """
        _check_counts(self)
        _check_rows(self, num_rows)
        for name, value in self.denominators.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"StepPlan: denominator {name!r} is {value}; it must be finite and not "
                    "negative: count the tokens or rows of the whole batch"
                )


@dataclass(frozen=True)
class LocalPlan:
    """The part of a StepPlan that one dp rank carries out."""

    rows: tuple[int, ...]
    """Row numbers of the batch this rank gets: its own, then those only its fillers need."""
    num_real: int
    """How many of `rows`, from the first, are its own and go into results."""
    micro_batches: MicroBatches
    """Its micro-batches as positions in `rows`."""
    fillers: int
    """How many of the last micro-batches count nowhere."""
    denominators: Mapping[str, float]
    """Global denominators of the losses, by name."""

    def is_filler(self, i: int) -> bool:
        """Whether micro-batch i must have zero weight. Raises IndexError if there is no i."""
        count = len(self.micro_batches)
        if not 0 <= i < count:
            raise IndexError(f"micro-batch {i} of {count}: give a number from 0 to {count - 1}")
        return i >= count - self.fillers


def default_plan(
    num_rows: int,
    dp_size: int,
    micro_batch_size: int | None,
    denominators: Mapping[str, float],
) -> StepPlan:
    """Rows in order: over dp ranks as numpy.array_split, then in micro-batches, then levelled.

    micro_batch_size None puts all rows of a dp rank in one micro-batch. No rows, no
    micro-batches. Raises ValueError for a negative num_rows, or a size below 1.
    """
    size_or_1 = 1 if micro_batch_size is None else micro_batch_size
    _check_least(num_rows=(num_rows, 0), dp_size=(dp_size, 1), micro_batch_size=(size_or_1, 1))
    size = micro_batch_size or max(num_rows, 1)
    shards = (shard.tolist() for shard in np.array_split(np.arange(num_rows), dp_size))
    return level(
        [[shard[i : i + size] for i in range(0, len(shard), size)] for shard in shards],
        denominators,
    )


def token_plan(
    lengths: Sequence[int],
    dp_size: int,
    max_tokens: int,
    denominators: Mapping[str, float],
) -> StepPlan:
    """Micro-batches of at most max_tokens tokens each and about equal size, as few as that takes.

    lengths: tokens of each row. Longest row first, each goes to the smallest micro-batch (Graham
    1969, doi:10.1137/0117039); where even that has no room, each dp rank gets one more. A row
    above max_tokens is a micro-batch of its own. In each turn the dp ranks have micro-batches of
    neighbouring sizes, since they wait for the largest. Raises ValueError for a negative length,
    or a dp_size or max_tokens below 1.
    """
    shortest = min(lengths, default=0)
    _check_least(dp_size=(dp_size, 1), max_tokens=(max_tokens, 1), shortest_row=(shortest, 0))
    total = sum(min(length, max_tokens) for length in lengths)
    turns = max(1, math.ceil(total / (max_tokens * dp_size)))
    rows_of: list[list[int]] = [[] for _ in range(turns * dp_size)]
    smallest = [(0, i) for i in range(len(rows_of))]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if rows_of[smallest[0][1]] and smallest[0][0] + lengths[row] > max_tokens:
            for _ in range(dp_size):
                heapq.heappush(smallest, (0, len(rows_of)))
                rows_of.append([])
        tokens, i = smallest[0]
        rows_of[i].append(row)
        heapq.heapreplace(smallest, (tokens + lengths[row], i))
    size = {i: tokens for tokens, i in smallest}
    filled = sorted((i for i, rows in enumerate(rows_of) if rows), key=lambda i: -size[i])
    dealt: list[list[list[int]]] = [[] for _ in range(dp_size)]
    for turn, start in enumerate(range(0, len(filled), dp_size)):
        ranks = range(dp_size) if turn % 2 == 0 else reversed(range(dp_size))
        for rank, i in zip(ranks, filled[start : start + dp_size], strict=False):
            dealt[rank].append(sorted(rows_of[i]))
    return level(dealt, denominators)


def level(
    micro_batches: Sequence[Sequence[Sequence[int]]], denominators: Mapping[str, float]
) -> StepPlan:
    """A StepPlan of the given micro-batches per dp rank, with fillers where a rank has fewer.

    A filler is one row: the rank's first, or row 0 of the batch if the rank owns none.
    """
    longest = max((len(own) for own in micro_batches), default=0)
    fillers = tuple(longest - len(own) for own in micro_batches)
    return StepPlan(
        micro_batches=tuple(
            tuple(tuple(rows) for rows in own) + ((own[0][0] if own else 0,),) * missing
            for own, missing in zip(micro_batches, fillers, strict=True)
        ),
        denominators=denominators,
        fillers=fillers,
    )


def local(plan: StepPlan, dp_rank: int) -> LocalPlan:
    """What dp rank dp_rank of a valid plan gets and does. Raises ValueError for no such rank."""
    if not 0 <= dp_rank < plan.dp_size:
        raise ValueError(
            f"dp rank {dp_rank}: the plan is for {plan.dp_size} dp ranks; "
            f"give 0 to {plan.dp_size - 1}"
        )
    everything = plan.micro_batches[dp_rank]
    num_real = sum(len(rows) for rows in plan.real(dp_rank))
    position: dict[int, int] = {}
    for row in chain.from_iterable(everything):
        position.setdefault(row, len(position))
    return LocalPlan(
        rows=tuple(position),
        num_real=num_real,
        micro_batches=tuple(tuple(position[row] for row in rows) for rows in everything),
        fillers=plan.fillers[dp_rank],
        denominators=plan.denominators,
    )


def restore_order(plan: StepPlan) -> list[int]:
    """For each row of the batch, where it lies among the real rows of the dp ranks in turn.

    Taking this permutation of the dp-ordered concatenation gives the batch's own order.
    """
    order: list[int] = np.argsort(_real_rows(plan), kind="stable").tolist()
    return order


def _check_least(**values: tuple[int, int]) -> None:
    """Raise ValueError for the first (value, least) whose value is below its least."""
    for name, (value, least) in values.items():
        if value < least:
            raise ValueError(f"plan: {name} is {value}; give an integer of at least {least}")


def _real_rows(plan: StepPlan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    real = chain.from_iterable(plan.real(dp_rank) for dp_rank in range(plan.dp_size))
    return np.fromiter(chain.from_iterable(real), dtype=np.int64)


def _check_counts(plan: StepPlan) -> None:
    counts = [len(own) for own in plan.micro_batches]
    if not counts:
        raise ValueError("StepPlan: it has 0 dp ranks; give the micro-batches of at least one")
    if min(counts) != max(counts):
        raise ValueError(
            f"StepPlan: {_some(counts)} micro-batches per dp rank; ranks step together, so the "
            "counts must be equal: make the plan with level(), which adds fillers"
        )
    if len(plan.fillers) != plan.dp_size:
        raise ValueError(
            f"StepPlan: fillers has {len(plan.fillers)} entries for {plan.dp_size} dp ranks; "
            "give one per dp rank, or leave it out"
        )
    for dp_rank, fillers in enumerate(plan.fillers):
        if not 0 <= fillers <= counts[0]:
            raise ValueError(
                f"StepPlan: dp rank {dp_rank} has {fillers} fillers; they are the last of its "
                f"{counts[0]} micro-batches, so give 0 to {counts[0]}"
            )
        for i, rows in enumerate(plan.micro_batches[dp_rank]):
            if not rows:
                raise ValueError(
                    f"StepPlan: micro-batch {i} of dp rank {dp_rank} is empty; give it a row, "
                    "or make the plan with level(), which adds fillers"
                )


def _check_rows(plan: StepPlan, num_rows: int) -> None:
    everything = chain.from_iterable(chain.from_iterable(plan.micro_batches))
    named = np.fromiter(everything, dtype=np.int64)
    outside = named[(named < 0) | (named >= num_rows)]
    if outside.size:
        raise ValueError(
            f"StepPlan: rows {_some(outside.tolist())} are not in a batch of {num_rows} rows; "
            f"row numbers go from 0 to {num_rows - 1}: plan the batch that is dispatched"
        )
    times = np.bincount(_real_rows(plan), minlength=num_rows)
    for rows, fault in ((times == 0, "in no micro-batch"), (times > 1, "more than once")):
        if rows.any():
            raise ValueError(
                f"StepPlan: rows {_some(np.flatnonzero(rows).tolist())} of {num_rows} are named "
                f"{fault} (fillers aside); name each row exactly once"
            )


def _some(numbers: Iterable[int]) -> str:
    """The first few numbers, as text."""
    given = list(numbers)
    return str(given) if len(given) <= 8 else f"{str(given[:8])[:-1]}, … {len(given) - 8} more]"
