"""When engines had something to do: for the trace, and as the share of time that they had not."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection

from roll_td.metrics import Mean, Metric
from roll_td.runtime.cluster import Cluster
from roll_td.runtime.driver import current_driver

FIRST_NUMBER = 1 << 40
"""Of spans in the trace, where commands have numbers from 1 on."""


class Activity:
    """Spans in which an engine has requests and is not paused."""

    def __init__(self, engines: Cluster) -> None:
        self._driver, self._name = current_driver(), engines.name
        self._ranks = [seat.ranks[0] for seat in engines.placement.seats]
        self._numbers = itertools.count(FIRST_NUMBER)
        self._since: dict[int, float] = {}
        self._busy_s, self._asked_s = 0.0, time.time()

    def note(self, busy: Collection[int]) -> None:
        """These engines have something to do, from now on."""
        now_s = time.time()
        for engine in set(self._since) - set(busy):
            began_s = self._since.pop(engine)
            self._busy_s += now_s - max(began_s, self._asked_s)
            self._trace(self._ranks[engine], began_s, now_s)
        for engine in busy:
            self._since.setdefault(engine, now_s)

    def metrics(self) -> dict[str, Metric]:
        """The share of time since the last call that an engine had nothing to do."""
        now_s = time.time()
        busy_s = self._busy_s + sum(now_s - max(s, self._asked_s) for s in self._since.values())
        all_s = (now_s - self._asked_s) * len(self._ranks)
        self._busy_s, self._asked_s = 0.0, now_s
        return {"rollout/idle": Mean(1 - busy_s / all_s)} if all_s > 0 else {}

    def _trace(self, rank: int, began_s: float, ended_s: float) -> None:
        if self._driver.trace is not None:
            name, driver_rank = f"{self._name}.engine", self._driver.layout.driver_rank
            runs = [(rank, (began_s, began_s, began_s, ended_s))]
            number = next(self._numbers)
            self._driver.trace.call(name, self._name, number, driver_rank, began_s, ended_s, runs)
