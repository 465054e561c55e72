"""Answers go to engines on a clock of the test's own: a token takes a second."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from roll_td.rollout.routing import Group, Router
from roll_td.strategies.engine import Answer


def group(number: int, samples: int, expected: float = 0.0, batch: int = 0, prompt: int = 3):
    ids = range(number * samples, (number + 1) * samples)
    answers = {n: Answer(sample_id=n, prompt=[number] * prompt) for n in ids}
    return Group(number, answers, batch, expected)


def ended(answer: Answer, tokens: int, reason: str = "stop") -> Answer:
    """As an engine gives it back: an object of its own, without the prompt."""
    return Answer([*answer.tokens, *[7] * tokens], [], reason, answer.sample_id)


class Simulation:
    """Engines with as many places as the limit; samples of so many tokens, which is seconds."""

    def __init__(self, router: Router, lengths: dict[int, int]) -> None:
        self.router, self.lengths, self.now_s = router, lengths, 0.0
        self.ends: dict[int, tuple[float, int, Answer]] = {}
        self.sent: list[tuple[int, int]] = []
        self.whole: list[Group] = []
        self.send()

    def send(self) -> None:
        for engine, answers in self.router.assign(self.now_s).items():
            for answer in answers:
                assert answer.sample_id not in self.ends, "asked for twice"
                left = self.lengths[answer.sample_id] - len(answer.tokens)
                self.ends[answer.sample_id] = (self.now_s + left, engine, answer)
                self.sent.append((engine, answer.sample_id))

    def next(self) -> None:
        """The next one ends."""
        self.now_s, engine, answer = min(self.ends.values(), key=lambda end: end[0])
        del self.ends[answer.sample_id]
        done = ended(answer, self.lengths[answer.sample_id] - len(answer.tokens))
        self.whole += self.router.ended(engine, [done])
        self.send()

    def run(self) -> None:
        while self.ends:
            self.next()


@given(
    engines=st.integers(1, 4),
    limit=st.integers(1, 6),
    samples=st.integers(1, 5),
    groups=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_all_is_made_once_and_no_place_is_idle_while_something_waits(
    engines, limit, samples, groups, seed
) -> None:
    draws, router = random.Random(seed), Router(engines, limit)
    lengths = {n: draws.choice([1, 2, 3, 30]) for n in range(groups * samples)}
    for number in range(groups):
        router.add(group(number, samples))
    simulation = Simulation(router, lengths)
    simulation.run()
    assert sorted(g.number for g in simulation.whole) == list(range(groups))
    for done in simulation.whole:
        assert {n: len(a.tokens) for n, a in done.answers.items()} == {
            n: lengths[n] for n in done.answers
        }
        assert {tuple(a.prompt) for a in done.answers.values()} == {(done.number,) * 3}
    assert sorted(n for _, n in simulation.sent) == sorted(lengths)
    homes = defaultdict(set)
    for engine, n in simulation.sent:
        homes[n // samples].add(engine)
    assert all(len(home) == 1 for home in homes.values()), "a prompt is computed by one engine"
    # Graham 1969: so it is for each list schedule; a whole group is what is bound to an engine
    work, places = sum(lengths.values()), engines * limit
    most = max(sum(lengths[n] for n in g.answers) for g in simulation.whole)
    assert simulation.now_s <= work / places + most


def test_the_longest_of_the_earliest_batch_goes_first() -> None:
    router = Router(1, 1)
    for number, expected, batch, prompt in ((0, 9, 1, 3), (1, 2, 0, 3), (2, 5, 0, 3), (3, 2, 0, 8)):
        router.add(group(number, 1, expected, batch, prompt))
    simulation = Simulation(router, dict.fromkeys(range(4), 1))
    simulation.run()
    assert [n for _, n in simulation.sent] == [2, 3, 1, 0]


def test_the_engine_with_the_fewest_gets_the_next_group() -> None:
    router = Router(3, 4)
    for number in range(5):
        router.add(group(number, 2))
    sends = router.assign(0.0)
    assert {e: [a.sample_id for a in some] for e, some in sends.items()} == {
        0: [0, 1, 6, 7],
        1: [2, 3, 8, 9],
        2: [4, 5],
    }
    assert [router.in_flight(engine) for engine in router.engines] == [4, 4, 2]


def test_an_engine_with_many_places_is_sent_several_at_once() -> None:
    router = Router(1, 32)
    for number in range(36):
        router.add(group(number, 1))
    first = router.assign(0.0)[0]
    assert len(first) == 32
    router.ended(0, [ended(first[0], 1)])
    assert router.assign(1.0) == {}
    router.ended(0, [ended(first[1], 1)])
    assert [answer.sample_id for answer in router.assign(1.0)[0]] == [32, 33]


def test_what_was_given_up_goes_on_with_the_tokens_that_it_has() -> None:
    router = Router(2, 2)
    router.add(group(0, 2))
    (first, second) = router.assign(0.0)[0]
    assert router.ended(0, [ended(first, 3, "abort"), ended(second, 5)]) == []
    (again,) = router.assign(1.0)[0]
    assert (again.sample_id, again.tokens, again.prompt) == (0, [7] * 3, [0] * 3)
    assert again.finish_reason == ""
    (whole,) = router.ended(0, [ended(again, 1, "length")])
    assert [len(a.tokens) for a in whole.answers.values()] == [4, 5]


@given(seed=st.integers(0, 500))
def test_what_an_engine_had_when_it_failed_others_make(seed) -> None:
    draws, router = random.Random(seed), Router(3, 3)
    lengths = {n: draws.randint(1, 20) for n in range(40)}
    for number in range(10):
        router.add(group(number, 4))
    simulation = Simulation(router, lengths)
    for dead in draws.sample(range(3), 2):
        for _ in range(draws.randint(0, 12)):
            simulation.next()
        late = [end for end in simulation.ends.values() if end[1] == dead]
        simulation.ends = {n: end for n, end in simulation.ends.items() if end[1] != dead}
        router.drop(dead)
        assert dead not in router.engines
        # what it says afterwards is not heard, whether others have been asked or not
        assert router.ended(dead, [ended(answer, 1) for _, _, answer in late]) == []
        simulation.send()
        simulation.next()
        assert router.ended(dead, [ended(answer, 1) for _, _, answer in late]) == []
    simulation.run()
    assert sorted(g.number for g in simulation.whole) == list(range(10))
    made = Counter(n for g in simulation.whole for n in g.answers)
    assert made == Counter(lengths.keys())
    assert all(len(a.tokens) == lengths[n] for g in simulation.whole for n, a in g.answers.items())


def test_what_was_sent_for_weights_that_are_old_is_told() -> None:
    router = Router(2, 2)
    for number in range(2):
        router.add(group(number, 2))
    router.assign(0.0, version=3)
    router.add(group(4, 1))
    (first,) = router.ended(1, [ended(Answer(sample_id=n), 1) for n in (2, 3)])
    assert first.number == 1
    router.assign(1.0, version=5)
    assert router.older(5) == {0: [0, 1]} and router.older(3) == {}
    assert router.older(6) == {0: [0, 1], 1: [4]}


def test_who_is_overdue_is_told_and_a_pause_counts_for_nobody() -> None:
    router = Router(2, 1)
    router.add(group(0, 1))
    router.assign(10.0)
    router.add(group(1, 1))
    router.assign(12.0)
    assert router.overdue(9.5) is None
    late = router.overdue(13.0)
    assert late is not None and (late.sample_id, late.engine, late.sent_s) == (0, 0, 10.0)
    router.shift(5.0)
    assert router.overdue(13.0) is None and router.overdue(15.5) == late
    last = router.last(1)
    assert last is not None and last.group.number == 1
