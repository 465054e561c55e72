"""Sums, means and moments in which what is masked has no part, whatever it is.

A mask is bool, True where a number counts. Masked numbers may be inf or NaN: they are replaced
before anything is done with them, so neither a result nor a gradient sees them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_td.metrics import Mean, Metric


def check_mask(mask: Tensor) -> None:
    """TypeError unless the mask is bool: it may be advantages in the wrong place."""
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}: want torch.bool; are the arguments in order?")


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 where the mask is False; no gradient flows there.

    values: any shape. mask: bool, the same shape. TypeError for a mask that isn't bool, ValueError
    for another shape.
    """
    check_mask(mask)
    if mask.shape != values.shape:
        shapes = f"{list(mask.shape)} for values of shape {list(values.shape)}"
        raise ValueError(f"mask has shape {shapes}: want one entry for each value")
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the mask of each row, (B,), of values (B, T); 0 for a row without any."""
    return keep(values, mask).sum(-1) / mask.sum(-1).clamp(min=1)


@dataclass(frozen=True)
class Moments:
    """How many numbers there are, their mean, and the sum of squared deviations from it.

    Numbers, so that they can be kept in a checkpoint and sent between ranks.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def merged(self, other: Moments) -> Moments:
        """The moments of both samples together (Chan, Golub & LeVeque 1983,
        doi:10.1080/00031305.1983.10483115)."""
        count = self.count + other.count
        if count == 0:
            return self
        gap, share = other.mean - self.mean, other.count / count
        squares = self.squares + other.squares + gap * gap * self.count * share
        return Moments(count, self.mean + gap * share, squares)

    def std(self, ddof: int) -> float:
        """The standard deviation, dividing by count - ddof; 0 where that is not above 0."""
        return math.sqrt(self.squares / (self.count - ddof)) if self.count > ddof else 0.0


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Those of the values (any shape) where the mask is True.

    Of equal float32 values `squares` is exactly 0: their sum in float64 is exact.
    """
    check_mask(mask)
    chosen = values[mask].double()
    if not len(chosen):
        return Moments()
    mean = chosen.mean()
    return Moments(float(len(chosen)), mean.item(), (chosen - mean).square().sum().item())


def whiten(values: Tensor, mask: Tensor, *, ddof: int, over: Moments | None = None) -> Tensor:
    """(values - mean) / standard deviation, and 0 where the mask is False.

    values: (B, T) or any shape. ddof: 1 for the sample's deviation, 0 for the population's. over:
    the moments to use, of the values on all ranks for example; None: those of `values`. With fewer
    than two values in `over` they stay as they are, as there is nothing to compare with; equal
    values become 0.
    """
    over = moments(values, mask) if over is None else over
    if over.count < 2:
        return keep(values, mask)
    scale = over.std(ddof) or 1.0
    return keep((values.double() - over.mean) / scale, mask).to(values.dtype)


def token_means(values: Mapping[str, Tensor], mask: Tensor) -> dict[str, Metric]:
    """Each of `values` (B, T) as its Mean over the mask, which weighs as many tokens.

    One transfer from the device for all of them.
    """
    totals = [keep(tensor.detach().double(), mask).sum() for tensor in values.values()]
    *sums, count = torch.stack([*totals, mask.sum().double()]).tolist()
    return {
        name: Mean(total / max(count, 1.0), count) for name, total in zip(values, sums, strict=True)
    }
