"""Pipelines that fail, each in the way that `how` names. No call may return."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from scenarios import EchoWorker, batch

from roll_td import (
    BaseConfig,
    BasePipeline,
    Cluster,
    DataProto,
    Dispatch,
    Worker,
    WorkerConfig,
    register,
    register_request,
)

if os.environ.get("RAISE_AT_IMPORT_ON") == os.environ.get("RANK", "0"):
    raise RuntimeError("turnips are out")


class FailingWorker(EchoWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pids(self):
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, rank, how):
        if self.rank == rank:
            return self.fail(how)
        dist.all_reduce(torch.ones(1), group=self.groups["world"])
        return None

    def fail(self, how):
        if how == "raise":
            raise ValueError("seven is not a vegetable")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            raise SystemExit(3)
        if how == "lock":
            return {"fine": 1, "bad": threading.Lock()}
        if how == "nested":
            rows = DataProto({"x": torch.ones(2, 1)}, {}, {"deep": [{"er": (1, lambda: 1)}]})
            return {"first": [1, {"second": rows}]}
        raise AssertionError(how)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_while_others_hold_the_gil(self, rank):
        time.sleep(0.3)  # until the driver has sent the call to all, should this be its process
        if self.rank == rank:
            time.sleep(0.5)
            raise ValueError("seven is not a vegetable")
        sum(range(10**11))

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def uneven(self, data):
        return DataProto({"a" if self.rank else "b": torch.zeros(len(data), 2)})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def die_soon(self, data):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return data

    @register_request
    def wrong_request(self):
        yield 1
        raise ValueError("a leek in the request")


class FailsInInit(Worker):
    def __init__(self, worker_config):
        super().__init__(worker_config)
        raise ValueError("no worker grows here")


class FailsInInitialize(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config):
        if self.rank == 1:
            raise ValueError("no model grows here")


@dataclass
class FailsConfig(BaseConfig):
    a: WorkerConfig = field(default_factory=WorkerConfig)
    how: str = "raise"


class Fails(BasePipeline):
    """Ends by the failure that `how` names; prints READY right before."""

    def __init__(self, pipeline_config: FailsConfig):
        super().__init__(pipeline_config)
        print("STARTED", flush=True)
        config = pipeline_config.a
        self.a = Cluster("a", config.worker_cls, self.resource_manager, config)
        self.a.initialize(pipeline_config)

    def run(self):
        how = self.pipeline_config.how
        print(f"pid of driver: {os.getpid()}")
        for name, pid in enumerate(self.a.pids()):
            print(f"pid of worker {name}: {pid}")
        print("READY", flush=True)
        if hasattr(self, how):
            getattr(self, how)()
        else:
            self.a.fail_on(1, how)
        print("A CALL RETURNED", flush=True)

    def driver(self):
        raise KeyError("no such vegetable")

    def driver_kill(self):
        self.a.nap(30, blocking=False)
        os.kill(os.getpid(), signal.SIGKILL)

    def driver_kill_while_sending(self):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            self.a.double(DataProto({"x": torch.ones(2, 1 << 22)}))

    def nap(self):
        self.a.nap(300)

    def uneven(self):
        self.a.uneven(batch(4))

    def missing(self):
        self.a.dubble(batch(4))

    def argument(self):
        self.a.total({"ok": 1, "lock": threading.Lock()})

    def hog(self):
        self.a.fail_while_others_hold_the_gil(1)

    def request(self):
        list(self.a.wrong_request(worker=1))

    def closed_peer(self):
        """Send for as long as it takes to notice that the receiver has gone."""
        with contextlib.suppress(ValueError):
            while True:
                self.a.die_soon(DataProto({"x": torch.ones(2, 1 << 22)}))

    def full_disk(self):
        self.a.total(1)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        for _ in range(1000):
            self.log({"metric": 1.0})

    def full_disk_for_the_trace(self):
        self.a.total(1)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        for _ in range(100):
            time.sleep(0.03)
            self.a.total(1)
