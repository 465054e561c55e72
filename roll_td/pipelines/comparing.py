"""Where numbers that were recorded and numbers that were computed again differ first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Compared:
    """One column of one stage."""

    stage: str
    column: str
    count: int
    """Numbers that were compared."""
    largest: float
    """The largest difference, as a share of the recorded number where that is above 1; inf where
    one of both alone is NaN."""
    tolerance: float
    """What it may be."""
    first: str
    """Where the first one beyond it is, with both numbers; empty if there is none."""


def compare(
    stage: str,
    column: str,
    recorded: Tensor,
    computed: Tensor,
    where: Tensor,
    names: Sequence[object],
    tolerance: float,
) -> Compared:
    """recorded, computed: numbers or bools, (B) or (B, T). where: bool, of the same shape, what
    counts. names: what the rows are called. NaN is equal to NaN; another shape differs."""
    if recorded.shape != computed.shape:
        shapes = f"the step: recorded {list(recorded.shape)}, computed {list(computed.shape)}"
        return Compared(stage, column, 0, math.inf, tolerance, shapes)
    old, new = recorded.double(), computed.double()
    gap = (old - new).abs() / old.abs().clamp(min=1)
    gap = torch.where(old.isnan() & new.isnan() | (old == new), 0.0, gap)
    gap = torch.where(gap.isnan(), torch.inf, gap).where(where, 0.0)
    beyond = (gap > tolerance).nonzero()
    first = ""
    if len(beyond):
        place = tuple(beyond[0].tolist())
        token = f", token {place[1]}" if len(place) > 1 else ""
        first = f"{names[place[0]]}{token}: recorded {old[place]:.7g}, computed {new[place]:.7g}"
    largest = gap.max().item() if gap.numel() else 0.0
    return Compared(stage, column, int(where.sum()), largest, tolerance, first)


def comparison_table(compared: Sequence[Compared], told: Sequence[str]) -> str:
    """A line for each, then what was `told` beside them, and where the first difference is."""
    head = ("stage", "column", "compared", "difference", "tolerance", "")
    rows = [
        (
            one.stage,
            one.column,
            str(one.count),
            f"{one.largest:.1e}" if one.largest else "0",
            f"{one.tolerance:g}",
            f"DIFFERS: {one.first}" if one.first else "equal",
        )
        for one in compared
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    differing = [one for one in compared if one.first]
    end = "no difference"
    if differing:
        end = (
            f"first difference: {differing[0].stage}, {differing[0].column} of {differing[0].first}"
        )
    return "\n".join([*lines, *told, end])
