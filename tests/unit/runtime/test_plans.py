"""Plans through a cluster: rows are cut by them and come back in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_td import (
    Cluster,
    DataProto,
    Dispatch,
    StepPlan,
    Sum,
    Topology,
    Worker,
    WorkerConfig,
    get,
    register,
)
from roll_td.placement import planned_places
from roll_td.plan import level
from roll_td.runtime.cluster import ResourceManager
from roll_td.runtime.inprocess import LocalJob

MakeRole = Callable[..., Cluster]


class Planned(Worker):
    """Answers by micro-batch, as a role whose ranks step together does."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def rows(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def own_rows(self, data: DataProto) -> DataProto:
        """Only those that count, by way of the micro-batches."""
        assert data.plan is not None
        real = [m for i, m in enumerate(data.plan.micro_batches) if not data.plan.is_filler(i)]
        return data[[row for rows in real for row in rows]]

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def as_list(self, data: DataProto) -> list[Any]:
        return [int(x) for x in data["x"]]

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def metrics(self, data: DataProto) -> DataProto:
        assert data.plan is not None
        total = sum(
            float(data["x"][list(rows)].sum())
            for i, rows in enumerate(data.plan.micro_batches)
            if not data.plan.is_filler(i)
        )
        share = total / data.plan.denominators["rows"]
        return DataProto(meta_info={"metrics": {"loss": Sum(share)}})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def plan_of(self, data: DataProto, other: DataProto | None = None) -> Any:
        plan = data.plan
        if plan is None:
            return None
        fillers = [plan.is_filler(i) for i in range(len(plan.micro_batches))]
        return data["x"].tolist(), plan.micro_batches, fillers, dict(plan.denominators)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def too_few(self, data: DataProto) -> DataProto:
        return data[:1]


class Steps(Planned):
    """Ranks step together: the Cluster plans."""

    @classmethod
    def topology(cls, worker_config: WorkerConfig) -> Topology:
        return Topology(dp=2, tp=2, steps_together=True, micro_batch_size=2)


class ByTokens(Planned):
    """Ranks step together on micro-batches of 9 tokens."""

    @classmethod
    def topology(cls, worker_config: WorkerConfig) -> Topology:
        return Topology(dp=2, tp=2, steps_together=True, micro_batch_tokens=9)


class Grid(Planned):
    @classmethod
    def topology(cls, worker_config: WorkerConfig) -> Topology:
        return Topology(dp=2, tp=2)


def numbered(rows: int, plan: StepPlan | None = None) -> DataProto:
    columns = {"x": torch.arange(rows), "wide": torch.arange(rows * 7000).view(rows, 7000)}
    return DataProto(columns, {"o": [{"n": i} for i in range(rows)]}, plan=plan)


def check_rows(cluster: Cluster, data: DataProto) -> None:
    """Whatever way rows come back, they are the batch's own in its order."""
    expected = list(range(len(data)))
    for method in (cluster.rows, cluster.own_rows):
        out = get(method(data, blocking=False))
        assert out["x"].tolist() == expected
        assert torch.equal(out["wide"], data["wide"])
        assert [o["n"] for o in out["o"]] == expected and out.plan is None
    assert cluster.as_list(data) == expected


PERMUTED = StepPlan((((4, 1), (3,)), ((0,), (2, 5))), {"rows": 6.0})
FILLED = StepPlan((((2,), (0,)), ((1,), (0,))), {"rows": 3.0}, (0, 1))


@pytest.mark.parametrize("worker_cls", [Planned, Grid])
def test_permuted_rows_and_fillers_come_back_in_order(role: MakeRole, worker_cls: type) -> None:
    cluster = role(worker_cls, 4 if worker_cls is Grid else 2)
    check_rows(cluster, numbered(6, PERMUTED))
    check_rows(cluster, numbered(3, FILLED))
    rows, micro_batches, fillers, denominators = cluster.plan_of(numbered(3, FILLED))[1]
    assert (rows, micro_batches) == ([1, 0], ((0,), (1,)))
    assert fillers == [False, True] and denominators == {"rows": 3.0}
    loss = cluster.metrics(numbered(3, FILLED)).meta_info["metrics"]["loss"]
    assert loss == pytest.approx((0 + 1 + 2) / 3)


