"""What weights are told and moved as, from one strategy to another."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Weight(NamedTuple):
    """A weight as one side has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Part(NamedTuple):
    """A run of the numbers of one weight."""

    name: str
    """As Hugging Face has it."""
    shape: tuple[int, ...]
    """Of the whole weight."""
    start: int
    """Of the flattened weight, the first number of this part."""
    values: torch.Tensor
    """(count,), on the device of the rank."""
