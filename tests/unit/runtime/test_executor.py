"""The executor: order, requests beside it, prefetch, seeds, and what a failure says."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from roll_td import DataProto, Dispatch, Worker, get, register, register_request
from roll_td.config.base import WorkerConfig
from roll_td.placement import planned_places
from roll_td.platform import current_platform
from roll_td.runtime.cluster import Cluster, ResourceManager
from roll_td.runtime.inprocess import LocalJob, LocalLine
from roll_td.runtime.seeding import kept_random_state, seed_command

MakeRole = Callable[..., Cluster]
PATIENCE_S = 10.0


class Gate(Worker):
    """Commands that wait until the test, or a request, opens the gate."""

    opened = threading.Event()
    order: list[tuple[int, Any]] = []  # noqa: RUF012

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait(self) -> bool:
        return Gate.opened.wait(PATIENCE_S)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def note(self, what: Any) -> None:
        Gate.order.append((self.rank, what))

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, prefetch=True, clear_cache=True)
    def ahead(self, data: DataProto) -> DataProto:
        return DataProto({"y": data["x"] + 1}, {"s": [s.upper() for s in data["s"]]})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def behind(self, data: DataProto) -> DataProto:
        return self.ahead(data)

    @register_request
    def open(self) -> str:
        Gate.opened.set()
        return f"opened by {self.rank}"

    @register_request
    def count(self, n: int, scale: torch.Tensor) -> Any:
        for i in range(n):
            yield {"i": i, "t": scale * i}

    @register_request
    def talk(self) -> Any:
        yield "first"
        yield Gate.opened.wait(PATIENCE_S)

    @register_request
    def nothing(self) -> None: ...

    @register_request
    def breaks(self) -> None:
        raise KeyError("no door")


@pytest.fixture(autouse=True)
def closed_gate() -> None:
    Gate.opened.clear()
    Gate.order.clear()


def test_commands_of_a_rank_run_in_the_order_of_the_log(role: MakeRole) -> None:
    a, b = role(Gate, 2, "a"), role(Gate, 2, "b")
    pending = [(a, b)[i % 2].note(i, blocking=False) for i in range(40)]
    get(pending[::-1])
    for worker in range(2):
        assert [what for rank, what in Gate.order if rank == worker] == list(range(40))


def test_threads_of_the_driver_give_every_rank_one_order(
    role: MakeRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = role(Gate, 4)
    send = LocalLine.send

    def slow(self: LocalLine, *args: Any) -> None:
        time.sleep(0.0001)  # another thread of the driver gets its turn
        send(self, *args)

    monkeypatch.setattr(LocalLine, "send", slow)

    def post(start: int) -> None:
        get([cluster.note(i, blocking=False) for i in range(start, start + 25)])

    threads = [threading.Thread(target=post, args=(100 * t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    orders = [[what for rank, what in Gate.order if rank == worker] for worker in range(4)]
    assert len(orders[0]) == 100 and all(order == orders[0] for order in orders)


def test_requests_reach_a_rank_whose_executor_is_busy(role: MakeRole) -> None:
    cluster = role(Gate, 2)
    waiting = cluster.wait(blocking=False)
    scale = torch.arange(3.0)
    items = list(cluster.count(3, scale=scale, worker=1))
    assert [item["i"] for item in items] == [0, 1, 2]
    assert torch.equal(items[2]["t"], scale * 2)
    assert not Gate.opened.is_set()
    talk = iter(cluster.talk())
    assert next(talk) == "first", "an item comes before the last is made"
    reply = cluster.open(worker=1, blocking=False)
    assert get(reply) == "opened by 1"
    assert get(waiting) == [True, True]
    assert cluster.nothing() is None
    assert list(talk) == [True]
    assert get(cluster.count(2, scale))[1]["t"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match=r"role.open\(worker=2\): the role has workers 0 to 1"):
        cluster.open(worker=2)


@pytest.mark.parametrize("rows", [0, 3, 60_000])  # nothing; inline; sent
def test_rows_prefetched_behind_a_busy_rank_are_the_right_ones(role: MakeRole, rows: int) -> None:
    cluster = role(Gate, 2)
    waiting = cluster.wait(blocking=False)
    batches = [DataProto({"x": torch.arange(rows) * i}, {"s": [f"{i}a"] * rows}) for i in range(4)]
    pending = [cluster.ahead(batch, blocking=False) for batch in batches]
    Gate.opened.set()
    for i, refs in reversed(list(enumerate(pending))):
        out = get(refs)
        assert torch.equal(out["y"], torch.arange(rows) * i + 1)
        assert out["s"].tolist() == [f"{i}A"] * rows
    assert get(waiting) == [True, True]


@pytest.mark.parametrize(("method", "arrives"), [("ahead", True), ("behind", False)])
def test_rows_arrive_while_the_call_before_runs_only_where_that_is_wanted(
    role: MakeRole, job: LocalJob, method: str, arrives: bool
) -> None:
    cluster = role(Gate, 1)
    waiting = cluster.wait(blocking=False)
    data = DataProto({"x": torch.arange(60_000)}, {"s": ["a"] * 60_000})
    before = job.driver.sending.bytes_sent
    refs = getattr(cluster, method)(data, blocking=False)
    for _ in range(100 if arrives else 5):
        if job.driver.sending.bytes_sent > before:
            break
        time.sleep(0.01)
    assert (job.driver.sending.bytes_sent > before) == arrives
    Gate.opened.set()
    assert get(waiting) == [True] and torch.equal(get(refs)["y"], data["x"] + 1)


def test_clear_cache_frees_the_devices_cache_after_the_call(
    role: MakeRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[str] = []
    monkeypatch.setattr(type(current_platform), "empty_cache", lambda self: cleared.append("x"))
    cluster = role(Gate, 3)
    cluster.note("no")
    assert cleared == []
    cluster.ahead(DataProto({"x": torch.arange(4)}, {"s": list("abcd")}))
    assert len(cleared) == 3


class Draws(Worker):
    """Workers whose draws do not overlap: ranks of a LocalJob share one random state."""

    turn: list[threading.Event] = []  # noqa: RUF012
    held = threading.Event()

    def __init__(self, worker_config: WorkerConfig):
        super().__init__(worker_config)
        self.born = torch.rand(1).item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def draw(self) -> tuple[float, ...]:
        drawn = torch.rand(1).item(), float(np.random.rand()), random.random()
        if Draws.turn:
            Draws.turn[self.rank].set()
        return drawn

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def other(self) -> tuple[float, ...]:
        return self.draw()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def birth(self) -> float:
        return self.born

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for(self, worker: int) -> bool:
        Draws.held.set()
        return Draws.turn[worker].wait(PATIENCE_S)


def draws_of_a_run(seed: int) -> dict[str, Any]:
    """Draws of one job: by step, method and count, of two roles on one rank."""
    found: dict[str, Any] = {}
    with LocalJob(planned_places(1, 2, 1), 1, 2, seed=seed) as job:
        manager = ResourceManager(1, 2)
        one, two = (
            Cluster(name, Draws, manager, WorkerConfig(name=name, device_mapping=[0]))
            for name in ("one", "two")
        )
        found["one born"], found["two born"] = one.birth()[0], two.birth()[0]
        for step in range(2):
            job.driver.step = step
            for count in range(2):
                found[f"draw {step} {count}"] = one.draw()[0]
                found[f"other {step} {count}"] = one.other()[0]
                found[f"two {step} {count}"] = two.draw()[0]
    return found


def test_each_command_has_draws_of_its_own_and_a_run_can_be_repeated() -> None:
    Draws.turn = []
    first = draws_of_a_run(7)
    assert len(set(first.values())) == len(first) == 14
    assert draws_of_a_run(7) == first
    assert not set(draws_of_a_run(8).values()) & set(first.values())


def test_workers_of_one_command_draw_differently() -> None:
    """Worker 1 draws after worker 0: its rank is held by another role until then."""
    drawn = []
    for _ in range(2):
        Draws.turn = [threading.Event(), threading.Event()]
        with LocalJob(planned_places(1, 2, 1), 1, 2):
            manager = ResourceManager(1, 2)
            pair = Cluster("pair", Draws, manager, WorkerConfig(name="p", device_mapping=[0, 1]))
            holder = Cluster("hold", Draws, manager, WorkerConfig(name="h", device_mapping=[1]))
            Draws.held.clear()
            held = holder.wait_for(0, blocking=False)
            assert Draws.held.wait(PATIENCE_S)
            drawn.append(pair.draw())
            assert get(held) == [True]
    Draws.turn = []
    assert drawn[0] == drawn[1]
    assert len({number for worker in drawn[0] for number in worker}) == 6


def test_a_rank_of_the_driver_keeps_the_drivers_draws() -> None:
    def draws() -> tuple[float, ...]:
        return torch.rand(1).item(), float(np.random.rand()), random.random()

    seed_command(3, "driver", 0, 0, "run", 0)
    wanted = [draws(), draws()]
    with LocalJob(planned_places(1, 1, 0), 1, 1):
        manager = ResourceManager(1, 1)
        seed_command(3, "driver", 0, 0, "run", 0)
        first = draws()
        role = Cluster("one", Draws, manager, WorkerConfig(name="one", device_mapping=[0]))
        role.draw()
        assert [first, draws()] == wanted
    with kept_random_state():
        draws()
    seed_command(3, "driver", 0, 0, "run", 0)
    assert draws() == wanted[0]