def test_a_plan_is_shared_by_the_arguments_and_must_fit(role: MakeRole) -> None:
    cluster = role(Planned, 2)
    data = numbered(3, FILLED)
    assert cluster.plan_of(data, other=data)[0][0] == [2, 0]
    assert cluster.plan_of(numbered(3), other=data)[0][0] == [2, 0]
    assert cluster.plan_of(numbered(3)) is None
    other = numbered(3, StepPlan((((0,),), ((1, 2),)), {}))
    with pytest.raises(ValueError, match=r"role.plan_of: its arguments have different plans"):
        cluster.plan_of(data, other=other)
    with pytest.raises(ValueError, match=r"rows .* are not in a batch of 2 rows"):
        cluster.rows(numbered(2, FILLED))
    with pytest.raises(ValueError, match="the plan is for 2 dp ranks, the role has 3"):
        role(Planned, 3, "three").rows(data)
    with pytest.raises(ValueError, match="dp rank 0 returned 1 rows; it got 2"):
        cluster.too_few(data)


@pytest.mark.parametrize(
    ("rows", "fillers"),
    [
        (0, [[], []]),
        (1, [[False], [True]]),
        (2, [[False], [False]]),
        (5, [[False, False], [False, True]]),
        (9, [[False] * 3, [False, False, True]]),
    ],
)
def test_a_role_that_steps_together_gets_a_plan(
    role: MakeRole, rows: int, fillers: list[list[bool]]
) -> None:  # B02, B03
    cluster = role(Steps, 4)
    data = numbered(rows)
    parts = cluster.plan_of(data)
    assert [part[2] for part in parts] == fillers
    assert all(part[3] == {"rows": float(rows)} for part in parts)
    check_rows(cluster, data)
    if rows:
        loss = cluster.metrics(data).meta_info["metrics"]["loss"]
        assert loss == pytest.approx(sum(range(rows)) / rows)


def test_the_default_plan_counts_tokens_where_there_is_a_mask(role: MakeRole) -> None:
    cluster = role(Steps, 4)
    labels = torch.tensor([[-100, 1, 2], [-100, -100, 3]])
    mask = torch.tensor([[False, True, False], [False, False, False]])
    both = {"x": torch.arange(2), "labels": labels, "response_mask": mask}
    assert cluster.plan_of(DataProto(both))[0][3] == {"rows": 2.0, "tokens": 1.0}
    del both["response_mask"]
    assert cluster.plan_of(DataProto(both))[1][3] == {"rows": 2.0, "tokens": 3.0}


def test_the_default_plan_cuts_by_tokens_where_the_role_says_how_many(role: MakeRole) -> None:
    cluster = role(ByTokens, 4)
    lengths = [5, 1, 9, 3, 3, 6]
    data = DataProto({"x": torch.arange(6), "lengths": torch.tensor(lengths)})
    tokens = [
        [sum(lengths[rows[i]] for i in part) for part in micro_batches]
        for rows, micro_batches, _, _ in cluster.plan_of(data)
    ]
    assert tokens == [[9, 6], [6, 6]]  # 9 at most, and about as many on each rank
    check_rows(cluster, numbered(6))  # without lengths by rows


@st.composite
def plans(draw: st.DrawFn, dp: int) -> tuple[int, StepPlan]:
    """Rows in any order, cut anywhere, on any dp rank; some ranks may own none."""
    rows = draw(st.integers(1, 12))
    order = draw(st.permutations(range(rows)))
    owners = [draw(st.integers(0, dp - 1)) for _ in range(rows)]
    micro_batches: list[list[list[int]]] = [[] for _ in range(dp)]
    for row, owner in zip(order, owners, strict=True):
        own = micro_batches[owner]
        if own and draw(st.booleans()):
            own[-1].append(row)
        else:
            own.append([row])
    return rows, level(micro_batches, {"rows": float(rows)})


@pytest.fixture(scope="module")
def clusters() -> Any:
    with LocalJob(planned_places(1, 4, 1), 1, 4):
        manager = ResourceManager(1, 4)
        yield {
            cls.__name__: Cluster(
                cls.__name__, cls, manager, WorkerConfig(name=cls.__name__, device_mapping="0-3")
            )
            for cls in (Planned, Grid, Steps)
        }


@settings(max_examples=40)
@given(st.data())
def test_any_plan_gives_the_rows_back_in_order(
    clusters: dict[str, Cluster], data: st.DataObject
) -> None:
    cluster = clusters[data.draw(st.sampled_from(sorted(clusters)))]
    rows, plan = data.draw(plans(cluster.dp_size))
    check_rows(cluster, numbered(rows, plan))
    loss = cluster.metrics(numbered(rows, plan)).meta_info["metrics"]["loss"]
    assert loss == pytest.approx(sum(range(rows)) / rows)
