import time
from collections.abc import AsyncIterator, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_td.distributed.topology import Topology, data_parallel, rank_infos
from roll_td.plan import StepPlan, default_plan, level, local
from roll_td.protocol import DataProto
from roll_td.runtime.dispatch import (
    Dispatch,
    Registered,
    answering,
    check_all_to_all,
    collect,
    collect_planned,
    is_pair,
    register,
    register_request,
    registered_methods,
    request_methods,
    row_cuts,
    shard_receivers,
    shard_rows,
    split_by_pair,
    spread,
)

LAYOUTS = [
    Topology(dp=dp, tp=tp, pp=pp, cp=cp)
    for dp, tp, pp, cp in product(range(1, 9), repeat=4)
    if dp * tp * pp * cp <= 8
]
every_layout = pytest.mark.parametrize(
    "topology", LAYOUTS, ids=lambda t: f"dp{t.dp}tp{t.tp}pp{t.pp}cp{t.cp}"
)
DP_MODES = [Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST]
NUM_ROWS = 11


def same_to_all(args: Any, kwargs: Any, infos: Any) -> list[Any]:
    return [(args, kwargs) for _ in infos]


def total(values: Any, infos: Any) -> Any:
    return sum(values)


PAIR = (same_to_all, total)


def planned() -> StepPlan:
    """Five rows over three dp ranks, out of order, the last owning none."""
    return level([[[3, 1], [0]], [[4, 2]], []], {"rows": 5.0})


def numbers_of(rows: Any, num_rows: int) -> list[int]:
    return list(range(num_rows))[rows] if isinstance(rows, slice) else list(rows)


def delivered(
    mode: Dispatch, infos: Any, num_rows: int, plan: StepPlan | None = None
) -> list[tuple[list[int], tuple[int, ...]]]:
    """(row numbers, workers) of each shard, as a Cluster puts them together."""
    receivers = shard_receivers(mode, infos)
    rows = shard_rows(infos[0].dp_size, num_rows, plan)
    rows += [slice(0, 0)] * (len(receivers) - len(rows))
    return [(numbers_of(r, num_rows), to) for r, to in zip(rows, receivers, strict=True)]


def received(found: list[tuple[list[int], tuple[int, ...]]]) -> dict[int, list[int]]:
    """The rows of each worker; fails where a worker receives twice."""
    rows: dict[int, list[int]] = {}
    for numbers, receivers in found:
        for rank in receivers:
            assert rank not in rows
            rows[rank] = numbers
    return rows


# Rows to workers


@given(st.integers(0, 300), st.integers(1, 40))
def test_row_cuts_are_those_of_array_split(num_rows: int, dp_size: int) -> None:
    parts = np.array_split(np.arange(num_rows), dp_size)
    cuts = row_cuts(num_rows, dp_size)
    assert [list(range(*cut)) for cut in cuts] == [part.tolist() for part in parts]


@every_layout
@pytest.mark.parametrize("with_plan", [False, True])
def test_dp_compute_delivers_each_row_once_to_a_dp_rank(
    topology: Topology, with_plan: bool
) -> None:
    infos = rank_infos(topology)
    plan = default_plan(NUM_ROWS, topology.dp, 2, {}) if with_plan else None
    found = delivered(Dispatch.DP_MP_COMPUTE, infos, NUM_ROWS, plan)
    assert len(found) == topology.dp
    assert [row for rows, _ in found for row in rows] == list(range(NUM_ROWS))
    for dp_rank, (_, receivers) in enumerate(found):
        assert [infos[rank].dp_rank for rank in receivers] == [dp_rank] * (
            topology.world_size // topology.dp
        )
        assert infos[receivers[0]].is_first
    assert set(received(found)) == set(range(topology.world_size))


@every_layout
def test_dispatch_first_gives_rows_to_first_workers_only(topology: Topology) -> None:
    infos = rank_infos(topology)
    cuts = row_cuts(NUM_ROWS, topology.dp)
    expected = {
        info.rank: list(range(*cuts[info.dp_rank])) if info.is_first else [] for info in infos
    }
    assert received(delivered(Dispatch.DP_MP_DISPATCH_FIRST, infos, NUM_ROWS)) == expected


