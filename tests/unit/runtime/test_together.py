"""One command for the workers of several clusters: who is called, when, and what comes back."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch

from roll_td import DataProto, Dispatch, Worker, get, register
from roll_td.config.base import WorkerConfig
from roll_td.placement import planned_places
from roll_td.runtime.cluster import Cluster, ResourceManager
from roll_td.runtime.failure import WorkerError
from roll_td.runtime.inprocess import LocalJob
from roll_td.runtime.together import Here, call_together, homes, make_groups
from roll_td.runtime.transport import Group

MakeRole = Callable[..., Cluster]
HERE = "tests.unit.runtime.test_together"


class Log(Worker):
    """Keeps what was done on it, in order."""

    release = threading.Event()
    seen: list[str] = []  # noqa: RUF012

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, text: str, wait: bool = False) -> list[str]:
        if wait:
            assert Log.release.wait(10)
        self.seen = [*self.seen, text]
        return self.seen


def look(here: Here, tag: str, wait: bool = False) -> tuple[int, dict[str, int]]:
    if wait:
        assert Log.release.wait(10)
    for worker in here.workers.values():
        worker.seen = [*worker.seen, tag]
    return here.rank, {role: worker.rank for role, worker in here.workers.items()}


def exchange(here: Here, group: Group) -> list[float]:
    """The ranks of the group hear from its first member."""
    data = torch.tensor([here.rank, 7], dtype=torch.uint8)
    here.transport.broadcast(data, group.ranks[0], group).wait()
    return data.tolist()


def draw(here: Here) -> float:
    return random.random()


def fail(here: Here) -> None:
    if here.rank == 2:
        raise RuntimeError("no good")


def much(here: Here) -> DataProto:
    return DataProto({"x": torch.zeros(20_000)})


def test_each_rank_is_called_once_with_the_workers_that_live_there(role: MakeRole) -> None:
    a = role(Log, name="a", device_mapping=[2, 0])
    b = role(Log, name="b", device_mapping=[1, 2])
    assert homes([a, b]) == (2, 0, 1)
    assert call_together([a, b], f"{HERE}.look", tag="x") == [
        (2, {"a": 0, "b": 1}),
        (0, {"a": 1}),
        (1, {"b": 0}),
    ]


def test_it_takes_its_turn_in_the_log(role: MakeRole, job: LocalJob) -> None:
    Log.release.clear()
    a, b = role(Log, name="a", device_mapping=[0, 1]), role(Log, name="b", device_mapping=[1, 2])
    first = a.add("before", wait=True, blocking=False)
    refs = call_together([a, b], f"{HERE}.look", blocking=False, tag="both")
    last = [cluster.add("after", blocking=False) for cluster in (a, b)]
    assert len(refs) == 3 and not refs.call.done.wait(0.1)
    assert not job.executors[2]._workers[b._id].worker.seen, "rank 2 waits for the others"
    Log.release.set()
    assert get(refs) == [(0, {"a": 0}), (1, {"a": 1, "b": 0}), (2, {"b": 1})]
    assert refs[2].get() == (2, {"b": 1})
    assert get(first) == [["before"]] * 2
    assert get(last) == [[["before", "both", "after"]] * 2, [["both", "after"]] * 2]


def test_a_rank_that_is_only_owned_waits_till_the_end(role: MakeRole) -> None:
    Log.release.clear()
    engine = role(Log, name="engine", device_mapping=[0, 1], num_gpus_per_worker=2)
    other = role(Log, name="other", device_mapping=[1])
    refs = call_together([engine], f"{HERE}.look", blocking=False, tag="both", wait=True)
    after = other.add("y", blocking=False)
    assert not after.call.done.wait(0.1), "met the engine on its second device"
    Log.release.set()
    assert get(refs) == [(0, {"engine": 0})]
    assert get(after) == [["y"]]


def test_groups_are_made_once_and_used_by_name(role: MakeRole) -> None:
    a, b = role(Log, name="a", device_mapping=[3, 1]), role(Log, name="b", device_mapping=[2])
    group = Group((1, 3, 2), 60.0)
    make_groups([group, group])
    for _ in range(2):
        assert call_together([a, b], f"{HERE}.exchange", group=group) == [[1, 7]] * 3


def test_draws_differ_by_call_and_leave_the_driver_s_alone(role: MakeRole, job: LocalJob) -> None:
    a, b = role(Log, 1, name="a"), role(Log, name="b", world_size=1, device_mapping=None)
    assert homes([b]) == (job.layout.driver_rank,)
    drawn = [call_together([x], f"{HERE}.draw")[0] for x in (a, b, a)]
    random.seed(5)
    want = [random.random(), random.random()]
    random.seed(5)
    got = [random.random()]
    drawn += call_together([b], f"{HERE}.draw")
    assert len(set(drawn)) == 4
    assert [*got, random.random()] == want


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("fail", r"b.fail failed \(worker 1 of b, rank 2 on node0\): RuntimeError: no good"),
        ("much", "much gave 80000 bytes of tensors; leave them with the workers"),
        ("nowhere", "nowhere failed .* has no nowhere"),
    ],
)
def test_the_one_that_fails_is_named(function: str, words: str) -> None:
    with pytest.raises(WorkerError), LocalJob(planned_places(1, 4, 1), 1, 4):
        clusters = [
            Cluster(n, Log, ResourceManager(1, 4), WorkerConfig(name=n, device_mapping=devices))
            for n, devices in (("a", [0]), ("b", [1, 2]))
        ]
        with pytest.raises(WorkerError, match=words):
            call_together(clusters, f"{HERE}.{function}")
