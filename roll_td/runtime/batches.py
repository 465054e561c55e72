"""The columns of a DataProto on their way: a schema that all shards share, and their bytes.

Token columns are sent without their padding where that saves something; the receiver, who has
`lengths`, fills it in again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from roll_td.protocol import TOKEN_COLUMNS, DataProto
from roll_td.runtime.wire import Array, Buffer, Watch, as_bytes, dumps_whole, from_bytes, memory_of

PACK_BELOW = 0.9
"""Token columns are packed when the real tokens are less than this share of B x T, and"""
PACK_TOKENS = 128
"""rows have so much padding on average: less is sent faster than it is cut out and filled in, which
takes half a microsecond a row and column on either side."""

Rows = slice | tuple[int, ...]


class Column(NamedTuple):
    """A tensor column of a batch: what all shards of it share."""

    name: str
    dtype: torch.dtype
    tail: tuple[int, ...]
    """Shape behind the rows; of a token column (T, ...)."""
    packed: bool
    """Whether only real tokens are sent."""
    fill: float
    """The value of the padding of a packed column."""

    @property
    def row_bytes(self) -> int:
        return math.prod(self.tail) * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        return math.prod(self.tail[1:]) * self.dtype.itemsize


def columns_of(tensors: Mapping[str, torch.Tensor], lengths: Array | None) -> list[Column]:
    """The schema of the columns; which of them are packed follows from `lengths` (B,)."""
    width, short = (0, None) if lengths is None else _packable(tensors, lengths)
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


def _packable(tensors: Mapping[str, torch.Tensor], lengths: Array) -> tuple[int, int | None]:
    """The width T of the token columns and a row that has padding, or None: don't pack."""
    wide = [t for n, t in tensors.items() if n in TOKEN_COLUMNS and t.dim() >= 2]
    if not wide or len(lengths) == 0 or len(lengths) != wide[0].shape[0]:
        return 0, None
    width = int(wide[0].shape[1])
    if lengths.min() < 0 or lengths.max() > width:
        raise ValueError(
            f"lengths are between {lengths.min()} and {lengths.max()}, but {width} tokens "
            f"is the width of the batch: each must lie in 0..{width}"
        )
    real = lengths.mean()
    worth_it = real < PACK_BELOW * width and real <= width - PACK_TOKENS
    return width, int(lengths.argmin()) if worth_it else None


def _pad_of(tensor: torch.Tensor, short_row: int) -> float:
    last = tensor[short_row, -1].reshape(-1)
    return last[0].item() if last.numel() else 0


def blank(column: Column, num_rows: int) -> torch.Tensor:
    """Memory for a column, uint8 (nbytes,). Where the padding is 0 it is memory that the system
    gives as zeros, which costs nothing until it is touched: most padding never is."""
    make = torch.zeros if column.packed and column.fill == 0 else torch.empty
    return make(num_rows * column.row_bytes, dtype=torch.uint8)


def unpack(
    packed: memoryview, lengths: Array, column: Column, out: memoryview, is_zero: bool
) -> None:
    """Write packed tokens, uint8 (nbytes,), into `out`, uint8 (b * row_bytes,), and the padding,
    unless it is 0 and so is all of `out`. Row by row: an index of every token costs more than the
    copy."""
    padding = None
    if not is_zero or column.fill != 0:
        padding = memory_of(as_bytes(torch.full(column.tail, column.fill, dtype=column.dtype)))
    taken, row_bytes, token_bytes = 0, column.row_bytes, column.token_bytes
    for row, length in enumerate(lengths.tolist()):
        size, start = length * token_bytes, row * row_bytes
        out[start : start + size] = packed[taken : taken + size]
        taken += size
        if padding is not None:
            out[start + size : start + row_bytes] = padding[size:]