def test_a_plan_delivers_the_rows_fillers_need_too() -> None:
    assert shard_rows(3, 5, planned()) == [(3, 1, 0), (4, 2), slice(0, 1)]
    infos = rank_infos(Topology(dp=3, tp=2))
    assert shard_receivers(Dispatch.DP_MP_COMPUTE, infos) == [(0, 1), (2, 3), (4, 5)]


def test_more_dp_ranks_than_rows_leave_empty_shards() -> None:
    found = delivered(Dispatch.DP_MP_COMPUTE, rank_infos(data_parallel(3)), 1)
    assert [rows for rows, _ in found] == [[0], [], []]


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="plan is for 3 dp ranks, the role has 2"):
        shard_rows(2, 5, planned())
    with pytest.raises(ValueError, match="in no micro-batch"):
        shard_rows(2, 5, default_plan(4, 2, 1, {}))


def test_a_thousand_ranks_are_planned_at_once() -> None:
    infos = rank_infos(Topology(dp=512, tp=2))
    start = time.perf_counter()
    delivered(Dispatch.DP_MP_COMPUTE, infos, 4096)
    answering(Dispatch.DP_MP_COMPUTE, infos)
    assert time.perf_counter() - start < 0.5  # 2 ms on an idle core


def test_all_to_all_arguments_are_checked_by_name() -> None:
    check_all_to_all(([1, 2], (3, 4)), {"seeds": [5, 6]}, 2)
    with pytest.raises(ValueError, match=r"argument 1 is of type int; .* 2 items"):
        check_all_to_all(([1, 2], 3), {}, 2)
    with pytest.raises(ValueError, match="argument 'seeds' is a list of 3 items"):
        check_all_to_all((), {"seeds": [1, 2, 3]}, 2)
    with pytest.raises(ValueError, match="argument 'text' is of type str"):
        check_all_to_all((), {"text": "ab"}, 2)


def test_spread_takes_each_workers_item() -> None:
    assert spread(([1, 2], ("a", "b")), {"seed": [5, 6]}, 1) == ((2, "b"), {"seed": 6})
    assert spread((), {}, 0) == ((), {})


# Answers to one result


@every_layout
def test_who_answers(topology: Topology) -> None:
    infos = rank_infos(topology)
    everyone = tuple(range(topology.world_size))
    assert answering(Dispatch.ONE_TO_ALL, infos) == everyone
    assert answering(Dispatch.ALL_TO_ALL, infos) == everyone
    assert answering(PAIR, infos) == everyone
    assert answering(Dispatch.ONE_TO_ALL_ONE, infos) == (0,)
    for mode in DP_MODES:
        ranks = answering(mode, infos)
        assert [infos[rank].dp_rank for rank in ranks] == list(range(topology.dp))
        assert all(infos[rank].is_collecting for rank in ranks)


@every_layout
def test_what_went_out_comes_back_in_order(topology: Topology) -> None:
    mode, infos = Dispatch.DP_MP_COMPUTE, rank_infos(topology)
    data = batch(list(range(NUM_ROWS)))
    rows = received(delivered(mode, infos, NUM_ROWS))
    values = [data[rows[rank]] for rank in answering(mode, infos)]
    assert numbers(collect(mode, values)) == list(range(NUM_ROWS))


def test_collect_by_mode() -> None:
    assert collect(Dispatch.ONE_TO_ALL, [None, [1]]) == [None, [1]]
    assert collect(Dispatch.ALL_TO_ALL, (1, 2)) == [1, 2]
    assert collect(Dispatch.ONE_TO_ALL_ONE, ["a"]) == "a"


@pytest.mark.parametrize("mode", DP_MODES)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([None, None], None),
        ([[1, 2], [], [3]], [1, 2, 3]),
        ([1, 2.5], [1, 2.5]),
        ([{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 2}]),
        ([None, 3], [None, 3]),
        ([[1], 3], [[1], 3]),
        ([(1,), (2,)], [(1,), (2,)]),
    ],
)
def test_collect_of_dp_modes(mode: Dispatch, values: list[Any], expected: object) -> None:
    assert collect(mode, values) == expected


