"""Processes for rewards, made once: they fork from one that all tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from roll_td.rewards.pool import Call, Pool


@pytest.fixture(scope="session", autouse=True)
def pool() -> Iterator[Pool]:
    """Two processes that have started."""
    made = Pool(2, ["roll_td.rewards.math_rule", "tests.unit.rewards.reward_functions"])
    assert [o.value for o in made.run([Call("math.sqrt", (4.0,), {}, 60.0)] * 2)] == [2, 2]
    yield made
    made.close()
