"""How values become bytes: a small pickled skeleton and flat buffers, never a pickled tensor.

A tensor in a value becomes a *buffer* (its bytes, in place) and a number in the skeleton. A
DataProto becomes *columns*: a schema, which all shards share, and per shard the row count and
the sizes. Token columns are sent without their padding where that saves something; the
receiver, who has `lengths`, fills it in again.

A buffer has a *place*. Today it is INLINE (in the control message, under `INLINE_BYTES`) or
SENT (by the transport). Ranks of one node may one day share memory: that is one more place.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import torch

from roll_td.protocol import TOKEN_COLUMNS, DataProto

INLINE_BYTES = 64 * 1024
"""Columns under this size travel in the control message."""
PACK_BELOW = 0.9
"""Token columns are packed when the real tokens are less than this share of B x T."""

Rows = slice | tuple[int, ...]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a uint8 CPU tensor, to be written to a socket."""
    array: Any = tensor.numpy()
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


def _rebuild(tensors: dict[str, torch.Tensor], rest: tuple[Any, ...]) -> DataProto:
    non_tensor, meta_info, plan = rest
    return DataProto(tensors or None, non_tensor, meta_info, plan)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.buffers: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if obj.layout != torch.strided or obj.is_nested:
            raise TypeError(f"a tensor of layout {obj.layout} can't travel: make it dense")
        self.buffers.append(obj.detach())
        return len(self.buffers) - 1, obj.dtype, tuple(obj.shape)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is DataProto:
            rest = (obj.non_tensor_batch, obj.meta_info, obj.plan)
            return _rebuild, (tensors_of(obj), rest)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self.buffers = buffers

    def persistent_load(self, pid: Any) -> Any:
        index, dtype, shape = pid
        return from_bytes(self.buffers[index], dtype, shape)


