"""Which answer goes to which engine, and when. No processes, no clock of its own."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from roll_td.strategies.engine import Answer

SEND_SHARE = 16
"""One in so many places of an engine must be free before it is sent more: each request takes time
from what it computes. Measured with 80 places and answers of 47 tokens by a model of 434,048
weights: 0.81 of the tokens per second that one call for all gives, 0.72 with every place filled at
once."""


@dataclass
class Group:
    """The answers to one prompt."""

    number: int
    """Place of the prompt in the stream."""
    answers: dict[int, Answer]
    """By sample_id, as they were last heard of."""
    batch: int = 0
    """Those of an earlier batch go first."""
    expected_tokens: float = 0.0
    """Of an answer; among those of a batch the longest go first."""

    @property
    def is_whole(self) -> bool:
        """Whether all have ended."""
        return all(answer.finish_reason for answer in self.answers.values())


@dataclass
class Flight:
    """An answer that an engine has been asked for."""

    group: Group
    sample_id: int
    engine: int
    sent_s: float
    """When."""
    version: int
    """Of the weights that the engine had then."""


class Router:
    """Groups go to the engine with the fewest answers, all of a group to one, which computes their
    prompt once; each engine has up to `limit` answers in flight, and those that come after wait
    here."""

    def __init__(self, engines: int, limit: int) -> None:
        self._limit = limit
        self._waiting: list[tuple[int, float, int, int, list[int]]] = []
        self._bound: dict[int, deque[int]] = {engine: deque() for engine in range(engines)}
        """Samples that wait for a place in the engine that has others of their group."""
        self._flights: dict[int, Flight] = {}
        self._group_of: dict[int, Group] = {}
        """Of samples that are not in flight."""
        self._load = dict.fromkeys(range(engines), 0)
        """Answers in flight, by engine that is alive."""

    @property
    def engines(self) -> Collection[int]:
        """Those that are alive."""
        return self._load.keys()

    def in_flight(self, engine: int) -> int:
        """Answers that it has been asked for."""
        return self._load[engine]

    def add(self, group: Group) -> None:
        """Have those of its answers made that have not ended."""
        wanted = [n for n, answer in group.answers.items() if not answer.finish_reason]
        self._wait(group, wanted)

    def assign(self, now_s: float, version: int = 0) -> dict[int, list[Answer]]:
        """What to send to each engine now, that has the weights of this version."""
        sends: defaultdict[int, list[Answer]] = defaultdict(list)
        most = self._limit - max(1, self._limit // SEND_SHARE)
        open_to = [engine for engine, load in self._load.items() if load <= most]
        while True:
            for engine in open_to:
                bound = self._bound[engine]
                while bound and self._load[engine] < self._limit:
                    sends[engine].append(self._send(bound.popleft(), engine, now_s, version))
            free = [engine for engine in open_to if self._load[engine] < self._limit]
            if not free or not self._waiting:
                return dict(sends)
            engine = min(free, key=lambda one: (self._load[one], one))
            self._bound[engine] += heapq.heappop(self._waiting)[-1]

    def ended(self, engine: int, answers: Sequence[Answer]) -> list[Group]:
        """An engine has given these back; the groups that are whole now. What was given up goes on
        later. What an engine says that has been dropped is not heard."""
        whole: list[Group] = []
        goes_on: list[Flight] = []
        for answer in answers:
            flight = self._flights.get(answer.sample_id)
            if flight is None or flight.engine != engine:
                continue
            del self._flights[answer.sample_id]
            self._load[engine] -= 1
            group = flight.group
            answer.prompt = group.answers[answer.sample_id].prompt
            group.answers[answer.sample_id] = answer
            if answer.finish_reason == "abort":
                answer.finish_reason = ""
                goes_on.append(flight)
            elif group.is_whole:
                whole.append(group)
        self._wait_again((flight.group, flight.sample_id) for flight in goes_on)
        return whole

    def drop(self, engine: int) -> None:
        """An engine is no more: what it had, others begin from what was last heard of it."""
        lost = [flight for flight in self._flights.values() if flight.engine == engine]
        for flight in lost:
            del self._flights[flight.sample_id]
        del self._load[engine]
        self._wait_again(
            [
                *((flight.group, flight.sample_id) for flight in lost),
                *((self._group_of[sample_id], sample_id) for sample_id in self._bound.pop(engine)),
            ]
        )

    def last(self, engine: int) -> Flight | None:
        """The answer that it was asked for last."""
        own = [flight for flight in self._flights.values() if flight.engine == engine]
        return max(own, key=lambda flight: flight.sent_s, default=None)

    def overdue(self, before_s: float) -> Flight | None:
        """The oldest one that was sent before this moment, if there is one."""
        oldest = min(self._flights.values(), key=lambda flight: flight.sent_s, default=None)
        return oldest if oldest is not None and oldest.sent_s < before_s else None

    def older(self, version: int) -> dict[int, list[int]]:
        """Samples in flight that were sent for weights before this version, by engine."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for flight in self._flights.values():
            if flight.version < version:
                found[flight.engine].append(flight.sample_id)
        return dict(found)

    def shift(self, seconds: float) -> None:
        """Engines were kept from work for so long: that counts for none in flight."""
        for flight in self._flights.values():
            flight.sent_s += seconds

    def _wait_again(self, samples: Iterable[tuple[Group, int]]) -> None:
        by_group: dict[int, tuple[Group, list[int]]] = {}
        for group, sample_id in samples:
            by_group.setdefault(group.number, (group, []))[1].append(sample_id)
        for group, sample_ids in by_group.values():
            self._wait(group, sample_ids)

    def _wait(self, group: Group, sample_ids: list[int]) -> None:
        self._group_of |= dict.fromkeys(sample_ids, group)
        longest = max(len(answer.prompt) for answer in group.answers.values())
        key = (group.batch, -group.expected_tokens, -longest, group.number)
        heapq.heappush(self._waiting, (*key, sample_ids))

    def _send(self, sample_id: int, engine: int, now_s: float, version: int) -> Answer:
        group = self._group_of.pop(sample_id)
        self._flights[sample_id] = Flight(group, sample_id, engine, now_s, version)
        self._load[engine] += 1
        return group.answers[sample_id]
