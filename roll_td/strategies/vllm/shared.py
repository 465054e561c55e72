"""The weights of a model in memory that several processes see.

The memory is a file without a name in host memory, so that nothing of it is left over when its
processes are killed, or lies on the worker's device; a handle tells another process of it. It stays
for the time of the engine: what a trainer sends is written there once, the engine reads it from
there, and checkpoints and checksums are made of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from roll_td.strategies.parts import Weight

ALIGN = 64
"""Bytes that each weight begins at a multiple of: a cache line."""
HOST = torch.device("cpu")
Handle = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""A function that gives the memory in another process, and its arguments; it can be pickled."""


class SharedWeights:
    """Weights by name, in their order, in shared memory."""

    def __init__(self, handle: Handle, memory: Tensor, weights: Mapping[str, Weight]) -> None:
        """In `memory`, uint8, which other processes have by `handle`."""
        self.handle, self.weights, self._device = handle, dict(weights), memory.device
        self._tensors, start = {}, 0
        for name, (shape, dtype) in self.weights.items():
            nbytes = math.prod(shape) * dtype.itemsize
            self._tensors[name] = memory[start : start + nbytes].view(dtype).view(shape)
            start += -(-nbytes // ALIGN) * ALIGN

    @classmethod
    def holding(cls, tensors: Mapping[str, Tensor], device: torch.device = HOST) -> SharedWeights:
        """New memory on this device with the values of these tensors. It is there while this
        process lives."""
        weights = {name: Weight(tuple(t.shape), t.dtype) for name, t in tensors.items()}
        sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in weights.values())
        nbytes = sum(-(-size // ALIGN) * ALIGN for size in sizes)
        if device == HOST:
            file = os.memfd_create("roll-td weights")
            os.truncate(file, nbytes)
            handle: Handle = (_mapped, (f"/proc/{os.getpid()}/fd/{file}", nbytes))
            memory = _mapped(*handle[1])
        else:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            handle = for_engine(reduce_tensor(memory))
        made = cls(handle, memory, weights)
        for name, tensor in tensors.items():
            made[name].copy_(tensor)
        return made

    @classmethod
    def at(cls, handle: Handle, weights: Mapping[str, Weight]) -> SharedWeights:
        """Those of another process, which has made the handle."""
        function, arguments = handle
        return cls(handle, function(*arguments), weights)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def state_dict(self, keep_vars: bool = False) -> dict[str, Tensor]:
        """The tensors by name, as a module has them; they are in the shared memory either way."""
        return dict(self._tensors)

    def settle(self) -> None:
        """Wait until what this process has begun to do with them is done: a GPU comes later."""
        if self._device != HOST:
            torch.accelerator.synchronize(self._device)


def for_engine(handle: Handle) -> Handle:
    """A handle of memory on a GPU, for a process of the engine: it sees the worker's devices alone,
    and the worker's own as number 0."""
    function, arguments = handle
    bound = signature(function).bind(*arguments)
    bound.arguments["storage_device"] = 0
    return function, bound.args


def _mapped(path: str, nbytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