class Batch:
    """The columns of a DataProto that is to be sent, in shards. Holds views, copies nothing."""

    def __init__(self, data: DataProto, default_lengths: Array | None = None):
        self.tensors = data.tensors()
        lengths = self.tensors.get("lengths")
        self.lengths = default_lengths if lengths is None else lengths.numpy()
        self.columns = columns_of(self.tensors, self.lengths)
        self.objects = data.non_tensor_batch
        self.num_rows = len(data)
        self.watch = Watch("column {!r}", self.tensors)
        self._each = list(self.tensors.values())
        self._flat: list[Array | None] = [
            t.detach().view(torch.uint8).numpy().reshape(-1)
            if t.is_contiguous() and t.is_cpu
            else None
            for t in self._each
        ]
        self._row_bytes = [c.row_bytes for c in self.columns]
        self.in_place = [
            flat is not None and not c.packed
            for flat, c in zip(self._flat, self.columns, strict=True)
        ]
        """Of each column, whether the bytes of some rows in a row need no memory of their own."""
        self._packed = [i for i, c in enumerate(self.columns) if c.packed]

    def nbytes(self, rows: Rows) -> tuple[int, list[int]]:
        """The number of rows of a shard, and the bytes of each of its columns."""
        count = len(range(self.num_rows)[rows]) if isinstance(rows, slice) else len(rows)
        sizes = [count * row_bytes for row_bytes in self._row_bytes]
        if self._packed and self.lengths is not None:
            index = rows if isinstance(rows, slice) else list(rows)
            tokens = int(self.lengths[index].sum())
            for i in self._packed:
                sizes[i] = tokens * self.columns[i].token_bytes
        return count, sizes

    def copies(self, rows: Rows) -> bool:
        """Whether sending a shard needs memory of its own."""
        return not (isinstance(rows, slice) and all(self.in_place))

    def piece(self, i: int, rows: Rows) -> Array:
        """The bytes of column i of a shard, uint8 (nbytes,)."""
        column, flat, size = self.columns[i], self._flat[i], self._row_bytes[i]
        if flat is not None and not column.packed and isinstance(rows, slice):
            start, stop, _ = rows.indices(self.num_rows)
            return flat[start * size : stop * size]
        index = rows if isinstance(rows, slice) else list(rows)
        if flat is None:  # it lies in pieces, or on a device: bring the shard
            taken = self._each[i][index]
            numbers: Sequence[int] = range(len(taken))
            flat = as_bytes(taken).numpy()
        else:
            numbers = range(self.num_rows)[index] if isinstance(index, slice) else index
        if column.packed and self.lengths is not None:
            return _pack(flat, numbers, self.lengths[index].tolist(), column)
        is_all = isinstance(numbers, range)
        return flat if is_all else flat.reshape(self.num_rows, size)[numbers].reshape(-1)

    def object_bytes(self, rows: Rows) -> bytes:
        """The object columns of a shard, pickled; empty if there are none."""
        if not self.objects:
            return b""
        index = rows if isinstance(rows, slice) else list(rows)
        return dumps_whole({k: v[index] for k, v in self.objects.items()})


def _pack(flat: Array, numbers: Sequence[int], lengths: Sequence[int], column: Column) -> Array:
    """The first `lengths` tokens of the rows `numbers` of flat, uint8 (B * row_bytes,)."""
    row_bytes, token_bytes = column.row_bytes, column.token_bytes
    out = np.empty(sum(lengths) * token_bytes, dtype=np.uint8)
    source, target, given = memory_of(flat), memory_of(out), 0
    for number, length in zip(numbers, lengths, strict=True):
        size, start = length * token_bytes, number * row_bytes
        target[given : given + size] = source[start : start + size]
        given += size
    return out


def rebuild_tensors(
    columns: Sequence[Column], buffers: Sequence[Buffer], num_rows: int
) -> dict[str, torch.Tensor]:
    """Columns from the bytes of a shard; packed ones get their padding back."""
    tensors: dict[str, torch.Tensor] = {}
    for column, buffer in zip(columns, buffers, strict=True):
        if not column.packed:
            tensors[column.name] = from_bytes(buffer, column.dtype, (num_rows, *column.tail))
    if len(tensors) == len(columns):
        return tensors
    lengths = tensors["lengths"].numpy()
    for column, buffer in zip(columns, buffers, strict=True):
        if column.packed:
            flat = blank(column, num_rows)
            unpack(memory_of(buffer), lengths, column, memory_of(flat), is_zero=True)
            tensors[column.name] = from_bytes(flat, column.dtype, (num_rows, *column.tail))
    return {c.name: tensors[c.name] for c in columns}
