"""Cluster: who gets what of a call, and which calls there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from roll_td import DataProto, Dispatch, Sum, Topology, Worker, get, register, register_request
from roll_td.runtime.cluster import Cluster, ResourceManager

MakeRole = Callable[..., Cluster]


class Grid(Worker):
    """dp 2, tp 2: workers 0 and 1 are dp rank 0."""

    @classmethod
    def topology(cls, worker_config: Any) -> Topology:
        return Topology(dp=2, tp=2)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def compute(self, data: DataProto, scale: int = 1) -> DataProto:
        data.update({"y": data["x"] * scale, "who": [self.rank] * len(data)})
        data.meta_info["metrics"] = {"rows": Sum(len(data)), "calls": 1.0}
        return data

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST)
    def first(self, data: DataProto) -> DataProto:
        seen = {"rows": len(data), "columns": data.keys(), "t": data.meta_info["t"]}
        Grid.seen[self.rank] = seen
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole(self, data: DataProto) -> int:
        return int(data["x"].sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tell(self) -> DataProto:
        return DataProto({"x": torch.tensor([self.rank])})

    seen: dict[int, Any] = {}  # noqa: RUF012


def numbered(rows: int) -> DataProto:
    return DataProto({"x": torch.arange(rows)}, {"s": [f"s{i}" for i in range(rows)]}, {"t": 0.5})


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_model_parallel_workers_get_the_same_rows_and_one_answers(
    role: MakeRole, rows: int
) -> None:
    data = numbered(rows)
    out = role(Grid, 4).compute(data, scale=3)
    assert out["y"].tolist() == [3 * i for i in range(rows)]
    assert out["s"].tolist() == [f"s{i}" for i in range(rows)]
    half = (rows + 1) // 2
    assert out["who"].tolist() == [0] * half + [2] * (rows - half)
    assert out.meta_info == {"t": 0.5, "metrics": {"rows": rows, "calls": 1.0}}
    assert data.keys() == ["x", "s"] and data.meta_info == {"t": 0.5}, "the caller's is its own"


@pytest.mark.parametrize("rows", [5, 40_000])  # inline; sent
def test_dispatch_first_gives_the_others_an_empty_batch(role: MakeRole, rows: int) -> None:
    Grid.seen.clear()
    data = numbered(rows)
    out = role(Grid, 4).first(data)
    assert torch.equal(out["x"], data["x"]) and out["s"].tolist() == data["s"].tolist()
    half = (rows + 1) // 2
    assert [Grid.seen[i]["rows"] for i in range(4)] == [half, 0, rows - half, 0]
    assert all(seen["t"] == 0.5 for seen in Grid.seen.values())
    assert all(seen["columns"] == ["x", "s"] for seen in Grid.seen.values())


def test_a_batch_goes_whole_to_all_where_it_is_not_split(role: MakeRole) -> None:
    cluster = role(Grid, 4)
    assert cluster.whole(numbered(5)) == [10] * 4
    assert cluster.whole(numbered(100_000)) == [sum(range(100_000))] * 4
    told = DataProto.materialize_concat(cluster.tell(blocking=False))
    assert told["x"].tolist() == [0, 2], "of the collecting workers alone"
    assert [data["x"].item() for data in cluster.tell()] == [0, 1, 2, 3]


def halves(args: Any, kwargs: Any, infos: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [((args[0][info.rank :: len(infos)],), dict(kwargs)) for info in infos]


def sums(values: Any, infos: Any) -> int:
    return sum(values) + 100 * len(infos)


class Pairs(Worker):
    @register(dispatch_mode=(halves, sums))
    def total(self, numbers: list[int], plus: int) -> int:
        return sum(numbers) + plus

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def mine(self, item: Any, other: Any = None) -> Any:
        return self.rank, item, other


def test_a_users_pair_splits_and_collects(role: MakeRole) -> None:
    cluster = role(Pairs, 3)
    assert cluster.total([1, 2, 3, 4, 5], plus=10) == 15 + 30 + 300
    refs = cluster.total([1, 2, 3, 4, 5], plus=10, blocking=False)
    assert get(refs) == 345 and [ref.get() for ref in refs] == [15, 17, 13]


def test_all_to_all_gives_each_worker_its_own_or_says_what_is_wrong(role: MakeRole) -> None:
    cluster = role(Pairs, 3)
    items = (torch.arange(3), numbered(2), None)
    mine = cluster.mine(items, other=["a", "b", "c"])
    assert [(rank, other) for rank, _, other in mine] == [(0, "a"), (1, "b"), (2, "c")]
    assert torch.equal(mine[0][1], items[0]) and mine[2][1] is None
    assert mine[1][1]["s"].tolist() == ["s0", "s1"] and mine[1][1].meta_info == {"t": 0.5}
    with pytest.raises(ValueError, match=r"argument 0 is a list of 2 items; .* of 3 items"):
        cluster.mine([1, 2])
    with pytest.raises(ValueError, match="argument 'other' is of type DataProto"):
        cluster.mine([1, 2, 3], other=numbered(3))
    assert cluster.mine([1, 2, 3])[2] == (2, 3, None), "the job goes on"


class Named(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compute(self) -> int:
        return self.rank

    @register_request
    def ask(self) -> int:
        return self.rank

    def helper(self) -> None: ...


class Derived(Named):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def compute(self) -> int:
        return 10 + super().compute()


class Clashes(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rank_info(self) -> None: ...


class TakesName(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def name(self) -> None: ...


def test_a_cluster_has_exactly_the_marked_methods(role: MakeRole) -> None:
    cluster = role(Named, 2)
    with pytest.raises(AttributeError, match="'role' has no method 'compte'; did you mean compute"):
        cluster.compte()
    with pytest.raises(AttributeError, match=r"marks with @register .*: ask, compute, initialize"):
        _ = cluster.helper
    with pytest.raises(AttributeError):
        _ = cluster._private
    assert not hasattr(cluster, "__wrapped__")
    derived = role(Derived, 2, "derived")
    assert derived.compute() == 10 and cluster.compute() == [0, 1]
    for worker_cls, name in ((Clashes, "rank_info"), (TakesName, "name")):
        with pytest.raises(ValueError, match=f"a Cluster has a '{name}' of its own"):
            role(worker_cls, 1, "clash")


def test_a_cluster_knows_its_layout(role: MakeRole) -> None:
    grid = role(Grid, 4)
    sizes = (grid.world_size, grid.dp_size, grid.tp_size, grid.pp_size, grid.cp_size)
    assert (grid.name, sizes) == ("role", (4, 2, 2, 1, 1))
    assert grid.rank2devices == {0: (0,), 1: (1,), 2: (2,), 3: (3,)}
    assert [(grid.rank_info(r).dp_rank, grid.rank_info(r).tp_rank) for r in range(4)] == [
        (0, 0), (0, 1), (1, 0), (1, 1)
    ]  # fmt: skip
    pair = role(Named, name="pair", device_mapping=[3, 1, 0, 2], num_gpus_per_worker=2)
    assert pair.rank2devices == {0: (3, 1), 1: (0, 2)} and pair.compute() == [0, 1]
    with pytest.raises(ValueError, match="topology is for 4 workers, its devices make 2: change"):
        role(Grid, 2, "small")
    with pytest.raises(ValueError, match=r"small uses devices \[4\], the world has 4"):
        role(Named, name="small", device_mapping=[0, 4])
    with pytest.raises(ValueError, match="this job has 1 nodes of 4 devices; take both from"):
        ResourceManager(2, 4)


def test_worker_classes_must_be_found_by_other_ranks(role: MakeRole) -> None:
    class Hidden(Worker): ...

    with pytest.raises(ValueError, match=r"Hidden of .* can't be found by other ranks: put it at"):
        role(Hidden, 1)


class Chained(Worker):
    other: Any = None

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def plus(self, data: DataProto, n: int) -> DataProto:
        return DataProto({"x": data["x"] + n})


def test_many_clusters_in_flight_and_one_built_in_the_middle(role: MakeRole) -> None:
    first, second = role(Chained, 2, "first"), role(Chained, 3, "second", device_mapping=[1, 2, 3])
    pending = []
    for n in range(30):
        cluster = (first, second)[n % 2]
        if n == 15:
            second = role(Chained, 4, "late")
        pending.append((n, cluster.plus(numbered(n), n, blocking=False)))
    for n, refs in pending[::-1]:
        assert get(refs)["x"].tolist() == list(range(n, 2 * n))


def test_without_a_job_the_error_says_how_to_start_one() -> None:
    with pytest.raises(ValueError, match=r"there is no job here.*roll-td run CONFIG"):
        ResourceManager(1, 0)
