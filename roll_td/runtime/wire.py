"""How values become bytes: a small pickled skeleton and flat buffers, never a pickled tensor.

The memory of a tensor or array in a value is a *buffer*, out of the skeleton's band. A DataProto
becomes *columns*: a schema, which all shards share, and per shard the row count and
the sizes. Token columns are sent without their padding where that saves something; the
receiver, who has `lengths`, fills it in again.

A buffer has a *place*. Today it is INLINE (in the control message, under `INLINE_BYTES`) or
SENT (by the transport). Ranks of one node may one day share memory: that is one more place.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from roll_td.protocol import TOKEN_COLUMNS, DataProto

INLINE_BYTES = 64 * 1024
"""Columns under this size travel in the control message."""
PACK_BELOW = 0.9
"""Token columns are packed when the real tokens are less than this share of B x T."""

Rows = slice | tuple[int, ...]
Array = np.ndarray[Any, Any]


def memory_of(array: Any) -> memoryview:
    """The memory of a uint8 array, to be written to a socket or read as a pickle."""
    return memoryview(array)


class Place(IntEnum):
    """Where the bytes of a buffer are."""

    INLINE = 0
    SENT = 1


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, uint8 (nbytes,); a view if it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def from_bytes(flat: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `as_bytes`, without a copy."""
    if flat.numel() == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return flat.view(dtype).view(tuple(shape))


# --- any value -------------------------------------------------------------------------------


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if memoryview(buffer).nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _data(tensors: dict[str, torch.Tensor], rest: tuple[Any, ...]) -> DataProto:
    non_tensor, meta_info, plan = rest
    return DataProto(tensors or None, non_tensor, meta_info, plan)


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
            return _data, (tensors_of(obj), rest)
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
    """Tensors that are being sent, and must not be written in place until they have arrived."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._seen = [(name, tensor, tensor._version) for name, tensor in tensors.items()]

    def check(self) -> None:
        """Raise ValueError for a tensor that was written since."""
        for name, tensor, version in self._seen:
            if tensor._version != version:
                raise ValueError(
                    f"{name} was written in place while a call that sends it was in flight: "
                    "get the result first, or give the call a clone()"
                )


def loads(skeleton: bytes | memoryview, buffers: Sequence[torch.Tensor]) -> Any:
    """The value; its tensors and arrays are views of `buffers` (uint8)."""
    return pickle.loads(skeleton, buffers=[memory_of(b.numpy()) for b in buffers])


def dumps_whole(value: Any) -> bytes:
    """A value in one piece, its tensors copied: for what is small."""
    file = io.BytesIO()
    _Pickler(file, 5).dump(value)
    return file.getvalue()


def loads_whole(data: bytes | memoryview) -> Any:
    """The inverse of `dumps_whole`."""
    return pickle.loads(data)


def owned(data: bytes | memoryview) -> torch.Tensor:
    """A copy of bytes as uint8 (nbytes,)."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else _EMPTY


_EMPTY = torch.empty(0, dtype=torch.uint8)


def find_unpicklable(value: Any, path: str) -> str:
    """The path of the smallest part of `value` that can't be pickled, for an error message."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, DataProto):
        parts = [(f"{path}.non_tensor_batch[{k!r}]", v) for k, v in value.non_tensor_batch.items()]
        parts += [(f"{path}.meta_info[{k!r}]", v) for k, v in value.meta_info.items()]
    elif isinstance(value, Mapping):
        parts = [(f"{path}[{k!r}]", v) for k, v in value.items()]
    elif isinstance(value, (list, tuple)) or (
        isinstance(value, np.ndarray) and value.dtype == object
    ):
        parts = [(f"{path}[{i}]", v) for i, v in enumerate(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        parts = [(f"{path}.{k}", v) for k, v in vars(value).items()]
    for name, part in parts:
        if not is_picklable(part):
            return find_unpicklable(part, name)
    return f"{path} (a {type(value).__name__})"


def is_picklable(value: Any) -> bool:
    """Whether the value can be sent."""
    try:
        dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError):
        return False
    return True


# --- the columns of a DataProto ----------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A tensor column of a batch: what all shards of it share."""

    name: str
    dtype: torch.dtype
    tail: tuple[int, ...]
    """Shape behind the rows; of a token column (T, ...)."""
    packed: bool
    """Whether only real tokens are sent."""
    fill: float
    """The value of the padding of a packed column."""

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.tail) * self.dtype.itemsize

    @cached_property
    def token_bytes(self) -> int:
        return math.prod(self.tail[1:]) * self.dtype.itemsize


