"""The columns of a DataProto on their way: a schema that all shards share, and their bytes.

Token columns are sent without their padding where that saves something; the receiver, who has
`lengths`, fills it in again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from roll_td.protocol import TOKEN_COLUMNS, DataProto
from roll_td.runtime.wire import Array, Watch, as_bytes, dumps_whole, from_bytes, tensors_of

PACK_BELOW = 0.9
"""Token columns are packed when the real tokens are less than this share of B x T."""

Rows = slice | tuple[int, ...]


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
