"""Prompts are drawn once, learnt from in their order, and none is lost, also across a stop."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_td.rollout.window import Taken, Window


def by_rounds(dull: set[int], size: int, refills: int, position: int) -> tuple[list[int], int]:
    """What the blocking rollout does: batch_size prompts at a time."""
    found: list[int] = []
    first = position
    for _ in range(1 + refills):
        this_round = range(position, position + size)
        found += [n for n in this_round if n not in dull or refills == 0]
        position += size
        if len(found) >= size:
            break
    if not found:
        return list(this_round), position
    if len(found) > size:
        found = found[:size]
        position = found[-1] + 1
    assert position > first
    return found, position


@pytest.mark.parametrize(("size", "ahead"), [(3, 0.0), (3, 1.0), (4, 2.5), (10, 0.0)])
def test_the_last_batch_has_what_is_left(size: int, ahead: float) -> None:
    window, seen = Window(size, 0, 2, end=10), []
    while window.position < 10:
        for number in reversed(window.draw(1 + ahead)):
            window.answered(number, False)
        taken = window.take()
        assert taken is not None and taken.learnt_from == taken.looked_at
        assert len(taken.looked_at) == min(size, 10 - len(seen) - 2)
        seen += taken.looked_at
    assert seen == list(range(2, 10)) and not window.draw(1 + ahead)


@given(
    size=st.integers(1, 5),
    refills=st.integers(0, 3),
    ahead=st.floats(0, 3),
    dullness=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_batches_are_those_of_the_blocking_rollout(size, refills, ahead, dullness, seed) -> None:
    draws = random.Random(seed)
    dull = {n for n in range(2000) if draws.random() < dullness}
    window, in_flight, position = Window(size, refills, 0), [], 0
    for step in range(12):
        if step == 6:  # stopped; it comes back with the place in the stream alone
            window, in_flight = Window(size, refills, window.position), []
        while (taken := window.take()) is None:
            in_flight += window.draw(1 + ahead)
            assert window.drawn <= position + int((1 + ahead) * size) * (1 + refills)
            assert in_flight, "it waits for what nobody has been asked for"
            number = in_flight.pop(draws.randrange(len(in_flight)))
            window.answered(number, number not in dull)
        kept, end = by_rounds(dull, size, refills, position)
        assert taken.looked_at == list(range(position, end if len(kept) < size else kept[-1] + 1))
        assert taken.learnt_from == kept
        position = window.position
        assert position == taken.looked_at[-1] + 1
        in_flight += window.draw(ahead)
        potential = [n for n in range(position, window.drawn) if n in in_flight or n not in dull]
        assert len(potential) <= int((1 + ahead) * size)


def test_what_was_refused_is_waited_for_again() -> None:
    window = Window(2, 0, 4)
    assert window.draw(1) == range(4, 6) and window.draw(1) == range(6, 6)
    window.answered(4, True)
    window.answered(5, False)
    window.refused(4)
    assert window.take() is None
    window.answered(4, True)
    assert window.take() == Taken([4, 5], [4, 5])


@pytest.mark.parametrize(("ahead", "drawn"), [(0.0, 0), (0.5, 2), (1.0, 4), (2.0, 8)])
def test_it_is_drawn_ahead_as_far_as_may_be(ahead: float, drawn: int) -> None:
    window = Window(4, 0, 0)
    for number in window.draw(1):
        window.answered(number, True)
    assert window.take() == Taken([0, 1, 2, 3], [0, 1, 2, 3])
    assert window.draw(ahead) == range(4, 4 + drawn)
