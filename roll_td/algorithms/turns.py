"""Turns: the several answers that one row may hold. A turn is a run of tokens of the policy without
a gap; between two of them stands what the environment has answered."""

from __future__ import annotations

import torch
from torch import Tensor

from roll_td.algorithms.masking import keep


def turns(mask: Tensor) -> Tensor:
    """The number of each token's turn, from 1; 0 where masked. mask: bool (B, T) → int64 (B, T)."""
    starts = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
    return keep(starts.long().cumsum(-1), mask)


def turn_sums(values: Tensor, turn: Tensor) -> Tensor:
    """The sums over turns of values (B, T) that are 0 where masked: (B, T + 1), by the number of
    the turn. turn: as `turns` gives it."""
    return values.new_zeros(len(turn), turn.shape[1] + 1).scatter_add(1, turn, values)
