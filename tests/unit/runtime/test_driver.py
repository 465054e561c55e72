"""The driver: what it sends, how often it pickles, what it keeps."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from roll_td import Cluster, DataProto, Dispatch, Topology, Worker, WorkerConfig, get, register
from roll_td.placement import planned_places
from roll_td.runtime import inprocess
from roll_td.runtime.cluster import ResourceManager
from roll_td.runtime.driver import current_driver
from roll_td.runtime.inprocess import LocalJob
from roll_td.runtime.trace import TraceWriter

MakeRole = Callable[..., Cluster]


class Counts:
    """Pickles how often it was pickled."""

    pickled = 0

    def __reduce__(self) -> Any:
        Counts.pickled += 1
        return Counts, ()


class Takes(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def everything(self, *args: Any, **kwargs: Any) -> int:
        return len(args) + len(kwargs)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def rows(self, data: DataProto, *args: Any) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def nothing(self, data: DataProto) -> None: ...


class Pairs(Takes):
    """tp 2 below each dp rank."""

    @classmethod
    def topology(cls, worker_config: WorkerConfig) -> Topology:
        return Topology(dp=4, tp=2)


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LocalJob, list[int]]]:
    """A job of eight device ranks, and the sizes of the frames that its driver sends."""
    sizes: list[int] = []
    send = inprocess.LocalLine.send

    def counted(self: Any, kind: Any, head: bytes, own: bytes = b"", inline: Any = ()) -> None:
        sizes.append(len(head) + len(own) + sum(memoryview(c).nbytes for c in inline))
        send(self, kind, head, own, inline)

    monkeypatch.setattr(inprocess.LocalLine, "send", counted)
    with LocalJob(planned_places(1, 8, 1), 1, 8) as job:
        yield job, sizes


def cluster_of(worker_cls: type) -> Cluster:
    config = WorkerConfig(name="role", device_mapping="0-7")
    return Cluster("role", worker_cls, ResourceManager(1, 8), config)


@pytest.mark.parametrize("worker_cls", [Takes, Pairs])
def test_l07_a_batch_leaves_the_driver_once(
    eight: tuple[LocalJob, list[int]], worker_cls: type
) -> None:  # L07
    job, sizes = eight
    cluster = cluster_of(worker_cls)
    data = DataProto({"x": torch.zeros(512, 4096, dtype=torch.int64)})
    nbytes = data["x"].nbytes
    frames, sent = len(sizes), job.driver.sending.bytes_sent
    began = time.monotonic()
    cluster.rows(data)
    assert time.monotonic() - began < 2
    through = sum(sizes[frames:]) + job.driver.sending.bytes_sent - sent
    assert nbytes <= through < 1.01 * nbytes


def test_l07_what_all_workers_get_is_pickled_once(
    eight: tuple[LocalJob, list[int]],
) -> None:  # L07
    job, sizes = eight
    cluster = cluster_of(Takes)
    text, tensor = "x" * 1_000_000, torch.zeros(500_000)
    for call in (
        lambda: cluster.everything(Counts(), key=[Counts()]),
        lambda: cluster.rows(DataProto({"x": torch.arange(8)}), Counts(), Counts()),
    ):
        Counts.pickled = 0
        before = job.driver.pickled
        call()
        assert Counts.pickled == 2
        assert job.driver.pickled - before == 1, "the command's head"
    frames, sent = len(sizes), job.driver.sending.bytes_sent
    cluster.everything(tensor)
    through = sum(sizes[frames:]) + job.driver.sending.bytes_sent - sent
    assert tensor.nbytes <= through < 1.05 * tensor.nbytes, "tensors fan out from the first rank"
    frames, sent = len(sizes), job.driver.sending.bytes_sent
    cluster.everything(text)
    through = sum(sizes[frames:]) + job.driver.sending.bytes_sent - sent
    assert len(text) <= through < 1.05 * len(text), "and so do objects"


def test_objects_of_a_shard_leave_the_driver_once(eight: tuple[LocalJob, list[int]]) -> None:
    job, sizes = eight
    cluster = cluster_of(Pairs)
    data = DataProto({"x": torch.arange(8)}, {"o": [str(i) * 100_000 for i in range(8)]})
    frames, sent = len(sizes), job.driver.sending.bytes_sent
    cluster.nothing(data)
    through = sum(sizes[frames:]) + job.driver.sending.bytes_sent - sent
    assert 800_000 <= through < 1.05 * 800_000


def test_padding_does_not_leave_the_driver(eight: tuple[LocalJob, list[int]]) -> None:
    job, sizes = eight
    cluster = cluster_of(Takes)
    lengths = torch.full((64,), 600)
    ids = torch.ones(64, 4096, dtype=torch.int64)
    ids[:, 600:] = 0
    frames, sent = len(sizes), job.driver.sending.bytes_sent
    cluster.nothing(DataProto({"input_ids": ids, "lengths": lengths}))
    through = sum(sizes[frames:]) + job.driver.sending.bytes_sent - sent
    assert through < 1.05 * ids.nbytes * 600 / 4096


def test_one_call_is_one_span_a_worker_in_the_trace(
    role: MakeRole, job: LocalJob, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    job.driver.trace = trace = TraceWriter(path, time.time())
    cluster = role(Takes, 3, "r")
    cluster.everything(1)
    get([cluster.rows(DataProto({"x": torch.arange(5)}), blocking=False) for _ in range(2)])
    job.driver.drain()
    job.driver.trace = None
    trace.close()
    events = json.loads(path.read_text())
    spans = [e for e in events if e["ph"] == "X"]
    counts = Counter((e["name"], e["pid"]) for e in spans)
    assert {pid for _, pid in counts} >= {0, 1, 2}
    for rank in range(3):
        assert counts["r.everything", rank] == 1 and counts["r.rows", rank] == 2
        assert counts["r.build", rank] == 1
    assert all(e["dur"] >= 0 and e["args"]["queued_s"] >= 0 for e in spans)
    own = sorted((e for e in spans if e["pid"] == 0), key=lambda e: float(e["ts"]))
    numbers = [e["args"]["command"] for e in own]
    assert numbers == sorted(numbers), "a rank carries out commands in log order"


def threads_of_jobs() -> int:
    return sum(t.is_alive() for t in threading.enumerate())


def test_l06_jobs_and_calls_leave_nothing_behind() -> None:  # L06
    """There are as many objects after 60 steps as after 10, and no thread after the job."""

    def steps(cluster: Cluster, n: int) -> None:
        data = DataProto(
            {"x": torch.zeros(100, 1000), "n": torch.arange(100)}, {"o": [[i] for i in range(100)]}
        )
        for _ in range(n):
            cluster.rows(data)
            cluster.everything("text", key=torch.ones(20_000))
            get([cluster.nothing(data, blocking=False) for _ in range(3)])

    before = threads_of_jobs()
    with LocalJob(planned_places(1, 2, 1), 1, 2) as job:
        config = WorkerConfig(name="role", device_mapping=[0, 1])
        cluster = Cluster("role", Takes, ResourceManager(1, 2), config)
        steps(cluster, 10)
        gc.collect()
        objects, process = len(gc.get_objects()), psutil.Process()
        resident, descriptors = process.memory_info().rss, process.num_fds()
        steps(cluster, 50)
        gc.collect()
        grown = len(gc.get_objects()) - objects
        assert grown < 50, f"{grown} objects more after 50 steps"
        assert process.memory_info().rss - resident < 20e6, "the batches of 50 steps are 80 MB"
        assert process.num_fds() == descriptors
        assert current_driver() is job.driver
    until = time.monotonic() + 10
    while threads_of_jobs() > before:  # they end by themselves, when they get to it
        assert time.monotonic() < until, threading.enumerate()
        time.sleep(0.01)
    with pytest.raises(ValueError, match="there is no job here"):
        current_driver()