def tensors_of(data: DataProto) -> dict[str, torch.Tensor]:
    """The tensor columns of a DataProto, by name."""
    found: dict[str, Any] = {} if data.batch is None else dict(data.batch.items())
    return found


def columns_of(tensors: Mapping[str, torch.Tensor], lengths: Array | None) -> list[Column]:
    """The schema of the columns; which of them are packed follows from `lengths` (B,)."""
    width, short = _packable(tensors, lengths)
    columns = []
    for name, tensor in tensors.items():
        packed = (
            short is not None
            and name in TOKEN_COLUMNS
            and tensor.dim() >= 2
            and tensor.shape[1] == width
        )
        fill = _pad_of(tensor, short) if packed and short is not None else 0
        columns.append(Column(name, tensor.dtype, tuple(tensor.shape[1:]), packed, fill))
    return columns


def _packable(tensors: Mapping[str, torch.Tensor], lengths: Array | None) -> tuple[int, int | None]:
    """The width T of the token columns and a row that has padding, or None: don't pack."""
    wide = [t for n, t in tensors.items() if n in TOKEN_COLUMNS and t.dim() >= 2]
    if lengths is None or not wide or len(lengths) == 0 or len(lengths) != wide[0].shape[0]:
        return 0, None
    width = int(wide[0].shape[1])
    if lengths.min() < 0 or lengths.max() > width:
        raise ValueError(
            f"lengths are between {lengths.min()} and {lengths.max()}, but {width} tokens "
            f"is the width of the batch: each must lie in 0..{width}"
        )
    worth_it = lengths.sum() < PACK_BELOW * len(lengths) * width
    return width, int(lengths.argmin()) if worth_it else None


def _pad_of(tensor: torch.Tensor, short_row: int) -> float:
    last = tensor[short_row, -1].reshape(-1)
    return last[0].item() if last.numel() else 0


def blank(column: Column, num_rows: int) -> torch.Tensor:
    """Memory (num_rows, *tail) for a column. Where the padding is 0 it is memory that the system
    gives as zeros, which costs nothing until it is touched: most padding never is."""
    make = torch.zeros if column.packed and column.fill == 0 else torch.empty
    return make((num_rows, *column.tail), dtype=column.dtype)


def unpack(
    flat: torch.Tensor, lengths: torch.Tensor, column: Column, out: torch.Tensor, is_zero: bool
) -> None:
    """Write packed tokens, uint8 (nbytes,), into `out` (b, T, ...), and the padding, unless it is
    0 and so is all of `out`. Row by row: an index of every token costs more than the copy."""
    is_done = is_zero and column.fill == 0
    padding = as_bytes(torch.full(column.tail, column.fill, dtype=column.dtype)).numpy()
    source, start = flat.numpy(), 0
    target = as_bytes(out).numpy().reshape(len(out), column.row_bytes)
    for row, length in zip(target, lengths.tolist(), strict=True):
        size = length * column.token_bytes
        row[:size] = source[start : start + size]
        start += size
        if not is_done:
            row[size:] = padding[size:]


