"""Columns of a DataProto: their types, and what is done to one column at a time."""

import copy
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing import TypeGuard

    from tensordict import TensorDict, TensorDictBase

Objects = np.ndarray[Any, np.dtype[np.object_]]
Column = Tensor | Objects

TOKEN_COLUMNS = frozenset(
    {
        "input_ids",
        "response_mask",
        "labels",
        "log_probs",
        "old_log_probs",
        "ref_log_probs",
        "teacher_log_probs",
        "infer_log_probs",
        "values",
        "token_level_rewards",
        "advantages",
        "returns",
        "weight_version",
        "state_id",
    }
)


def pad_value(name: str) -> int:
    """What fills a token column beyond a row's length: -100 for labels, else 0."""
    return -100 if name == "labels" else 0


def tensor_dict(tensors: Mapping[str, Tensor], rows: int) -> "TensorDict":
    """A TensorDict of these columns. The package is imported when one is first wanted: it brings
    torch's compiler along, which takes a second of each rank's start."""
    from tensordict import TensorDict

    return TensorDict(dict(tensors), batch_size=[rows])


def _is_tensor_dict(value: object) -> "TypeGuard[TensorDictBase]":
    # who has one has imported it; another thread may be just about to
    base = getattr(sys.modules.get("tensordict"), "TensorDictBase", None)
    return base is not None and isinstance(value, base)


def tensor_table(
    batch: "TensorDictBase | Mapping[str, Tensor] | None",
) -> "TensorDict | dict[str, Tensor] | None":
    """The tensors of `batch` by name, in a dict of their own; where there is none, a TensorDict
    (it takes longer to make than all the rest, so not before it is wanted). TypeError for a name
    or value that is none, ValueError for tensors that have no rows, differ in rows, or are sparse
    or nested."""
    if batch is None:
        return None
    if not (_is_tensor_dict(batch) or isinstance(batch, Mapping)):
        raise TypeError(f"batch is a {type(batch).__name__}: want a TensorDict, a dict or None")
    tensors: dict[str, Any] = dict(batch.items())
    counts = {key: _tensor_rows(key, v) for key, v in tensors.items()}
    if _is_tensor_dict(batch):
        if batch.batch_dims != 1:
            raise ValueError(f"batch has batch_size {list(batch.batch_size)}: want [rows]")
        counts["(batch_size)"] = batch.batch_size[0]
    rows = equal_rows(counts)
    return tensors or tensor_dict({}, rows)


def split_columns(
    columns: Mapping[str, Column], rows: int | None
) -> "tuple[Mapping[str, Tensor] | TensorDict | None, dict[str, Any]]":
    """Tensor and object columns; without a tensor None, or an empty TensorDict of `rows` rows."""
    tensors = {key: v for key, v in columns.items() if isinstance(v, Tensor)}
    objects = {key: v for key, v in columns.items() if key not in tensors}
    if tensors or rows is None:
        return tensors or None, objects
    return tensor_dict({}, rows), objects


def equal_rows(counts: Mapping[str, int]) -> int:
    """The number of rows that all columns have; 0 if there is no column."""
    if len(set(counts.values())) > 1:
        raise ValueError(f"columns differ in rows: {counts}; every column has one entry a row")
    return next(iter(counts.values()), 0)


def _tensor_rows(key: str, value: Any) -> int:
    _check_name(key)
    if not isinstance(value, Tensor):
        raise TypeError(f"batch[{key!r}] is a {type(value).__name__}: want a tensor")
    if value.ndim == 0:
        raise ValueError(f"tensor {key!r} has no dimension: want rows first; or use meta_info")
    if value.layout != torch.strided or value.is_nested:
        raise ValueError(f"tensor {key!r} is sparse or nested: make it dense, or a list of rows")
    return int(value.shape[0])


def _check_name(key: object) -> None:
    if not isinstance(key, str):
        raise TypeError(f"column name {key!r} is a {type(key).__name__}: want a string")


def is_object_column(values: object) -> bool:
    return isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1


