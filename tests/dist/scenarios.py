"""Pipelines that check the runtime from inside a job. An assertion that fails ends the job."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field

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

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, rank, how):
        if self.rank == rank:
            if how == "raise":
                raise ValueError("seven is not a vegetable")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                raise SystemExit(3)
            if how == "lock":
                return {"fine": 1, "bad": threading.Lock()}
        dist.all_reduce(torch.ones(1), group=self.groups["world"])
        return None

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def uneven(self, data):
        return DataProto({"a" if self.rank else "b": torch.zeros(len(data), 2)})

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
    how: str = "raise"


def batch(rows: int) -> DataProto:
    return DataProto(
        {"x": torch.arange(rows * 3).view(rows, 3)},
        {"name": np.array([f"n{i}" for i in range(rows)], dtype=object)},
        {"temperature": 0.7},
    )


class Base(BasePipeline):
    def __init__(self, pipeline_config: TwoRoles):
        super().__init__(pipeline_config)
        made = self.create_clusters_parallel(
            [(n, n, getattr(pipeline_config, n).worker_cls, getattr(pipeline_config, n)) for n in "ab"]
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


class Fails(Base):
    """Ends by the failure that `how` names."""

    def run(self):
        how = self.pipeline_config.how
        print("READY", flush=True)
        if how == "driver":
            raise KeyError("no such vegetable")
        if how == "driver_kill":
            self.a.nap(30, blocking=False)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "nap":
            self.a.nap(30)
        if how == "uneven":
            self.a.uneven(batch(4))
        if how == "missing":
            self.a.dubble(batch(4))
        if how == "argument":
            self.a.total({"ok": 1, "lock": threading.Lock()})
        self.b.nap(30, blocking=False)
        self.a.fail_on(1, how)
        print("A CALL RETURNED", flush=True)


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
