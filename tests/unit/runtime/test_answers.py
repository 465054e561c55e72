"""Answers: every mode with every kind of result, fetched in any order, freed when dropped."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from roll_td import DataProto, Dispatch, Max, Mean, Sum, Worker, get, register
from roll_td.columns import same_values
from roll_td.runtime.cluster import Cluster
from roll_td.runtime.inprocess import LocalJob
from roll_td.runtime.refs import Ref, Refs

MakeRole = Callable[..., Cluster]


class Point:
    """A result that is none of the types the runtime knows."""

    def __init__(self, x: int):
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x


def answer(kind: str, rank: int) -> Any:
    """What worker `rank` returns, by kind."""
    rows = {"t": torch.full((2, 3), rank), "h": torch.full((2,), rank / 3, dtype=torch.bfloat16)}
    values = {
        "none": None,
        "number": rank + 0.5,
        "str": f"worker {rank}",
        "dict": {"rank": rank, "tensor": torch.arange(rank + 2)},
        "list": [rank, None, "x"],
        "tuple": (rank, {"a": [rank]}),
        "object": Point(rank),
        "tensor": torch.full((3,), rank),
        "data": DataProto(rows, {"o": [f"{rank}", None]}, {"role": "r"}),
        "metrics": DataProto(meta_info={"metrics": {"n": Sum(rank + 1)}}),
    }
    return values[kind]


def joined(kind: str, ranks: range) -> Any:
    """What the DP modes make of the answers of `ranks`."""
    parts = [answer(kind, rank) for rank in ranks]
    if kind == "none":
        return None
    if kind == "list":
        return [item for part in parts for item in part]
    return DataProto.concat(parts) if kind in ("data", "metrics") else parts


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, DataProto):
        columns = a.keys() == b.keys() and all(same_values(a[k], b[k]) for k in b.keys())  # noqa: SIM118
        return columns and len(a) == len(b) and same_values(a.meta_info, b.meta_info)
    return type(a) is type(b) and same_values(a, b)


KINDS = ["none", "number", "str", "dict", "list", "tuple", "object", "tensor", "data", "metrics"]


class Answers(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to_all(self, kind: str) -> Any:
        return answer(kind, self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def to_all_one(self, kind: str) -> Any:
        return answer(kind, self.rank)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def each(self, kind: str) -> Any:
        return answer(kind, self.rank)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def compute(self, kind: str) -> Any:
        return answer(kind, self.rank)

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST)
    def first(self, kind: str) -> Any:
        return answer(kind, self.rank)


def expected(method: str, kind: str, workers: int) -> Any:
    if method == "to_all_one":
        return answer(kind, 0)
    if method in ("to_all", "each"):
        return [answer(kind, rank) for rank in range(workers)]
    return joined(kind, range(workers))


@pytest.mark.parametrize("workers", [1, 3])
def test_every_mode_with_every_kind_of_result(role: MakeRole, workers: int) -> None:
    cluster = role(Answers, workers)
    for method in ("to_all", "to_all_one", "each", "compute", "first"):
        for kind in KINDS:
            argument = [kind] * workers if method == "each" else kind
            call = getattr(cluster, method)
            value = expected(method, kind, workers)
            assert same(call(argument), value), (method, kind)
            refs = call(argument, blocking=False)
            assert isinstance(refs, Refs) and len(refs) == workers
            assert same(get(refs), value), (method, kind)
            assert same(get(refs), value), "a second get gives the same"


def test_results_are_fetched_in_any_order_and_as_a_list(role: MakeRole) -> None:
    a, b = role(Answers, 3, "a"), role(Answers, 2, "b", device_mapping=[2, 3])
    calls = [(c, k, c.to_all(k, blocking=False)) for k in KINDS for c in (a, b)]
    for cluster, kind, refs in reversed(calls):
        assert same(get(refs), expected("to_all", kind, cluster.world_size))
    listed = get([refs for _, _, refs in calls])
    assert all(
        same(value, expected("to_all", kind, cluster.world_size))
        for (cluster, kind, _), value in zip(calls, listed, strict=True)
    )
    with pytest.raises(TypeError, match="takes what a call with blocking=False gave"):
        get(3)


def test_refs_are_a_sequence_of_the_workers_values(role: MakeRole) -> None:
    cluster = role(Answers, 4)
    refs = cluster.to_all("number", blocking=False)
    assert [ref.get() for ref in refs] == [0.5, 1.5, 2.5, 3.5] == get(list(refs))
    assert isinstance(refs[0], Ref) and refs[-1].get() == 3.5
    assert get(refs[1:3]) == [1.5, 2.5]
    with pytest.raises(IndexError):
        refs[4]
    only = cluster.to_all_one("number", blocking=False)
    assert get(list(only)) == [0.5, None, None, None]
    batch = cluster.compute("data", blocking=False)
    assert all(same(ref.get(), answer("data", i)) for i, ref in enumerate(batch))


MANY_ROWS = 16 * 2**20
"""A float32 column of so many rows, 64 MB, is memory that goes back to the system when freed."""


def resident_mb() -> float:
    """Memory of this process in MB."""
    return float(psutil.Process().memory_info().rss / 2**20)


class Makes(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tensor(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def batch(self, rows: int) -> DataProto:
        return DataProto({"x": torch.zeros(rows)})


@pytest.mark.parametrize("method", ["tensor", "batch"])
def test_dropping_refs_frees_the_results(role: MakeRole, job: LocalJob, method: str) -> None:
    cluster = role(Makes, 1)
    before = resident_mb()
    refs = getattr(cluster, method)(MANY_ROWS, blocking=False)
    kept = weakref.ref(refs)
    get(refs)
    assert resident_mb() - before > 60, "as long as there are refs there is a result"
    del refs
    assert kept() is None
    never_fetched = getattr(cluster, method)(MANY_ROWS, blocking=False)
    del never_fetched
    job.driver.drain()
    for _ in range(50):  # the rank is about to hear that its bytes have arrived
        if resident_mb() - before < 30:
            break
        time.sleep(0.02)
    assert resident_mb() - before < 30


def test_materialize_concat_takes_the_collecting_workers_in_dp_order(role: MakeRole) -> None:
    cluster = role(Answers, 3)
    whole = DataProto.concat([answer("data", rank) for rank in range(3)])
    for method in ("compute", "to_all"):
        refs = getattr(cluster, method)("data", blocking=False)
        assert same(DataProto.materialize_concat(refs), whole)
        assert same(DataProto.materialize_concat(list(refs)), whole)


class Mixed(Worker):
    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def some_none(self) -> Any:
        return self.rank or None

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def array(self) -> Any:
        return np.full(2, self.rank)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def lists(self) -> Any:
        return [self.rank] * self.rank


def test_none_arrays_and_empty_lists_of_some_dp_ranks(role: MakeRole) -> None:
    cluster = role(Mixed, 3)
    assert cluster.some_none() == [None, 1, 2]
    assert [v.tolist() for v in cluster.array()] == [[0, 0], [1, 1], [2, 2]]
    assert cluster.lists() == [1, 2, 2]


class Scores(Worker):
    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def validate(self, data: DataProto) -> DataProto:
        """The mean score of this worker's rows, and how many they are."""
        scores = data["score"]
        mean = Mean(float(scores.mean()) if len(data) else 0.0, len(data))
        metrics = {"score": mean, "rows": Sum(len(data)), "best": Max(max([*scores.tolist(), 0.0]))}
        return DataProto(meta_info={"metrics": metrics})


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_l02_a_mean_over_rows_is_that_of_the_whole_batch(role: MakeRole, workers: int) -> None:
    cluster = role(Scores, workers)  # L02
    scores = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.5]
    for rows in range(1, 10):
        data = DataProto({"score": torch.tensor(scores[:rows])})
        metrics = cluster.validate(data).meta_info["metrics"]
        assert metrics["score"] == pytest.approx(sum(scores[:rows]) / rows)
        assert (metrics["rows"], metrics["best"]) == (rows, 1.0)
        assert metrics["score"].count == rows
    empty = cluster.validate(DataProto({"score": torch.zeros(0)})).meta_info["metrics"]
    assert np.isnan(empty["score"]) and empty["rows"] == 0