class Batch:
    """The columns of a DataProto that is to be sent, in shards. Holds views, copies nothing."""

    def __init__(self, data: DataProto, default_lengths: Array | None = None):
        self.tensors = tensors_of(data)
        lengths = self.tensors.get("lengths")
        self.lengths = default_lengths if lengths is None else lengths.numpy()
        self.columns = columns_of(self.tensors, self.lengths)
        self.objects = data.non_tensor_batch
        self.num_rows = len(data)
        self._each = list(self.tensors.values())
        self.watch = Watch({f"column {name!r}": t for name, t in self.tensors.items()})
        self._flat = [
            as_bytes(t).numpy() if t.is_contiguous() and t.device.type == "cpu" else None
            for t in self._each
        ]
        self._sums: Array | None = None
        if self.lengths is not None and any(c.packed for c in self.columns):
            self._sums = np.append(0, np.cumsum(self.lengths))

    def nbytes(self, rows: Rows) -> tuple[int, list[int]]:
        """The number of rows of a shard, and the bytes of each of its columns."""
        tokens = 0
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.num_rows)
            count = stop - start
            if self._sums is not None:
                tokens = int(self._sums[stop] - self._sums[start])
        else:
            count = len(rows)
            if self._sums is not None:
                tokens = int(np.diff(self._sums)[list(rows)].sum())
        return count, [
            tokens * c.token_bytes if c.packed else count * c.row_bytes for c in self.columns
        ]

    def is_copied(self, i: int, rows: Rows) -> bool:
        """Whether the bytes of column i of a shard need memory of their own."""
        return self.columns[i].packed or self._flat[i] is None or not isinstance(rows, slice)

    def copies(self, rows: Rows) -> bool:
        """Whether sending a shard needs memory of its own."""
        return any([self.is_copied(i, rows) for i in range(len(self.columns))])

    def piece(self, i: int, rows: Rows) -> Array:
        """The bytes of column i of a shard, uint8 (nbytes,)."""
        column, tensor, flat = self.columns[i], self._each[i], self._flat[i]
        index = rows if isinstance(rows, slice) else list(rows)
        numbers: Any = range(*rows.indices(self.num_rows)) if isinstance(rows, slice) else index
        lengths = self.lengths[index].tolist() if column.packed and self.lengths is not None else []
        if flat is None:  # it lies in pieces, or on a device: bring the shard
            taken = tensor[index]
            flat, numbers = as_bytes(taken).numpy(), range(len(taken))
        if column.packed:
            return _pack(flat.reshape(-1, column.row_bytes), numbers, lengths, column.token_bytes)
        if isinstance(numbers, range):
            return flat[numbers.start * column.row_bytes : numbers.stop * column.row_bytes]
        picked: Array = flat.reshape(-1, column.row_bytes)[numbers]
        return picked.reshape(-1)

    def object_bytes(self, rows: Rows) -> bytes:
        """The object columns of a shard, pickled; empty if there are none."""
        if not self.objects:
            return b""
        index = rows if isinstance(rows, slice) else list(rows)
        return dumps_whole({k: v[index] for k, v in self.objects.items()})


def _pack(grid: Array, numbers: Sequence[int], lengths: Sequence[int], token_bytes: int) -> Array:
    """The first `lengths` tokens of the rows `numbers` of grid (B, T * token_bytes), in a row."""
    out, start = np.empty(sum(lengths) * token_bytes, dtype=np.uint8), 0
    for number, length in zip(numbers, lengths, strict=True):
        size = length * token_bytes
        out[start : start + size] = grid[number, :size]
        start += size
    return out


def rebuild_tensors(
    columns: Sequence[Column],
    buffers: Sequence[torch.Tensor],
    num_rows: int,
    default_lengths: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Columns from the bytes of a shard; packed ones get their padding back."""
    tensors: dict[str, torch.Tensor] = {}
    for column, flat in zip(columns, buffers, strict=True):
        if not column.packed:
            tensors[column.name] = from_bytes(flat, column.dtype, (num_rows, *column.tail))
    lengths = tensors.get("lengths", default_lengths)
    for column, flat in zip(columns, buffers, strict=True):
        if column.packed:
            assert lengths is not None, "a packed column came without lengths"
            out = tensors[column.name] = blank(column, num_rows)
            unpack(flat, lengths, column, out, is_zero=True)
    return {c.name: tensors[c.name] for c in columns}
