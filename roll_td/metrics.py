"""Metrics that know how to be reduced: a metric is a float whose type says how parts are merged."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self


class Metric(float):
    """The current value of a metric; prints, compares and serialises as the float it is.

    The subclasses are the reductions: Mean, Sum, Min, Max, Last.
    """

    __slots__ = ()

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Reduce parts (at least one, in rank order) to one metric of the same type."""
        raise NotImplementedError(f"{cls.__name__} has no reduction: use Mean, Sum, Min, Max, Last")


class Mean(Metric):
    """A mean over `count` things (rows, tokens); merging weights each part by its count.

    A Mean of count 0 says "nothing was measured": its value does not matter to a merge.
    ValueError for a count below 0 or without end.
    """

    __slots__ = ("count",)
    count: float

    def __new__(cls, value: float, count: float = 1.0) -> Self:
        if not 0 <= count < math.inf:
            raise ValueError(
                f"Mean got count {count}: a count is 0 or more; give the number of things averaged"
            )
        self = super().__new__(cls, value)
        self.count = float(count)
        return self

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        """What pickle and copy pass to __new__, so that the count survives both."""
        return float(self), self.count

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """The mean weighted by count; NaN with count 0 if no part counts."""
        counted = [part for part in parts if part.count > 0]
        if not counted:
            return cls(math.nan, 0.0)
        total = sum(part.count for part in counted)
        return cls(sum(float(part) * part.count for part in counted) / total, total)


class Sum(Metric):
    """A total; parts are added."""

    __slots__ = ()

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """The sum of the parts."""
        return cls(sum(parts))


class Min(Metric):
    """A smallest value; NaN if any part is NaN."""

    __slots__ = ()

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """The smallest part."""
        return cls(math.nan if any(map(math.isnan, parts)) else min(parts))


class Max(Metric):
    """A largest value; NaN if any part is NaN."""

    __slots__ = ()

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """The largest part."""
        return cls(math.nan if any(map(math.isnan, parts)) else max(parts))


class Last(Metric):
    """A state (a learning rate, a queue length); the last part wins."""

    __slots__ = ()

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """The last part."""
        return parts[-1]


def as_metric(key: str, value: Any) -> Metric:
    """`value` if it is a Metric; a number, numpy scalar or 0-d tensor becomes a Mean of count 1.

    TypeError, naming the key, for anything else.
    """
    if isinstance(value, Metric):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if not isinstance(value, int | float):
        raise TypeError(
            f"metric {key!r} is {value!r} ({type(value).__name__}): a metric is one number; "
            "reduce it first, or keep it outside metrics"
        )
    return Mean(value)


def merge_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, Metric]:
    """Merge the metrics of several ranks or calls, each key by the reduction its type names.

    Keys that only some parts have are kept. A bare number is a Mean of count 1. TypeError, naming
    the key, for a value that is no number; ValueError, naming it, for unlike reductions of one key.
    """
    collected: dict[str, list[Metric]] = {}
    for part in parts:
        for key, value in part.items():
            collected.setdefault(key, []).append(as_metric(key, value))
    return {key: _merge_one(key, values) for key, values in collected.items()}


def _merge_one(key: str, values: list[Metric]) -> Metric:
    kinds = sorted({type(value).__name__ for value in values})
    if len(kinds) > 1:
        raise ValueError(
            f"metric {key!r} comes as {' and '.join(kinds)}: one key has one reduction; "
            "use the same type everywhere (a bare number is a Mean)"
        )
    return type(values[0]).merge(values)


def under(role: str, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics by names that begin with that of what they are of."""
    return {f"{role}/{name}": value for name, value in metrics.items()}
