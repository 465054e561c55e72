"""Pipelines that check the runtime from inside a job. An assertion that fails ends the job."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from roll_td import (
    BaseConfig,
    BasePipeline,
    Cluster,
    DataProto,
    Dispatch,
    StepPlan,
    Sum,
    Topology,
    Worker,
    WorkerConfig,
    get,
    register,
    register_request,
)


class EchoWorker(Worker):
    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, prefetch=True)
    def double(self, data):
        data.batch["out"] = data.batch["x"] * 2
        data.meta_info["metrics"] = {"rows": Sum(len(data))}
        data.non_tensor_batch["who"] = np.array([self.rank] * len(data), dtype=object)
        return data

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def score(self, data, factor):
        return DataProto({"log_probs": data["input_ids"].float() * factor})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def count(self, data):
        return len(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def total(self, value):
        tensor = torch.tensor([float(self.rank + 1)])
        dist.all_reduce(tensor, group=self.groups["world"])
        return tensor.item() + value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def size_of(self, tensor):
        return tensor.sum().item()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def mine(self, item):
        return self.rank, item

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def nothing(self):
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def draw(self):
        return torch.rand(1).item(), float(np.random.rand())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nap(self, seconds):
        time.sleep(seconds)

    @register_request
    def hello(self, name):
        return f"{name} from {self.rank}"

    @register_request
    def stream(self, n):
        yield from range(n)


class TPWorker(EchoWorker):
    @classmethod
    def topology(cls, worker_config):
        return Topology(dp=worker_config.world_size // 2, tp=2)


@dataclass
class TwoRoles(BaseConfig):
    a: WorkerConfig = field(default_factory=WorkerConfig)
    b: WorkerConfig = field(default_factory=WorkerConfig)


def batch(rows: int) -> DataProto:
    return DataProto(
        {"x": torch.arange(rows * 3).view(rows, 3)},
        {"name": np.array([f"n{i}" for i in range(rows)], dtype=object)},
        {"temperature": 0.7},
    )


class Base(BasePipeline):
    def __init__(self, pipeline_config: TwoRoles):
        super().__init__(pipeline_config)
        configs = {"a": pipeline_config.a, "b": pipeline_config.b}
        made = self.create_clusters_parallel(
            [(name, name, config.worker_cls, config) for name, config in configs.items()]
        )
        self.a, self.b = made["a"], made["b"]
        self.a.initialize(pipeline_config)
        get(self.b.initialize(pipeline_config=pipeline_config, blocking=False))


class Everything(Base):
    """Each kind of call once, values checked."""

    def run(self):
        for cluster in (self.a, self.b):
            self.check(cluster)
        pending = [c.total(i, blocking=False) for i in range(20) for c in (self.a, self.b)]
        for i, refs in reversed(list(enumerate(pending))):
            n = len(refs)
            assert get(refs) == [n * (n + 1) / 2 + i // 2] * n
        late = Cluster("late", EchoWorker, self.resource_manager, self.pipeline_config.a)
        assert late.double(batch(3))["out"].tolist() == (batch(3)["x"] * 2).tolist()
        print("EVERYTHING CHECKED", flush=True)

    def check(self, c):
        for rows in (0, 1, 7):
            data = batch(rows)
            out = c.double(data)
            assert out["out"].tolist() == (data["x"] * 2).tolist()
            assert out["name"].tolist() == data["name"].tolist()
            assert out.meta_info["temperature"] == 0.7
            assert out.meta_info["metrics"]["rows"] == rows
            assert "out" not in data.batch and "metrics" not in data.meta_info
        assert sum(c.count(batch(7))) == 7 and len(c.count(batch(7))) == c.dp_size
        big = DataProto({"x": torch.arange(3 * 70_000).view(-1, 3)})
        refs = c.double(big, blocking=False)
        assert torch.equal(DataProto.materialize_concat(refs)["out"], big["x"] * 2)
        assert c.size_of(torch.ones(50_000)) == [50_000.0] * c.world_size
        assert c.mine(list("abcdefgh")[: c.world_size]) == [
            (i, "abcdefgh"[i]) for i in range(c.world_size)
        ]
        assert c.nothing() is None
        first, again = c.draw(), c.draw()
        assert len({*first, *again}) == 2 * c.world_size
        assert c.hello("hi", worker=c.world_size - 1) == f"hi from {c.world_size - 1}"
        nap = c.nap(0.3, blocking=False)
        assert list(c.stream(4)) == [0, 1, 2, 3]
        get(nap)
        self.check_plan(c)
        self.check_packed(c)

    def check_plan(self, c):
        data = batch(5)
        order = [(4,), (2,), (0,), (3,), (1,)]
        if c.dp_size == 1:
            data.plan = StepPlan((tuple(order),), {"tokens": 5.0})
        elif c.dp_size == 2:
            data.plan = StepPlan((tuple(order[:3]), (*order[3:], (3,))), {"tokens": 5.0}, (0, 1))
        else:
            return
        out = c.double(data)
        assert out["x"].tolist() == data["x"].tolist()
        assert out["name"].tolist() == data["name"].tolist()

    def check_packed(self, c):
        lengths = torch.tensor([5, 900, 17, 0, 400, 33])
        ids = torch.randint(1, 99, (6, 4096))
        mask = torch.arange(4096) < lengths[:, None]
        ids[~mask] = 7
        labels = ids.masked_fill(~mask, -100)
        data = DataProto({"input_ids": ids, "labels": labels, "lengths": lengths})
        before = self.sent()
        out = c.score(data, 2.0)
        assert torch.equal(out["log_probs"][mask], ids[mask].float() * 2)
        assert self.sent() - before < 0.25 * (ids.nbytes + labels.nbytes)

    def sent(self):
        from roll_td.runtime.driver import current_driver

        driver = current_driver()
        return driver.sending.bytes_sent + driver.hub.bytes_sent


class StepWorker(EchoWorker):
    """A role whose ranks step together: the Cluster plans for it."""

    @classmethod
    def topology(cls, worker_config):
        return Topology(dp=worker_config.world_size, steps_together=True, micro_batch_size=2)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def step(self, data):
        plan = data.plan
        tokens = sum(
            float(data["labels"][list(rows)].ne(-100).sum())
            for i, rows in enumerate(plan.micro_batches)
            if not plan.is_filler(i)
        )
        total = torch.tensor([float(tokens)])
        for _ in plan.micro_batches:  # every rank has as many: none waits for ever
            dist.all_reduce(torch.ones(1), group=self.groups["world"])
        dist.all_reduce(total, group=self.groups["world"])
        return total.item() / plan.denominators["tokens"]


class Planned(Base):
    """One row on two ranks steps all the same; driver draws are the driver's own."""

    def run(self):
        for rows in (1, 2, 5, 8):
            labels = torch.arange(rows * 4).view(rows, 4)
            labels[:, 0] = -100
            assert self.a.step(DataProto({"labels": labels})) == [1.0, 1.0]
        torch.manual_seed(3)
        first = torch.rand(2)
        torch.manual_seed(3)
        start = torch.rand(1)
        self.b.draw()
        assert torch.equal(torch.cat([start, torch.rand(1)]), first)
        print("PLANNED", flush=True)


