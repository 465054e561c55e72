import math
import pickle
import time
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_td.plan import LocalPlan, StepPlan, default_plan, level, local, restore_order, token_plan


@st.composite
def uneven_plans(draw: st.DrawFn) -> tuple[int, StepPlan]:
    """A batch size, and a levelled plan that gives its rows to dp ranks in any order and number."""
    num_rows = draw(st.integers(1, 40))
    dp_size = draw(st.integers(1, 6))
    owner = draw(st.lists(st.integers(0, dp_size - 1), min_size=num_rows, max_size=num_rows))
    order = draw(st.permutations(range(num_rows)))
    size = draw(st.integers(1, 5))
    owned = [[row for row in order if owner[row] == rank] for rank in range(dp_size)]
    cut = [[rows[i : i + size] for i in range(0, len(rows), size)] for rows in owned]
    return num_rows, level(cut, {"tokens": 7.0})


def test_default_plan_written_out() -> None:
    plan = default_plan(7, 2, 2, {"tokens": 12.0})
    assert plan == StepPlan(
        micro_batches=(((0, 1), (2, 3)), ((4, 5), (6,))),
        denominators={"tokens": 12.0},
        fillers=(0, 0),
    )


def test_without_a_micro_batch_size_each_rank_has_one() -> None:
    assert default_plan(5, 2, None, {}).micro_batches == (((0, 1, 2),), ((3, 4),))


def test_b02_a_light_rank_runs_as_many_steps_as_the_heavy_one() -> None:
    plan = level([[[0], [1], [2], [3], [4]], [[5], [6]]], {"rows": 7.0})
    plan.validate(7)
    light = local(plan, 1)
    assert light.micro_batches == ((0,), (1,), (0,), (0,), (0,))
    assert [light.is_filler(i) for i in range(5)] == [False, False, True, True, True]
    assert (light.rows, light.num_real) == ((5, 6), 2)
    assert not any(local(plan, 0).is_filler(i) for i in range(5))


def test_b03_one_row_on_two_ranks_gives_the_second_a_filler() -> None:
    plan = default_plan(1, 2, 4, {"rows": 1.0})
    plan.validate(1)
    assert plan.micro_batches == (((0,),), ((0,),))
    assert plan.fillers == (0, 1)
    assert local(plan, 1) == LocalPlan(
        rows=(0,), num_real=0, micro_batches=((0,),), fillers=1, denominators={"rows": 1.0}
    )
    assert restore_order(plan) == [0]


def test_no_rows_make_no_micro_batches() -> None:
    plan = default_plan(0, 3, 2, {})
    plan.validate(0)
    assert plan.micro_batches == ((), (), ())
    assert local(plan, 2).rows == ()
    assert restore_order(plan) == []


def test_rows_that_only_fillers_need_come_last() -> None:
    plan = StepPlan(micro_batches=(((3, 1), (0,)), ((2,), (1, 2, 0))), denominators={})
    part = local(StepPlan(plan.micro_batches, {}, fillers=(0, 1)), 1)
    assert (part.rows, part.num_real) == ((2, 1, 0), 1)
    assert part.micro_batches == ((0,), (1, 0, 2))


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 7))
def test_default_plan_cuts_as_array_split(num_rows: int, dp_size: int, size: int) -> None:
    plan = default_plan(num_rows, dp_size, size, {})
    plan.validate(num_rows)
    shards = np.array_split(np.arange(num_rows), dp_size)
    for dp_rank, shard in enumerate(shards):
        assert list(chain.from_iterable(plan.real(dp_rank))) == shard.tolist()
        assert all(len(rows) == size for rows in plan.real(dp_rank)[:-1])
        fillers = plan.micro_batches[dp_rank][len(plan.real(dp_rank)) :]
        assert all(len(rows) == 1 for rows in fillers)


@given(uneven_plans())
def test_levelled_plans_are_valid_and_equal_in_count(case: tuple[int, StepPlan]) -> None:
    num_rows, plan = case
    plan.validate(num_rows)
    assert len({len(own) for own in plan.micro_batches}) == 1


@given(uneven_plans())
def test_local_positions_lead_back_to_the_rows(case: tuple[int, StepPlan]) -> None:
    _, plan = case
    for dp_rank in range(plan.dp_size):
        part = local(plan, dp_rank)
        back = tuple(tuple(part.rows[i] for i in rows) for rows in part.micro_batches)
        assert back == plan.micro_batches[dp_rank]
        own = tuple(chain.from_iterable(plan.real(dp_rank)))
        assert part.rows[: part.num_real] == own
        assert len(set(part.rows)) == len(part.rows)
        assert sum(map(part.is_filler, range(len(part.micro_batches)))) == plan.fillers[dp_rank]