def batch(values: list[int]) -> DataProto:
    return DataProto.from_single_dict({"x": torch.tensor(values, dtype=torch.int64)})


def numbers(data: DataProto) -> list[int]:
    return [int(value) for value in data["x"]]


def test_one_dataproto_is_collected_as_many_are() -> None:
    assert numbers(collect(Dispatch.DP_MP_COMPUTE, [batch([4, 5])])) == [4, 5]
    assert numbers(collect(Dispatch.DP_MP_COMPUTE, [batch([4]), batch([5, 6])])) == [4, 5, 6]


def test_a_dataproto_among_other_things_is_an_error() -> None:
    rule = r"DataProto from dp ranks \[0, 2\], NoneType from dp ranks \[1\].*with no rows"
    values = [batch([1]), None, batch([2])]
    with pytest.raises(ValueError, match=rule):
        collect(Dispatch.DP_MP_COMPUTE, values)
    with pytest.raises(ValueError, match=rule):
        collect_planned(values, planned())


@pytest.mark.parametrize("drop_extras", [True, False])
def test_planned_rows_come_back_in_order(drop_extras: bool) -> None:
    plan = planned()
    parts = [local(plan, dp_rank) for dp_rank in range(3)]
    rows = [list(part.rows[: part.num_real] if drop_extras else part.rows) for part in parts]
    assert rows[2] == ([] if drop_extras else [0])
    assert collect_planned(rows, plan) == [0, 1, 2, 3, 4]
    assert numbers(collect_planned([batch(own) for own in rows], plan)) == [0, 1, 2, 3, 4]


@given(st.data())
def test_any_levelled_plan_goes_out_and_comes_back(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 30))
    dp_size = data.draw(st.integers(1, 5))
    owners = data.draw(st.lists(st.integers(0, dp_size - 1), min_size=num_rows, max_size=num_rows))
    plan = level(
        [[[row] for row in reversed(range(num_rows)) if owners[row] == d] for d in range(dp_size)],
        {},
    )
    shards = [numbers_of(rows, num_rows) for rows in shard_rows(dp_size, num_rows, plan)]
    assert collect_planned(shards, plan) == list(range(num_rows))


def test_planned_results_without_rows_are_metrics() -> None:
    values = [DataProto(meta_info={"step": 3}) for _ in range(3)]
    collected = collect_planned(values, planned())
    assert len(collected) == 0
    assert collected.meta_info == {"step": 3}


def test_planned_results_that_are_not_rows() -> None:
    plan = planned()
    assert collect_planned([None, None, None], plan) is None
    assert collect_planned([1, 2, 3], plan) == [1, 2, 3]
    assert collect_planned([[], [], []], plan) == []


def test_planned_results_of_a_wrong_length_are_explained() -> None:
    with pytest.raises(ValueError, match="dp rank 0 returned 2 rows; it got 3, of which 3"):
        collect_planned([[3, 1], [4, 2], []], planned())
    with pytest.raises(ValueError, match="dp rank 1 returned 0 rows; it got 2, of which 2"):
        collect_planned([[3, 1, 0], [], []], planned())
    with pytest.raises(ValueError, match="2 values for a plan of 3 dp ranks"):
        collect_planned([[3, 1, 0], [4, 2]], planned())


# A user's own mode


def test_a_pair_is_two_functions() -> None:
    assert is_pair((len, len))
    for other in (len, (len,), (len, 3), [len, len], Dispatch.ONE_TO_ALL, None):
        assert not is_pair(other)


