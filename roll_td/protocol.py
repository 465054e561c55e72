"""DataProto: the batch that crosses layers, as tensor columns, object columns and meta_info.

A column is a tensor (rows first) or a 1-D object array; every column has one entry a row. Calls on
rows (slices, chunk, concat, repeat, reorder …) and `select`, `clone`, `to` return a new DataProto;
`pop`, `rename`, `union`, `update` change the columns of this one in place. Tensors and objects are
shared where no copy is needed, containers and meta_info never.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from roll_td.columns import (
    TOKEN_COLUMNS,
    Column,
    compact,
    equal_rows,
    is_object_column,
    join,
    map_column,
    map_leaves,
    object_column,
    pad_value,
    row_numbers,
    same_values,
    split_columns,
    tensor_dict,
    tensor_table,
    whole,
)
from roll_td.metrics import merge_metrics

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase

    from roll_td.plan import StepPlan

__all__ = ["TOKEN_COLUMNS", "DataProto", "pad_value"]

Index = int | slice | Sequence[int] | Sequence[bool] | np.ndarray[Any, Any] | Tensor


class DataProto:
    """Rows that travel together: `batch`, `non_tensor_batch`, `meta_info` and `plan`.

    batch: TensorDict with one batch dimension, or a dict of tensors (B, …), or None.
    non_tensor_batch: name -> 1-D object array (B,); lists and other arrays are turned into one.
    ValueError if columns differ in rows, have no row dimension, or share a name across the two.
    """

    def __init__(
        self,
        batch: "TensorDictBase | Mapping[str, Tensor] | None" = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        plan: "StepPlan | None" = None,
    ) -> None:
        self._batch: TensorDict | dict[str, Tensor] | None = tensor_table(batch)
        self.non_tensor_batch = non_tensor_batch or {}
        self.meta_info = meta_info or {}
        self.plan = plan
        if self._objects:
            counts = {key: len(column) for key, column in self._columns().items()}
            if not isinstance(self._batch, dict | None):
                counts["(batch_size)"] = len(self)
            equal_rows(counts)

    @property
    def batch(self) -> "TensorDict | None":
        """The tensor columns; what is assigned is copied, into a TensorDict once that is wanted."""
        if isinstance(self._batch, dict):
            self._batch = tensor_dict(self._batch, len(self))
        return self._batch

    @batch.setter
    def batch(self, value: "TensorDictBase | Mapping[str, Tensor] | None") -> None:
        self._batch = tensor_table(value)

    def tensors(self) -> dict[str, Any]:
        """The tensor columns by name, in a dict of their own."""
        return {} if self._batch is None else dict(self._batch.items())

    @property
    def non_tensor_batch(self) -> dict[str, Any]:
        """The object columns; a list or another array put into the dict becomes one too."""
        for key, values in self._objects.items():
            if not is_object_column(values):
                self._objects[key] = object_column(key, values)
        return self._objects

    @non_tensor_batch.setter
    def non_tensor_batch(self, value: Mapping[str, Any]) -> None:
        self._objects: dict[str, Any] = {key: object_column(key, v) for key, v in value.items()}

    @classmethod
    def from_single_dict(
        cls, d: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None
    ) -> Self:
        """Tensors go to batch, arrays and lists to non_tensor_batch; TypeError for another type."""
        tensors = {key: v for key, v in d.items() if isinstance(v, Tensor)}
        objects = {key: v for key, v in d.items() if key not in tensors}
        return cls(tensors or None, objects, meta_info)

    @property
    def meta_info(self) -> dict[str, Any]:
        """Control data and metrics; assigning copies, so that no two DataProtos share it."""
        return self._meta_info

    @meta_info.setter
    def meta_info(self, value: Mapping[str, Any]) -> None:
        if not isinstance(value, Mapping):
            raise TypeError(f"meta_info is a {type(value).__name__}: want a dict")
        self._meta_info: dict[str, Any] = map_leaves(dict(value), lambda x: x) if value else {}

    def __len__(self) -> int:
        if not isinstance(self._batch, dict | None):
            return int(self._batch.batch_size[0])
        return len(next(iter((self._batch or self.non_tensor_batch).values()), ()))

    def __repr__(self) -> str:
        shapes = [f"{key}: {list(v.shape)}" for key, v in self._columns().items()]
        return f"DataProto({len(self)} rows; {', '.join(shapes)}; meta {list(self.meta_info)})"

    def __contains__(self, key: object) -> bool:
        return key in self._columns()

    def keys(self) -> list[str]:
        """The names of all columns, tensors first."""
        return list(self._columns())

    def __getitem__(self, item: Any) -> Any:
        """A column by name; else rows, always as a DataProto: one row for an int.

        Rows go by int, slice (any step), list, mask (B,) or index, as list, array or tensor.
        IndexError beyond the rows, ValueError for a mask of other length, KeyError for a name.
        """
        if isinstance(item, str):
            return self._named([item])[item]
        if isinstance(item, slice):
            start, stop, step = item.indices(len(self))
            if step < 0:
                return self._take(torch.arange(len(self))[list(range(start, stop, step))])
            return self._on_rows(lambda column: column[start:stop:step])
        if isinstance(item, list | tuple | range) or getattr(item, "ndim", 0) > 0:
            return self.select_idxs(item)
        row = int(row_numbers([whole("row", item)], len(self))[0])
        return self._on_rows(lambda column: column[row : row + 1])

    def select(self, keys: str | Iterable[str]) -> Self:
        """A new DataProto with these columns, tensors shared. KeyError if one is unknown."""
        return self._like(self._named(keys), self.plan)

    def pop(self, keys: str | Iterable[str]) -> Self:
        """Take these columns out of this one and return them. KeyError if one is unknown."""
        popped = self.select(keys)
        columns = self._columns()
        self._adopt({key: v for key, v in columns.items() if key not in popped})
        return popped

    def rename(self, old: str | Mapping[str, str], new: str | None = None) -> Self:
        """Rename columns in place, `rename("a", "b")` or `rename({"a": "b"})`; returns self.

        KeyError if one is unknown, ValueError if two columns would have one name.
        """
        if isinstance(old, str):
            if new is None:
                raise TypeError(f"rename({old!r}) lacks the new name")
            old = {old: new}
        self._named(old)
        names = [old.get(key, key) for key in self.keys()]
        if len(set(names)) < len(names):
            raise ValueError(f"rename {dict(old)} gives columns {names}: pop the old one first")
        self._adopt(dict(zip(names, self._columns().values(), strict=True)))
        return self

    def union(self, other: "DataProto") -> Self:
        """Add the columns and meta_info of `other` in place; returns self.

        ValueError for unequal row counts, or a column of both whose values differ (NaN equals NaN);
        meta_info is merged as by concat.
        """
        if len(self) != len(other):
            raise ValueError(f"union of {len(self)} with {len(other)} rows: counts must be equal")
        mine, theirs = self._columns(), other._columns()
        for key in mine.keys() & theirs.keys():
            if not same_values(mine[key], theirs[key]):
                raise ValueError(f"union: column {key!r} differs; pop it or use update to replace")
        meta_info = merge_meta([self.meta_info, other.meta_info])
        self._adopt(theirs | mine)
        self.meta_info = meta_info
        return self

    def update(self, columns: "Mapping[str, Any] | DataProto") -> Self:
        """Add columns or replace them, in place; returns self. ValueError for unequal rows."""
        if not isinstance(columns, DataProto):
            columns = DataProto.from_single_dict(columns)
        self._adopt(self._columns() | columns._columns())
        return self

    def clone(self) -> Self:
        """A copy with tensors, arrays and meta_info of its own; the objects in rows are shared."""
        copies: dict[str, Column] = {
            key: v.clone() if isinstance(v, Tensor) else v.copy()
            for key, v in self._columns().items()
        }
        return self._like(copies, self.plan)

    def to(self, device: str | torch.device | int) -> Self:
        """A new DataProto with every tensor on `device`, those inside object columns too."""

        def move(leaf: Any) -> Any:
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf

        return self._like(
            {key: map_column(v, move) for key, v in self._columns().items()}, self.plan
        )

    def select_idxs(self, index: Index) -> Self:
        """Rows by numbers (negative from the end) or by a mask (B,), in the order given."""
        return self._take(row_numbers(index, len(self)))

    def reorder(self, order: Index) -> Self:
        """The same rows in another order, as a new DataProto. ValueError if no permutation."""
        rows = row_numbers(order, len(self))
        if not torch.equal(rows.sort().values, torch.arange(len(self))):
            raise ValueError(
                f"reorder got {rows.tolist()} for {len(self)} rows: want every row number once; "
                "use select_idxs to drop or repeat rows"
            )
        return self._take(rows)

    def repeat(self, n: int, interleave: bool = True) -> Self:
        """Each row n times: a a b b if interleave, else a b a b. ValueError for n below 0."""
        n = whole("repeat: n", n, 0)
        rows = torch.arange(len(self))
        return self._take(rows.repeat_interleave(n) if interleave else rows.repeat(n))

    def group_by(self, key: str) -> dict[Any, Self]:
        """Value of a column -> its rows, in row order, groups in order of first appearance.

        The column is a tensor (B,) or holds hashable objects, else TypeError.
        """
        groups: dict[Any, list[int]] = {}
        for row, value in enumerate(self[key].tolist()):
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"group_by({key!r}): row {row} is a {type(value).__name__}, which cannot be a "
                    "group's key; use a column of numbers or strings"
                ) from None
            groups.setdefault(value, []).append(row)
        return {value: self.select_idxs(rows) for value, rows in groups.items()}

    def chunk(self, n: int) -> list[Self]:
        """Exactly n parts in order, sizes as numpy.array_split; empty ones keep the columns."""
        n = whole("chunk: n", n, 1)
        size, larger = divmod(len(self), n)
        bounds = [part * size + min(part, larger) for part in range(n + 1)]
        return [self[start:stop] for start, stop in pairwise(bounds)]

    @staticmethod
    def concat(parts: Sequence["DataProto"]) -> "DataProto":
        """The rows of all parts in order; meta_info merged, `metrics` in it by their reductions.

        Parts without any column are skipped. Token columns of unequal width are padded on the right
        if the rows have `lengths`. ValueError for no parts, for a column that a part lacks or that
        differs in kind, dtype or shape, and for a meta_info key with unlike values.
        """
        parts = list(parts)
        if not parts:
            raise ValueError("concat of no parts: give one at least, it may be empty")
        if odd := [type(part).__name__ for part in parts if not isinstance(part, DataProto)]:
            raise TypeError(f"concat got {odd[0]} among its parts: want DataProtos")
        meta_info = merge_meta([part.meta_info for part in parts])
        tables = [part._columns() for part in parts if len(part) or part.keys()]
        columns = {}
        for key in dict.fromkeys(key for table in tables for key in table):
            for number, table in enumerate(tables):
                if key not in table:
                    raise ValueError(f"concat: part {number} lacks {key!r}, it has {list(table)}")
            columns[key] = join(key, [table[key] for table in tables], "lengths" in tables[0])
        with_batch = any(part._batch is not None for part in parts)
        rows = sum(map(len, parts))
        return DataProto(*split_columns(columns, rows if with_batch else None), meta_info)

    def pad_to(self, divisor: int) -> tuple[Self, int]:
        """Rows repeated from the start until divisible, and how many were added; 0 stay 0."""
        divisor = whole("pad_to: divisor", divisor, 1)
        added = -len(self) % divisor
        return self._take(torch.arange(len(self) + added) % max(len(self), 1)), added

    def unpad(self, n: int) -> Self:
        """All rows but the last n. ValueError unless 0 <= n <= rows."""
        if whole("unpad: n", n, 0) > len(self):
            raise ValueError(f"unpad({n}) of {len(self)} rows: want 0 to {len(self)}")
        return self._on_rows(lambda column: column[: len(self) - n])

    def iter_batches(self, size: int, epochs: int = 1, seed: int | None = None) -> Iterator[Self]:
        """Batches of `size` rows, shuffled anew each epoch by `seed`, in row order without one.

        The last batch of an epoch may be smaller. ValueError for a size below 1.
        """
        size = whole("iter_batches: size", size, 1)
        epochs = whole("iter_batches: epochs", epochs, 0)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        orders = (
            torch.arange(len(self)) if generator is None else self._shuffled(generator)
            for _ in range(epochs)
        )
        starts = range(0, len(self), size)
        return (self._take(order[at : at + size]) for order in orders for at in starts)

    @staticmethod
    def materialize_concat(refs: Any) -> "DataProto":
        """Wait for every rank's result of a call; concat those of the collecting ranks."""
        from roll_td.runtime.refs import materialize_concat

        result: DataProto = materialize_concat(refs)
        return result

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: a tensor that is a view leaves the rest of its storage behind."""
        columns = {key: map_column(v, compact) for key, v in self._columns().items()}
        state = dict(self._like(columns, self.plan).__dict__)
        return state | {"_meta_info": map_leaves(self.meta_info, compact)}

    def _columns(self) -> dict[str, Column]:
        tensors, objects = self.tensors(), self.non_tensor_batch
        if both := sorted(tensors.keys() & objects.keys()):
            raise ValueError(f"columns {both} are in batch and in non_tensor_batch: rename")
        return tensors | objects

    def _like(self, columns: Mapping[str, Column], plan: "StepPlan | None" = None) -> Self:
        """A DataProto of these columns (as many rows as the columns, or as this one)."""
        rows = next((len(column) for column in columns.values()), len(self))
        split = split_columns(columns, rows if self._batch is not None else None)
        return type(self)(*split, self.meta_info, plan)

    def _adopt(self, columns: Mapping[str, Column]) -> None:
        changed = self._like(columns)
        self._batch, self._objects = changed._batch, changed._objects

    def _on_rows(self, cut: Callable[[Any], Any]) -> Self:
        """Apply `cut` to every column, and to the row count where a batch has no columns."""
        rows = len(cut(range(len(self))))
        columns = {key: cut(column) for key, column in self._columns().items()}
        split = split_columns(columns, rows if self._batch is not None else None)
        return type(self)(*split, self.meta_info)

    def _take(self, rows: Tensor) -> Self:
        return self._on_rows(
            lambda c: (
                c.index_select(0, rows.to(c.device))
                if isinstance(c, Tensor)
                else (c[rows.numpy()] if isinstance(c, np.ndarray) else rows)
            )
        )

    def _shuffled(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(len(self), generator=generator)

    def _named(self, keys: str | Iterable[str]) -> dict[str, Column]:
        names, columns = [keys] if isinstance(keys, str) else list(keys), self._columns()
        if unknown := [name for name in names if name not in columns]:
            raise KeyError(f"no column {', '.join(map(repr, unknown))}; there are {self.keys()}")
        return {name: columns[name] for name in names}


def merge_meta(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One meta_info for all parts. ValueError for a key, metrics aside, of unlike values."""
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for info in infos for key in info):
        values = [info[key] for info in infos if key in info]
        if key == "metrics":
            if odd := [value for value in values if not isinstance(value, Mapping)]:
                raise TypeError(f"meta_info 'metrics' is {odd[0]!r:.80}: want a dict of metrics")
            merged[key] = merge_metrics(values)
            continue
        merged[key] = values[0]
        for value in values[1:]:
            if not same_values(values[0], value):
                raise ValueError(
                    f"meta_info {key!r} differs: {values[0]!r} and {value!r}; make it equal, make "
                    "it a column, or put it under metrics"
                )
    return merged
