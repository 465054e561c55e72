"""Plans of weight updates: every number is sent once, in order, by who has it, to who wants it."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_td.strategies.parts import Weight
from roll_td.weights.plan import ALIGN, OWNERS, UpdatePlan, make_plan

F32, BF16 = torch.float32, torch.bfloat16
WEIGHTS = {
    "embed": Weight((10, 4), F32),
    "scale": Weight((), BF16),
    "none": Weight((0, 4), F32),
    "up": Weight((4, 100), F32),
    "bias": Weight((3,), BF16),
}


def plan(
    source: tuple[int, ...] = (0, 1),
    target: tuple[int, ...] = (2,),
    weights: dict[str, Weight] = WEIGHTS,
    bucket_mb: float = 400e-6,
) -> UpdatePlan:
    return make_plan("actor", "infer", (source, target), weights, weights, bucket_mb)


def check(made: UpdatePlan, weights: dict[str, Weight], most_bytes: int) -> None:
    """Each weight's numbers come once, in order, and no two pieces of a bucket overlap."""
    pieces = [piece for bucket in made.buckets for piece in bucket.pieces]
    names = list(dict.fromkeys(piece.name for piece in pieces))
    assert names == list(weights)
    for name, (shape, dtype) in weights.items():
        own = [piece for piece in pieces if piece.name == name]
        at = 0
        for piece in own:
            assert (piece.shape, piece.dtype, piece.start) == (shape, dtype, at)
            at += piece.count
        assert at == math.prod(shape)
        fits = at * dtype.itemsize <= most_bytes
        assert not fits or len(own) == 1, "cut though it fits into a bucket"
    for bucket in made.buckets:
        end = 0
        for piece in bucket.pieces:
            assert piece.offset >= end and piece.offset % ALIGN == 0
            end = piece.offset + piece.count * piece.dtype.itemsize
        assert bucket.nbytes == end <= max(most_bytes, 4)
    assert made.nbytes == sum(p.count * p.dtype.itemsize for p in pieces)


def test_weights_fill_buckets_and_long_ones_are_cut() -> None:
    made = plan()
    check(made, WEIGHTS, 400)
    found = [[(p.name, p.start, p.count, p.offset) for p in b.pieces] for b in made.buckets]
    assert found == [
        [("embed", 0, 40, 0), ("scale", 0, 1, 160), ("none", 0, 0, 176)],
        [("up", 0, 100, 0)],
        [("up", 100, 100, 0)],
        [("up", 200, 100, 0)],
        [("up", 300, 100, 0)],
        [("bias", 0, 3, 0)],
    ]
    assert [bucket.owner for bucket in made.buckets] == [0, 1, 0, 1, 0, 1]
    assert (made.nbytes, made.bucket_bytes) == (160 + 2 + 1600 + 6, 400)


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
TABLES = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.builds(Weight, SHAPES, st.sampled_from([F32, BF16]))
)


@given(TABLES, st.integers(1, 600), st.integers(1, 5))
def test_every_number_is_in_one_bucket(weights: dict[str, Weight], most: int, ranks: int) -> None:
    made = plan(tuple(range(ranks)), (9,), weights, most / 1e6)
    check(made, weights, most)
    sent = {rank: 0 for rank in range(ranks)}
    for bucket in made.buckets:
        sent[bucket.owner] += 1
    assert max(sent.values()) - min(sent.values()) <= 1


@pytest.mark.parametrize("givers", range(1, 5))
@pytest.mark.parametrize("takers", range(1, 5))
def test_who_gets_what_of_every_pair_of_worlds(givers: int, takers: int) -> None:
    """Shared, apart, and partly overlapping, for all places of the target in 8 ranks."""
    source = tuple(range(2, 2 + givers))
    seen = set()
    for target in combinations(range(8), takers):
        made = plan(source, target)
        check(made, WEIGHTS, 400)
        assert set(made.receivers) == set(target) - set(source)
        assert set(made.owners) == (set(source) if made.receivers else set())
        assert {bucket.owner for bucket in made.buckets} == set(source)
        seen.add(len(made.receivers))
    assert seen == set(range(max(0, takers - givers), takers + 1))


def test_few_of_many_ranks_send() -> None:
    made = plan(tuple(range(100, 164)), (0, 1), WEIGHTS, 100e-6)
    assert made.owners == tuple(range(100, 164, 8)) and len(made.owners) == OWNERS
    assert {bucket.owner for bucket in made.buckets} == set(made.owners)


def test_it_is_sent_in_the_target_s_dtype_and_the_source_s_order() -> None:
    given = {"b": Weight((4,), F32), "a": Weight((2,), F32)}
    wanted = {"a": Weight((2,), BF16), "b": Weight((4,), F32)}
    made = make_plan("actor", "infer", ((0,), (1,)), given, wanted, 1.0)
    (bucket,) = made.buckets
    assert [(p.name, p.dtype, p.offset) for p in bucket.pieces] == [("b", F32, 0), ("a", BF16, 16)]


def test_models_that_do_not_fit_are_named() -> None:
    wanted = {**WEIGHTS, "head": Weight((2,), F32), "up": Weight((100, 4), F32)}
    del wanted["bias"]
    with pytest.raises(
        ValueError,
        match=r"actor don't fit infer: 1 that infer has are missing \['head'\], 1 are left over "
        r"\['bias'\], 1 differ in shape \['up is \[4, 100\] and \[100, 4\]'\]",
    ):
        make_plan("actor", "infer", ((0,), (1,)), WEIGHTS, wanted, 1.0)


def test_it_prints_as_a_table() -> None:
    assert str(plan((0, 1), (1, 2))).splitlines() == [
        "actor → infer: 5 weights, 0.0 MB in 6 buckets",
        "gather on ranks [0, 1]; sent to [2]; without sending on [1]",
        "bucket  bytes  sent by  weight  numbers  dtype",
        "0       176    0        embed   all 40   float32",
        "                        scale   all 1    bfloat16",
        "                        none    all 0    float32",
        "1       400    1        up      0-99     float32",
        "2       400    0        up      100-199  float32",
        "3       400    1        up      200-299  float32",
        "4       400    0        up      300-399  float32",
        "5       6      1        bias    all 3    bfloat16",
    ]
    assert "1       400    -        up" in str(plan((0, 1), (1,)))
