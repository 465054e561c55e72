"""An engine rests when it is told to, gives up what it is told to, and says when it fails."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from roll_td.config.model import GenerationConfig
from roll_td.config.strategies import MockConfig
from roll_td.strategies.engine import Answer, CoreEngine, Failure
from roll_td.strategies.mock_engine import MockCore, respond

CPU = torch.device("cpu")
GENERATION = GenerationConfig(max_new_tokens=40)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def asked(*sample_ids: int) -> list[Answer]:
    return [Answer(sample_id=n, prompt=[1, n]) for n in sample_ids]


def core(version: list[int], clock: Any, **config: Any) -> MockCore:
    given = MockConfig(**{"min_tokens": 40, "token_s": 1.0, "slots": 2} | config)
    return MockCore(given, GENERATION, 5, lambda: version[0], clock=clock)


def test_a_mock_samples_at_its_pace_in_its_slots() -> None:
    clock = Clock()
    made = core([3], clock, min_tokens=1, slots=2)
    wholes = {n: respond(MockConfig(), GENERATION, 5, n, n) for n in range(6)}
    made.add(asked(*wholes))
    ends: dict[int, float] = {}
    while (wait_s := made.wait_s()) is not None:
        clock.now_s += wait_s
        for answer in made.step():
            ends[answer.sample_id] = clock.now_s
            whole = wholes[answer.sample_id]
            assert (answer.tokens, answer.log_probs) == (whole.tokens, whole.log_probs)
            assert answer.finish_reason == whole.finish_reason
            assert answer.versions == [3] * len(whole.tokens)
    # by hand: two places, first come, first served
    places, want = [0.0, 0.0], {}
    for n, whole in wholes.items():
        place = places.index(min(places))
        places[place] += len(whole.tokens)
        want[n] = places[place]
    assert ends == pytest.approx(want)


def test_a_pause_takes_no_time_and_new_weights_make_the_tokens_that_come_after() -> None:
    clock, version = Clock(), [1]
    made = core(version, clock)
    made.add(asked(7, 8, 9))
    clock.now_s = 10.5
    made.rest()
    clock.now_s = 1000.0
    made.begin()
    version[0] = 2
    clock.now_s += 5
    given_up = made.abort({7, 9})
    assert [(a.sample_id, len(a.tokens), a.finish_reason) for a in given_up] == [
        (7, 15, "abort"),
        (9, 0, "abort"),
    ]
    assert given_up[0].versions == [1] * 10 + [2] * 5
    given_up[0].finish_reason = ""
    made.add(given_up)  # it goes on from where it was
    clock.now_s += 25
    assert {a.sample_id: len(a.tokens) for a in made.step()} == {7: 40, 8: 40}
    assert given_up[0].tokens == respond(MockConfig(min_tokens=40), GENERATION, 5, 7, 7).tokens


def test_an_engine_rests_and_goes_on() -> None:
    version = [1]
    engine = CoreEngine(core(version, Clock(), token_s=0.0), "role mock, worker 0", CPU)
    came = engine.ended()
    engine.submit(asked(1))
    assert [a.sample_id for a in next(came)] == [1]
    engine.pause(abort=False, timeout_s=5)
    engine.submit(asked(2, 3))
    engine.forget()
    version[0] = 2
    engine.resume()
    first, second = next(came)
    assert (first.sample_id, set(first.versions)) == (2, {2}) and second.sample_id == 3
    engine.pause(abort=False, timeout_s=5)
    engine.submit(asked(4, 5))
    engine.pause(abort=True, timeout_s=5)
    assert [(a.sample_id, a.finish_reason) for a in next(came)] == [(4, "abort"), (5, "abort")]
    engine.close()
    assert list(came) == []


def test_what_is_given_up_comes_back() -> None:
    engine = CoreEngine(core([1], Clock(), slots=1), "one", CPU)  # its clock stands still
    engine.submit(asked(1, 2))
    with pytest.raises(RuntimeError, match="one: new weights have come while the engine is at wo"):
        engine.forget()
    engine.abort([2, 1, 77])
    came = engine.ended()
    found = next(came)
    found += next(came) if len(found) < 2 else []
    assert {(a.sample_id, a.finish_reason) for a in found} == {(1, "abort"), (2, "abort")}
    engine.close()


@pytest.mark.parametrize("fault", ["fail", "hang"])
def test_one_that_fails_says_so_and_one_that_hangs_holds_nobody_up(fault) -> None:
    config = MockConfig(slots=1, fault_after=1)
    engine = CoreEngine(
        MockCore(config, GENERATION, 5, lambda: 1, fault), "role mock, worker 3", CPU
    )
    engine.submit(asked(1))
    came = engine.ended()
    assert [a.sample_id for a in next(came)] == [1]
    engine.submit(asked(2))
    if fault == "fail":
        failure = next(came)
        assert isinstance(failure, Failure) and "fails after 1 answers" in failure.text
        assert list(came) == []
        engine.pause(abort=True, timeout_s=5)
    else:
        while engine._inbox:  # it has not come to it
            time.sleep(0.01)
        with pytest.raises(TimeoutError, match=r"worker 3: the engine has not ended its step"):
            engine.pause(abort=False, timeout_s=0.2)
        threading.Timer(0.2, engine.close).start()
        engine.pause(abort=False, timeout_s=5)