def dumps(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """A value as a skeleton and the tensors in it (not copied)."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.buffers


def loads(skeleton: bytes | memoryview, buffers: Sequence[torch.Tensor]) -> Any:
    """The value; its tensors are views of `buffers` (uint8)."""
    return _Unpickler(io.BytesIO(skeleton), buffers).load()


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
        if not _picklable(part):
            return find_unpicklable(part, name)
    return f"{path} (a {type(value).__name__})"


def _picklable(value: Any) -> bool:
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
        return int(np.prod(self.tail, dtype=np.int64)) * self.dtype.itemsize

    @cached_property
    def token_bytes(self) -> int:
        return int(np.prod(self.tail[1:], dtype=np.int64)) * self.dtype.itemsize


def tensors_of(data: DataProto) -> dict[str, torch.Tensor]:
    """The tensor columns of a DataProto, by name."""
    found: dict[str, Any] = {} if data.batch is None else dict(data.batch.items())
    return found


def columns_of(
    tensors: Mapping[str, torch.Tensor], lengths: np.ndarray[Any, Any] | None
) -> list[Column]:
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


def _packable(
    tensors: Mapping[str, torch.Tensor], lengths: np.ndarray[Any, Any] | None
) -> tuple[int, int | None]:
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


def token_index(lengths: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], width: int) -> Any:
    """Positions (tokens,) of the real tokens of `rows` in a flat (B * width,) column; int64."""
    count = lengths[rows]
    starts = np.repeat(rows * width - (np.cumsum(count) - count), count)
    return torch.from_numpy(starts + np.arange(int(count.sum())))


def unpack(flat: torch.Tensor, lengths: torch.Tensor, column: Column, out: torch.Tensor) -> None:
    """Write packed tokens (tokens, *tail[1:]) into `out` (b, T, ...), padding filled in."""
    out.fill_(column.fill)
    rows = np.arange(out.shape[0])
    index = token_index(lengths.numpy(), rows, column.tail[0])
    out.view(-1, *column.tail[1:]).index_copy_(0, index, flat)


class Batch:
    """The columns of a DataProto that is to be sent, in shards. Holds views, copies nothing."""

    def __init__(self, data: DataProto, default_lengths: np.ndarray[Any, Any] | None = None):
        self.tensors = tensors_of(data)
        lengths = self.tensors.get("lengths")
        self.lengths = default_lengths if lengths is None else lengths.numpy()
        self.columns = columns_of(self.tensors, self.lengths)
        self.objects = data.non_tensor_batch
        self.versions = [t._version for t in self.tensors.values()]
        self.num_rows = len(data)
        packing = any(c.packed for c in self.columns)
        self._sums: np.ndarray[Any, Any] | None = None
        if packing and self.lengths is not None:
            self._sums = np.append(0, np.cumsum(self.lengths))

    def row_numbers(self, rows: Rows) -> np.ndarray[Any, Any]:
        if isinstance(rows, slice):
            return np.arange(*rows.indices(self.num_rows))
        return np.asarray(rows, dtype=np.int64)

    def size_of(self, rows: Rows) -> tuple[int, int]:
        """(rows, tokens) of a shard; tokens 0 where nothing is packed."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.num_rows)
            tokens = 0 if self._sums is None else int(self._sums[stop] - self._sums[start])
            return stop - start, tokens
        if self._sums is None or self.lengths is None:
            return len(rows), 0
        return len(rows), int(self.lengths[np.asarray(rows, dtype=np.int64)].sum())

    def nbytes(self, rows: Rows) -> list[int]:
        """Bytes of each column of a shard."""
        count, tokens = self.size_of(rows)
        return [tokens * c.token_bytes if c.packed else count * c.row_bytes for c in self.columns]

    def take(self, rows: Rows) -> Callable[[int], torch.Tensor]:
        """A function that gives the bytes of column i of a shard; the index is made once."""
        cache: dict[str, Any] = {}

        def column_bytes(i: int) -> torch.Tensor:
            column = self.columns[i]
            tensor = self.tensors[column.name]
            if tensor._version != self.versions[i]:
                raise ValueError(
                    f"column {column.name!r} was written in place while a call that sends it "
                    "was in flight: get the result first, or give the call a clone()"
                )
            if column.packed:
                if "tokens" not in cache:
                    assert self.lengths is not None
                    numbers = self.row_numbers(rows)
                    cache["tokens"] = token_index(self.lengths, numbers, column.tail[0])
                flat = tensor.reshape(-1, *column.tail[1:])
                return as_bytes(flat.index_select(0, cache["tokens"]))
            if isinstance(rows, slice):
                return as_bytes(tensor[rows])
            if "rows" not in cache:
                cache["rows"] = torch.from_numpy(self.row_numbers(rows))
            return as_bytes(tensor.index_select(0, cache["rows"]))

        return column_bytes

    def copies(self, rows: Rows) -> bool:
        """Whether sending a shard needs memory of its own."""
        return not isinstance(rows, slice) or any(c.packed for c in self.columns)

    def object_bytes(self, rows: Rows) -> bytes:
        """The object columns of a shard, pickled; empty if there are none."""
        if not self.objects:
            return b""
        index = rows if isinstance(rows, slice) else list(rows)
        skeleton, buffers = dumps({k: v[index] for k, v in self.objects.items()})
        return pickle.dumps((skeleton, [bytes(as_bytes(b).numpy()) for b in buffers]), 5)


def load_objects(data: bytes | memoryview) -> dict[str, np.ndarray[Any, Any]]:
    """The inverse of `Batch.object_bytes`."""
    if not len(data):
        return {}
    skeleton, raw = pickle.loads(data)
    buffers = [torch.frombuffer(bytearray(b), dtype=torch.uint8) if b else _EMPTY for b in raw]
    objects: dict[str, np.ndarray[Any, Any]] = loads(skeleton, buffers)
    return objects


_EMPTY = torch.empty(0, dtype=torch.uint8)


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
            assert lengths is not None
            out = torch.empty((num_rows, *column.tail), dtype=column.dtype)
            tokens = flat.numel() // max(column.token_bytes, 1)
            typed = from_bytes(flat, column.dtype, (tokens, *column.tail[1:]))
            unpack(typed, lengths, column, out)
            tensors[column.name] = out
    return {c.name: tensors[c.name] for c in columns}
