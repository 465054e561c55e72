"""From losses of tokens to one number: a sum here, its denominator from the whole batch.

A micro-batch or a rank adds its sum divided by the global denominator, so neither changes a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from roll_td.algorithms.choosing import named
from roll_td.algorithms.masking import check_mask, keep, row_means


class Aggregation(NamedTuple):
    """A row of the table."""

    total: Callable[[Tensor, Tensor], Tensor]
    """(losses (b, T), mask (b, T)) → their sum, scalar."""
    denominator: str
    """Name of what it is divided by, as `denominators` has it."""


def _over_tokens(losses: Tensor, mask: Tensor) -> Tensor:
    return keep(losses, mask).sum()


def _over_row_means(losses: Tensor, mask: Tensor) -> Tensor:
    return row_means(losses, mask).sum()


AGGREGATIONS = {
    # each token of the batch weighs the same (DAPO, arXiv:2503.14476, equation 12)
    "token-mean": Aggregation(_over_tokens, "tokens"),
    # each row weighs the same (GRPO, arXiv:2402.03300, equation 3)
    "seq-mean-token-mean": Aggregation(_over_row_means, "rows"),
    # a row weighs as much as it has tokens
    "seq-mean-token-sum": Aggregation(_over_tokens, "rows"),
    # as that, over a number that no length changes (Dr. GRPO, arXiv:2503.20783, section 3)
    "constant": Aggregation(_over_tokens, "constant"),
}


def denominators(response_mask: Tensor, *, divisor: float | None = None) -> dict[str, float]:
    """The denominators of a whole global mini-batch by name: what goes into its plan.

    response_mask: bool (B, T), after all masking, so that what is masked (truncated answers, rows
    without a score) is in neither part of the fraction. tokens: True entries; rows: rows that have
    any; constant: rows · divisor, if a divisor (tokens a row) is given.
    """
    check_mask(response_mask)
    rows = float(response_mask.any(-1).sum())
    counts = {"tokens": float(response_mask.sum()), "rows": rows}
    return counts if divisor is None else counts | {"constant": rows * divisor}


def aggregate(
    losses: Tensor, response_mask: Tensor, denominators: Mapping[str, float], *, mode: str
) -> Tensor:
    """The part of the global loss that comes from these rows, scalar.

    losses: float (b, T). response_mask: bool (b, T). denominators: of the global mini-batch these
    rows are of. mode: a name of AGGREGATIONS. A batch in which nothing counts has loss 0.
    ValueError for another mode, KeyError for a denominator that isn't there.
    """
    total, name = named("aggregation", mode, AGGREGATIONS)
    return total(losses, response_mask) / (denominators[name] or 1.0)
