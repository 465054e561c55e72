"""Values as a skeleton and flat buffers, and back; and where what can't travel is."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_td import DataProto, Max, Mean, StepPlan, Sum
from roll_td.columns import same_values
from roll_td.runtime.wire import (
    as_bytes,
    dumps,
    dumps_whole,
    find_unpicklable,
    from_bytes,
    loads,
    loads_whole,
)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Record:
    name: str
    inner: Any


DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    tensor = torch.arange(int(np.prod(shape))).view(shape).to(draw(st.sampled_from(DTYPES)))
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4),
    st.binary(max_size=4), st.complex_numbers(), st.dates(), tensors(),
    tensors().map(lambda t: t.float().numpy()),
    st.sampled_from([Sum(2), Mean(3, 4), Max(1), float("nan"), range(3), {1, 2}, frozenset("a")]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Record, st.text(max_size=2), inner),
        st.lists(inner, max_size=3).map(lambda rows: DataProto(None, {"o": rows}, {"m": rows})),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, at every depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Record):
        return a.name == b.name and same(a.inner, b.inner)
    if isinstance(a, DataProto):
        return same(list(a["o"]), list(b["o"])) and same(a.meta_info, b.meta_info)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mean):
        return (float(a), a.count) == (float(b), b.count)
    return same_values(a, b)


def through_bytes(value: Any) -> Any:
    skeleton, buffers, _ = dumps(value)
    return loads(skeleton, [torch.from_numpy(b.copy()) for b in buffers])


@settings(max_examples=100)
@given(VALUES)
def test_any_value_comes_back_equal(value: Any) -> None:
    assert same(through_bytes(value), value)
    assert same(loads_whole(dumps_whole(value)), value)


@given(tensors())
def test_bytes_of_a_tensor(tensor: torch.Tensor) -> None:
    flat = as_bytes(tensor)
    assert flat.dtype == torch.uint8 and flat.shape == (tensor.nbytes,)
    assert same_values(from_bytes(flat, tensor.dtype, tensor.shape), tensor)
    if tensor.is_contiguous() and tensor.numel():
        assert flat.data_ptr() == tensor.data_ptr(), "nothing is copied to be sent"


def test_tensors_are_not_in_the_skeleton() -> None:
    big = torch.zeros(1_000_000)
    data = DataProto({"x": big.view(2, -1)}, {"o": [big, None]}, {"m": big})
    value = {"a": [big[:500_000], big], "b": data}
    skeleton, buffers, _ = dumps(value)
    assert len(skeleton) < 2000
    starts = [b.ctypes.data - big.data_ptr() for b in buffers]
    assert all(0 <= start < big.nbytes for start in starts), "they are not copied either"
    skeleton, buffers, _ = dumps(big[:2])
    assert sum(b.nbytes for b in buffers) == 8, "a slice leaves the rest behind"


def test_a_parameter_and_a_tensor_with_a_gradient_come_as_plain_tensors() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    product = parameter * 3
    out = through_bytes([parameter, product])
    assert [type(t) for t in out] == [torch.Tensor] * 2
    assert not any(t.requires_grad for t in out) and out[1].tolist() == [3.0, 3.0]


def test_a_dataproto_keeps_its_plan() -> None:
    plan = StepPlan((((0,),), ((1,),)), {"tokens": 2.0})
    out = through_bytes((DataProto({"x": torch.arange(2)}, plan=plan),))[0]
    assert out.plan == plan and out["x"].tolist() == [0, 1]


def test_sparse_tensors_say_that_they_must_be_dense() -> None:
    with pytest.raises(TypeError, match="sparse_coo can't travel: make it dense"):
        dumps([torch.eye(2).to_sparse()])


class Holder:
    def __init__(self, inner: Any):
        self.inner = inner


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (LOCK, "v (a lock)"),
        ({"a": 1, "b": [0, LOCK]}, "v['b'][1] (a lock)"),
        ((1, (2, {3: LOCK})), "v[1][1][3] (a lock)"),
        (Holder({"x": LOCK}), "v.inner['x'] (a lock)"),
        (Record("r", [LOCK]), "v.inner[0] (a lock)"),
        (np.array([1, LOCK], dtype=object), "v[1] (a lock)"),
        (DataProto(None, {"o": [1, {"k": LOCK}]}), "v.non_tensor_batch['o'][1]['k'] (a lock)"),
        (DataProto(meta_info={"m": (LOCK,)}), "v.meta_info['m'][0] (a lock)"),
        ([lambda: 1], "v[0] (a function)"),
        ((x for x in [1]), "v (a generator)"),
        ([torch.eye(2).to_sparse()], "v[0] (a Tensor)"),
        ({LOCK: 1}, "v (a dict)"),
        ([1, {"a", LOCK}], "v[1] (a set)"),
    ],
)
def test_the_smallest_part_that_cannot_travel_is_named(value: Any, path: str) -> None:
    assert find_unpicklable(value, "v") == path


def test_objects_that_refer_to_each_other_are_looked_through_once() -> None:
    parent, child = Holder(None), Holder(None)
    parent.inner, child.inner = [child], {"parent": parent, "lock": LOCK}
    assert find_unpicklable(parent, "v") == "v.inner[0].inner['lock'] (a lock)"
