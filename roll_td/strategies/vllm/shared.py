"""The weights of a model in memory that several processes see.

The memory belongs to a file without a name, so that nothing of it is left over when its processes
are killed. It stays for the time of the engine: what a trainer sends is written there once, the
engine reads it from there, and checkpoints and checksums are made of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import torch
from torch import Tensor

from roll_td.strategies.exchange import Weight

ALIGN = 64
"""Bytes that each weight begins at a multiple of: a cache line."""


class SharedWeights:
    """Weights by name, in their order, in shared memory."""

    def __init__(self, path: str, weights: Mapping[str, Weight]) -> None:
        """Map the memory at `path`, which another SharedWeights of the same weights has made."""
        self.path, self.weights = path, dict(weights)
        memory = torch.from_file(path, shared=True, size=_nbytes(weights), dtype=torch.uint8)
        self._tensors, start = {}, 0
        for name, (shape, dtype) in self.weights.items():
            nbytes = math.prod(shape) * dtype.itemsize
            self._tensors[name] = memory[start : start + nbytes].view(dtype).view(shape)
            start += -(-nbytes // ALIGN) * ALIGN

    @classmethod
    def holding(cls, tensors: Mapping[str, Tensor]) -> SharedWeights:
        """New memory with the values of these tensors. It is there while this process lives."""
        weights = {name: Weight(tuple(t.shape), t.dtype) for name, t in tensors.items()}
        file = os.memfd_create("roll-td weights")
        os.truncate(file, _nbytes(weights))
        made = cls(f"/proc/{os.getpid()}/fd/{file}", weights)
        for name, tensor in tensors.items():
            made[name].copy_(tensor)
        return made

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def state_dict(self, keep_vars: bool = False) -> dict[str, Tensor]:
        """The tensors by name, as a module has them; they are in the shared memory either way."""
        return dict(self._tensors)


def _nbytes(weights: Mapping[str, Weight]) -> int:
    sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in weights.values())
    return sum(-(-size // ALIGN) * ALIGN for size in sizes)