def test_a_pairs_split_gives_each_worker_its_call() -> None:
    def split(args: Any, kwargs: Any, infos: Any) -> list[Any]:
        return [((args[0] + info.rank,), kwargs) for info in infos]

    calls = split_by_pair((split, sum), (10,), {"k": 1}, rank_infos(data_parallel(2)))
    assert calls == [((10,), {"k": 1}), ((11,), {"k": 1})]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (None, "split function <lambda> returned a NoneType; .*list of 2"),
        ([((), {})], "returned 1 items"),
        ([((), {}), ((),)], r"returned \(\(\),\) for worker 1"),
        ([((), {}), (3, {})], r"returned \(3, \{\}\) for worker 1.*kwargs a dict"),
    ],
)
def test_a_pairs_wrong_split_is_explained(calls: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_by_pair((lambda *_: calls, sum), (), {}, rank_infos(data_parallel(2)))


# Marked methods


class Base:
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, config: object) -> None: ...

    @register(Dispatch.DP_MP_COMPUTE, clear_cache=True, prefetch=True)
    def compute(self, data: object) -> object:
        return data

    @register_request
    def stream(self) -> Iterator[int]:
        yield 1

    def plain(self) -> None: ...


def test_marks_are_read_from_the_class() -> None:
    assert registered_methods(Base) == {
        "initialize": Registered(Dispatch.ONE_TO_ALL),
        "compute": Registered(Dispatch.DP_MP_COMPUTE, clear_cache=True, prefetch=True),
    }
    assert request_methods(Base) == {"stream"}


def test_marks_are_inherited_and_overridden() -> None:
    class Child(Base):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
        def compute(self, data: object) -> object:
            return data

    class Grandchild(Child):
        @register(dispatch_mode=PAIR)
        def more(self) -> None: ...

    found = registered_methods(Grandchild)
    assert found["compute"] == Registered(Dispatch.ONE_TO_ALL_ONE)
    assert found["more"] == Registered(PAIR)
    assert set(found) == {"initialize", "compute", "more"}


def test_a_mixin_ahead_of_the_worker_decides() -> None:
    class Mixin:
        @register(dispatch_mode=Dispatch.ALL_TO_ALL)
        def compute(self, data: object) -> object:
            return data

    class Mixed(Mixin, Base): ...

    assert registered_methods(Mixed)["compute"] == Registered(Dispatch.ALL_TO_ALL)


def test_an_override_without_a_mark_is_an_error() -> None:
    class Child(Base):
        def compute(self, data: object) -> object:
            return data

    class Grandchild(Child):
        def stream(self) -> Iterator[int]:
            yield 2

    for cls in (Child, Grandchild):
        with pytest.raises(ValueError, match=r"Child\.compute overrides Base\.compute.*add @regi"):
            registered_methods(cls)
    with pytest.raises(ValueError, match=r"overrides Base\.stream without @register_request"):
        request_methods(Grandchild)


@pytest.mark.parametrize("mode", ["ONE_TO_ALL", None, (len,), (len, 3), Base.plain])
def test_a_wrong_dispatch_mode_fails_at_once(mode: Any) -> None:
    with pytest.raises(ValueError, match="it must be a Dispatch"):
        register(dispatch_mode=mode)


def test_methods_with_lazy_results_cannot_be_commands() -> None:
    async def later(self: object) -> None: ...

    async def stream_later(self: object) -> AsyncIterator[int]:
        yield 1

    def lazy(self: object) -> Iterator[int]:
        yield 1

    mark = register(dispatch_mode=Dispatch.ONE_TO_ALL)
    for method in (later, stream_later):
        with pytest.raises(ValueError, match="is async"):
            mark(method)
        with pytest.raises(ValueError, match="is async"):
            register_request(method)
    with pytest.raises(ValueError, match=r"lazy is a generator.*@register_request"):
        mark(lazy)


def test_other_misuse_of_the_marks() -> None:
    mark = register(dispatch_mode=Dispatch.ONE_TO_ALL)

    def blocked(self: object, blocking: bool) -> None: ...

    with pytest.raises(ValueError, match="has a parameter 'blocking'"):
        mark(blocked)
    with pytest.raises(ValueError, match="both a command and a request"):
        mark(Base.stream)
    with pytest.raises(ValueError, match="both a command and a request"):
        register_request(Base.compute)
    with pytest.raises(ValueError, match="marks a plain method"):
        mark(staticmethod(Base.plain))
