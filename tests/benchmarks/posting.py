"""Planning and posting one call to many ranks, with a hub and a transport that only count."""

from __future__ import annotations

import statistics
from typing import Any

from dispatch import clock, columns

from roll_td import Cluster, DataProto, WorkerConfig
from roll_td.placement import world_layout
from roll_td.runtime.cluster import ResourceManager
from roll_td.runtime.driver import Driver
from roll_td.runtime.rendezvous import RankPlace


class Counting:
    """A hub and a transport that only count."""

    def __init__(self, rank: int):
        self.rank, self.sent = rank, 0

    def sender(self, rank: int) -> Counting:
        return self

    def send(self, *frame: Any) -> None:
        self.sent += 1


def post(ranks: int, empty: bool) -> float:
    """Milliseconds to plan and post one call."""
    places = [(rank // 8, rank % 8) for rank in range(ranks)] + [(0, 8)]
    layout = world_layout(places, ranks // 8, 8)
    counting = Counting(layout.driver_rank)
    where = [RankPlace(n, r, f"node{n}", "127.0.0.1", None, 0) for n, r in places]
    Driver(layout, counting, counting, print, where).install()
    config = WorkerConfig(name="a", device_mapping=list(range(ranks)), world_size=ranks)
    cls = "dispatch.BenchWorker"
    cluster = Cluster("a", cls, ResourceManager(ranks // 8, 8), config, blocking=False)
    batch, taken = DataProto(columns(ranks * 2, 4096)), []
    for _ in range(9):
        before = counting.sent
        call = (lambda: cluster.empty(blocking=False)) if empty else (
            lambda: cluster.double(batch, blocking=False))  # fmt: skip
        taken.append(clock(call))
        assert counting.sent - before == ranks
    return statistics.median(taken) * 1e3