def object_column(key: str, values: Any) -> Objects:
    """A 1-D object array of the rows of a list or array; nested sequences stay one object."""
    _check_name(key)
    if not isinstance(values, np.ndarray | list):
        raise TypeError(
            f"column {key!r} is a {type(values).__name__}: want a tensor, an array or a list, one "
            "entry a row; put what belongs to the whole batch into meta_info"
        )
    if isinstance(values, np.ndarray) and values.ndim < 2:
        if values.ndim == 0:
            raise ValueError(f"array {key!r} has no dimension: want rows; or use meta_info")
        return values.astype(object, copy=False)
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def row_numbers(index: Any, rows: int) -> Tensor:
    """An index list or mask as int64 row numbers on the CPU, checked, none negative."""
    try:
        numbers = torch.as_tensor(list(index) if isinstance(index, range) else index).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"rows {index!r:.80} are neither numbers nor a mask; columns go by select()"
        ) from error
    if numbers.ndim != 1:
        raise ValueError(f"row index has shape {list(numbers.shape)}: want one dimension")
    if numbers.dtype == torch.bool:
        if len(numbers) != rows:
            raise ValueError(f"mask has {len(numbers)} entries for {rows} rows")
        return numbers.nonzero()[:, 0]
    if numbers.dtype == torch.uint8:
        raise TypeError("row index is torch.uint8, to torch a mask: want bool or int64")
    if len(numbers) and (numbers.is_floating_point() or numbers.is_complex()):
        raise TypeError(f"row index is {numbers.dtype}: want integers or booleans")
    numbers = numbers.long()
    beyond = numbers[(numbers < -rows) | (numbers >= rows)]
    if len(beyond):
        raise IndexError(f"row {int(beyond[0])} of {rows} rows: out of range")
    return torch.where(numbers < 0, numbers + rows, numbers)


def whole(what: str, value: Any, least: int | None = None) -> int:
    """`value` as an int; TypeError unless it is a whole number, ValueError below `least`."""
    rule = f"{what} is {value!r:.80}: want a whole number"
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise TypeError(rule)
    if least is not None and operator.index(value) < least:
        raise ValueError(f"{rule} of at least {least}")
    return operator.index(value)


def map_leaves(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Copy nested dicts, lists and tuples, with `leaf` applied to everything else."""
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update((key, map_leaves(v, leaf)) for key, v in value.items())
        return copied
    if isinstance(value, list):
        return [map_leaves(v, leaf) for v in value]
    if isinstance(value, tuple):
        items = [map_leaves(v, leaf) for v in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    return leaf(value)


def map_column(column: Column, leaf: Callable[[Any], Any]) -> Column:
    if isinstance(column, Tensor):
        moved: Tensor = leaf(column)
        return moved
    mapped = np.empty(len(column), dtype=object)
    for row, value in enumerate(column):
        mapped[row] = map_leaves(value, leaf)
    return mapped


def compact(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
        return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf
    return leaf


def same_values(a: Any, b: Any) -> bool:
    """Equal by value, through containers, arrays and tensors; NaN equals NaN."""
    if a is b:
        return True
    if any(isinstance(a, t) != isinstance(b, t) for t in (Tensor, np.ndarray, dict, list, tuple)):
        return False
    if isinstance(a, Tensor | np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if isinstance(a, np.ndarray):
            return same_values(a.tolist(), b.tolist())
        b = b.to(a.device)
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_values(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_values, a, b))
    return bool(a == b or (a != a and b != b))


def join(key: str, columns: Sequence[Column], has_lengths: bool) -> Column:
    """Concatenate one column's parts, padding a token column to its widest part."""
    if len(columns) == 1:
        return columns[0]
    tensors = [column for column in columns if isinstance(column, Tensor)]
    if len({str(column.dtype) for column in columns}) > 1:
        dtypes = [str(column.dtype) for column in columns]
        raise ValueError(f"concat: {key!r} has dtypes {dtypes}: convert the parts to one")
    if not tensors:
        return np.concatenate(columns)
    if has_lengths and key in TOKEN_COLUMNS and all(tensor.ndim > 1 for tensor in tensors):
        width = max(tensor.shape[1] for tensor in tensors)
        tensors = [_widen(tensor, width, pad_value(key)) for tensor in tensors]
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        shapes = [list(tensor.shape) for tensor in tensors]
        raise ValueError(
            f"concat: {key!r} has shapes {shapes}: parts may differ in rows only; token columns "
            "are padded if there is a column `lengths`"
        )
    return torch.cat(tensors)


def _widen(tensor: Tensor, width: int, fill: int) -> Tensor:
    if tensor.shape[1] == width:
        return tensor
    wide = tensor.new_full((len(tensor), width, *tensor.shape[2:]), fill)
    wide[:, : tensor.shape[1]] = tensor
    return wide