class HousekeepingWorker(EchoWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def usage(self):
        return usage()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_a_child(self):
        """Fork, and end the child by SIGTERM: how it ended."""
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(5)
        return child.exitcode


def usage() -> tuple[float, int, int]:
    """This process: MB of its own memory that are resident, open files, threads."""
    pages = [int(n) for n in Path("/proc/self/statm").read_text().split()]
    own = (pages[1] - pages[2]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return own, len(os.listdir("/proc/self/fd")), threading.active_count()


class Housekeeping(Base):
    """A long run holds on to nothing, and a child of a rank can be ended without the rank."""

    def run(self):
        assert self.a.end_a_child() == [-signal.SIGTERM] * 2
        data = DataProto({"x": torch.rand(64, 8192)})  # 2 MB
        samples = {}
        for step in self.steps(200):
            self.log(self.a.double(data).meta_info["metrics"])
            list(self.a.stream(3))
            if step in (10, 199):
                samples[step] = [usage(), *self.a.usage()]
        for before, after in zip(samples[10], samples[199], strict=True):
            assert after[0] - before[0] < 189 * 1.0, (before, after)  # a leak: 2 MB a step
            assert after[1] == before[1] and after[2] <= before[2] + 1, (before, after)
        print("HOUSE KEPT", samples, flush=True)
