"""How values become bytes: a small pickled skeleton and flat buffers, never a pickled tensor.

The memory of a tensor or array in a value is a *buffer*, out of the skeleton's band. Of a
DataProto that is an argument or a result, the columns are buffers: see batches.

A buffer has a *place*. Today it is INLINE (in the control message) or SENT (by the transport):
see parcel. Ranks of one node may one day share memory: that is one more place.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from roll_td.columns import tensor_dict
from roll_td.protocol import DataProto

Array = np.ndarray[Any, Any]


class Place(IntEnum):
    """Where the bytes of a buffer are."""

    INLINE = 0
    SENT = 1


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, uint8 (nbytes,); a view if it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


Buffer = torch.Tensor | memoryview
"""Bytes that have come, uint8 (nbytes,): by the transport, or with a control message."""


def from_bytes(buffer: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `as_bytes`, without a copy."""
    if isinstance(buffer, memoryview):
        return _tensor(buffer, dtype, shape)
    return buffer.view(dtype).view(shape) if buffer.numel() else torch.empty(shape, dtype=dtype)


def memory_of(data: Any) -> memoryview:
    """The memory of a buffer or a uint8 array, to be written to a socket or read as a pickle."""
    array: Any = data.numpy() if type(data) is torch.Tensor else data
    return memoryview(array)


def _tensor(buffer: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if memoryview(buffer).nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _data(tensors: dict[str, torch.Tensor], num_rows: int, rest: tuple[Any, ...]) -> DataProto:
    non_tensor, meta_info, plan = rest
    return DataProto(table(tensors, non_tensor, num_rows), non_tensor, meta_info, plan)


def table(tensors: dict[str, torch.Tensor], objects: Mapping[str, Any], num_rows: int) -> Any:
    """The batch of a DataProto of num_rows rows, which may have no column at all."""
    if tensors or objects or not num_rows:
        return tensors or None
    return tensor_dict({}, num_rows)


class _Pickler(pickle.Pickler):
    """Tensors are memory and a shape, as numpy arrays already are; so out of band if wanted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (torch.Tensor, torch.nn.Parameter):
            if obj.layout != torch.strided or obj.is_nested:
                raise TypeError(f"a tensor of layout {obj.layout} can't travel: make it dense")
            self.tensors.append(obj)
            memory = pickle.PickleBuffer(memory_of(as_bytes(obj).numpy()))
            return _tensor, (memory, obj.dtype, tuple(obj.shape))
        if type(obj) is DataProto:
            rest = (obj.non_tensor_batch, obj.meta_info, obj.plan)
            return _data, (obj.tensors(), len(obj), rest)
        return NotImplemented


class Dumped(NamedTuple):
    """A value on its way."""

    skeleton: bytes
    """Its pickle, without the memory of tensors and arrays."""
    buffers: list[Array]
    """That memory, uint8 (nbytes,) each, not copied."""
    tensors: list[torch.Tensor]
    """The tensors in it."""


def dumps(value: Any) -> Dumped:
    """A value as a skeleton and buffers."""
    file, buffers = io.BytesIO(), list[Array]()

    def take(buffer: pickle.PickleBuffer) -> None:
        buffers.append(np.frombuffer(buffer.raw(), dtype=np.uint8))

    pickler = _Pickler(file, 5, buffer_callback=take)
    pickler.dump(value)
    return Dumped(file.getvalue(), buffers, pickler.tensors)


class Watch:
    """Tensors that are sent from where they are, and so must not be written in place before the
    call that sends them has been waited for."""

    def __init__(self, what: str, tensors: Mapping[Any, torch.Tensor]):
        self._what = what
        self._seen = [(name, weakref.ref(t), t._version) for name, t in tensors.items()]

    def check(self, where: str) -> None:
        """Raise ValueError for a tensor that was written since. torch raises the version after the
        write: only the thread that writes can tell for sure."""
        for name, ref, version in self._seen:
            tensor = ref()
            if tensor is not None and tensor._version != version:
                raise ValueError(
                    f"{where}: {self._what.format(name)} was written in place while a call that "
                    "sends it was in flight: get the result first, or give the call a clone()"
                )


def loads(skeleton: bytes | memoryview, buffers: Sequence[Buffer]) -> Any:
    """The value; its tensors and arrays are views of `buffers`."""
    return pickle.loads(skeleton, buffers=[memory_of(b) for b in buffers])


def dumps_whole(value: Any) -> bytes:
    """A value in one piece, its tensors copied: for what is small."""
    file = io.BytesIO()
    _Pickler(file, 5).dump(value)
    return file.getvalue()


def loads_whole(data: bytes | memoryview) -> Any:
    """The inverse of `dumps_whole`."""
    return pickle.loads(data)


def find_unpicklable(value: Any, path: str) -> str:
    """The path of the smallest part of `value` that can't be pickled, for an error message."""
    seen = {id(value)}  # parts may refer to each other
    found: tuple[str, Any] | None = (path, value)
    while found is not None:
        path, value = found
        new = [part for part in _parts(value, path) if id(part[1]) not in seen]
        seen |= {id(part) for _, part in new}
        found = next((part for part in new if not is_picklable(part[1])), None)
    return f"{path} (a {type(value).__name__})"


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, DataProto):
        yield from (
            (f"{path}.non_tensor_batch[{k!r}]", v) for k, v in value.non_tensor_batch.items()
        )
        yield from ((f"{path}.meta_info[{k!r}]", v) for k, v in value.meta_info.items())
    elif isinstance(value, Mapping):
        yield from ((f"{path}[{k!r}]", v) for k, v in value.items())
    elif isinstance(value, list | tuple) or (
        isinstance(value, np.ndarray) and value.dtype == object
    ):
        yield from ((f"{path}[{i}]", v) for i, v in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from ((f"{path}.{k}", v) for k, v in vars(value).items())


def is_picklable(value: Any) -> bool:
    """Whether the value can be sent."""
    try:
        dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError):
        return False
    return True