@given(uneven_plans())
def test_restore_order_undoes_the_cut(case: tuple[int, StepPlan]) -> None:
    num_rows, plan = case
    parts = [local(plan, dp_rank) for dp_rank in range(plan.dp_size)]
    joined = list(chain.from_iterable(part.rows[: part.num_real] for part in parts))
    assert [joined[i] for i in restore_order(plan)] == list(range(num_rows))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan((), {}), "0 dp ranks"),
        (StepPlan((((0,), (1,)), ((2,),)), {}), r"\[2, 1\] micro-batches per dp rank.*level\(\)"),
        (StepPlan((((0,),), ((1, 2),)), {}, (1,)), "1 entries for 2 dp ranks"),
        (StepPlan((((0, 1, 2),), ((0,),)), {}, (0, 2)), "dp rank 1 has 2 fillers.*give 0 to 1"),
        (StepPlan((((0, 1, 2),), ((0,),)), {}, (0, -1)), "dp rank 1 has -1 fillers"),
        (StepPlan((((0, 1, 2),), ((),)), {}), "micro-batch 0 of dp rank 1 is empty"),
        (StepPlan((((0, 1),), ((3,),)), {}), r"rows \[3\] are not in a batch of 3 rows"),
        (StepPlan((((0, 1, 2),), ((-1,),)), {}, (0, 1)), r"rows \[-1\] are not in a batch"),
        (StepPlan((((0,),), ((2,),)), {}), r"rows \[1\] of 3 are named in no micro-batch"),
        (StepPlan((((0, 1, 2),), ((2,),)), {}), r"rows \[2\] of 3 are named more than once"),
        (StepPlan((((0, 1, 2),),), {"tokens": float("nan")}), "'tokens' is nan"),
        (StepPlan((((0, 1, 2),),), {"tokens": -1.0}), "'tokens' is -1.0"),
    ],
)
def test_a_wrong_plan_is_explained(plan: StepPlan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.validate(3)


def test_long_lists_of_faults_are_cut_short() -> None:
    plan = StepPlan((((0,),),), {})
    with pytest.raises(ValueError, match=r"\[1, 2, 3, 4, 5, 6, 7, 8, … 91 more\] of 100"):
        plan.validate(100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 2, 3), "num_rows is -1; give an integer of at least 0"),
        ((4, 0, 3), "dp_size is 0"),
        ((4, 2, 0), "micro_batch_size is 0"),
    ],
)
def test_wrong_sizes_are_named(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        default_plan(*arguments, {})


def test_ranks_and_micro_batches_that_are_not_there() -> None:
    plan = default_plan(4, 2, 1, {})
    for dp_rank in (-1, 2):
        with pytest.raises(ValueError, match="for 2 dp ranks"):
            local(plan, dp_rank)
    for i in (-1, 2):
        with pytest.raises(IndexError, match="of 2"):
            local(plan, 0).is_filler(i)


def test_a_plan_keeps_its_denominators_and_travels() -> None:
    denominators = {"tokens": 3.0}
    plan = default_plan(4, 2, 1, denominators)
    denominators["tokens"] = 4.0
    assert plan.denominators == {"tokens": 3.0}
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert {type(row) for own in plan.micro_batches for rows in own for row in rows} == {int}
    assert {type(row) for row in restore_order(plan)} == {int}


def test_a_batch_of_100_000_rows_is_planned_at_once() -> None:
    start = time.perf_counter()
    plan = default_plan(100_000, 64, 4, {})
    plan.validate(100_000)
    parts = [local(plan, dp_rank) for dp_rank in range(64)]
    order = restore_order(plan)
    assert time.perf_counter() - start < 2  # 0.1 s on an idle core
    assert sum(part.num_real for part in parts) == len(order) == 100_000


def test_token_plan_written_out() -> None:
    plan = token_plan([5, 1, 9, 3, 3, 6], 2, 9, {"tokens": 27.0})
    assert plan == StepPlan((((2,), (3, 4)), ((5,), (0, 1))), {"tokens": 27.0}, (0, 0))


@given(st.lists(st.integers(0, 60), max_size=80), st.integers(1, 6), st.integers(20, 90))
def test_token_plans_keep_to_the_budget(lengths: list[int], dp_size: int, budget: int) -> None:
    plan = token_plan(lengths, dp_size, budget, {})
    plan.validate(len(lengths))
    real = [rows for rank in range(dp_size) for rows in plan.real(rank)]
    assert all(len(rows) == 1 or sum(lengths[r] for r in rows) <= budget for rows in real)
    assert all(list(rows) == sorted(rows) for rows in real)
    assert sum(plan.fillers) < dp_size


def test_token_plan_levels_the_work_of_the_ranks() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(16, 2048, 512).tolist()
    ideal = sum(lengths) / 8

    def time_taken(plan: StepPlan) -> float:
        turns = zip(*plan.micro_batches, strict=True)
        return sum(max(sum(lengths[r] for r in rows) for rows in turn) for turn in turns)

    plan = token_plan(lengths, 8, 8192, {})
    assert time_taken(plan) < 1.01 * ideal  # 1.001
    assert time_taken(default_plan(512, 8, 8, {})) > 1.2 * ideal  # 1.29
    assert len(plan.micro_batches[0]) == math.ceil(ideal / 8192)


def test_a_row_above_the_budget_is_alone() -> None:
    assert token_plan([3, 50, 3], 1, 10, {}).micro_batches == (((1,), (0, 2)),)


def test_token_plan_of_100_000_rows_is_made_at_once() -> None:
    lengths = np.random.default_rng(0).integers(1, 4096, 100_000).tolist()
    start = time.perf_counter()
    token_plan(lengths, 64, 16384, {}).validate(100_000)
    assert time.perf_counter() - start < 4  # 0.7 s on a busy core


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], 0, 3), "dp_size is 0"),
        (([1], 2, 0), "max_tokens is 0"),
        (([1, -2], 2, 4), "shortest_row is -2; give an integer of at least 0"),
    ],
)
def test_wrong_token_budgets_are_named(arguments: tuple[Any, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_plan(*arguments, {})
