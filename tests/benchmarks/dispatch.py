"""What a call costs: ours, bare gloo and Ray in one job, interleaved; and planning without bytes.

    python tests/benchmarks/dispatch.py [--rounds N] [--no-ray]

Ray is run in three ways: as ROLL does it (contiguous, consolidate, torch.save for each chunk),
TensorDict chunks cloned first (a view would carry its whole storage), and numpy columns (out of
band, read without a copy). Bare isend/irecv starts with every
receive posted and sends no header. A ratio is the median of the ratios of the rounds.

At 10,000 ranks: posting is linear, one pickled head and one write a rank, so ten times what is
printed for 1,024. The driver's io thread reads as many answers, and one process holds as many
sockets: above a few thousand ranks a node leader has to pass on frames.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from starting import start_job

from roll_td import (
    BaseConfig,
    BasePipeline,
    Cluster,
    DataProto,
    Dispatch,
    Topology,
    Worker,
    WorkerConfig,
    get,
    register,
)
from roll_td.runtime.driver import current_driver

SIZES = {"64k": (16, 308), "8M": (160, 4032), "128M": (2560, 4032)}
RANKS, TAG = 4, 77
IN_A_ROW = 10
"""Calls of 64 kB of one side, of which the mean is taken. The first of them, after another side's,
finds nothing in the caches: alone it takes half as long again."""
COLUMNS = {"input_ids": torch.int64, "response_mask": torch.bool, "old_log_probs": torch.float32}


def columns(*shape: int) -> dict[str, torch.Tensor]:
    return {name: torch.randint(1, 99, shape).to(dtype) for name, dtype in COLUMNS.items()}


class BenchWorker(Worker):
    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def double(self, data):
        return DataProto({"log_probs": data["old_log_probs"] * 2})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def empty(self):
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def peer(self, ranks, rows, width):
        """The other side of bare gloo: receives posted, a byte that says so, one column back."""
        groups = dist.distributed_c10d._world.pg_group_ranks
        group = next(g for g in groups if dist.get_process_group_ranks(g) == list(ranks))
        into = [torch.empty(rows, width, dtype=t) for t in COLUMNS.values()]
        works = [dist.irecv(t, group=group, group_src=0, tag=TAG) for t in into]
        dist.send(torch.zeros(1), group=group, group_dst=0, tag=TAG + 1)
        for work in works:
            work.wait()
        dist.send(into[2] * 2, group=group, group_dst=0, tag=TAG)


class TPBenchWorker(BenchWorker):
    @classmethod
    def topology(cls, worker_config):
        return Topology(dp=worker_config.world_size // 2, tp=2)


@dataclass
class BenchConfig(BaseConfig):
    a: WorkerConfig = field(default_factory=WorkerConfig)
    tp: WorkerConfig = field(default_factory=WorkerConfig)
    rounds: int = 15
    ray: bool = True


class BenchPipeline(BasePipeline):
    def __init__(self, pipeline_config: BenchConfig):
        super().__init__(pipeline_config)
        c = pipeline_config
        self.a = Cluster("a", c.a.worker_cls, self.resource_manager, c.a)
        self.tp = Cluster("tp", c.tp.worker_cls, self.resource_manager, c.tp)

    def run(self) -> None:
        self.rays: Any = None
        if self.pipeline_config.ray:
            from ray_side import RaySide

            self.rays = RaySide(RANKS)
        lines = [self.size(*item) for item in SIZES.items()] + [self.empty(), self.uneven()]
        names = ["ours", "bare", "ROLL", "cloned", "numpy", "padded"]
        print(
            "\n".join(["", f"{'ms':8}" + "".join(f"{n:>9}" for n in names) + "   ratios to ours"])
        )
        for name, taken in lines:
            row = f"{name:8}"
            for side in names:
                row += f"{statistics.median(taken[side] or [math.nan]) * 1e3:9.2f}"
            for side in names[1:]:
                pairs = zip(taken[side], taken["ours"], strict=False)
                row += f"  {side} {statistics.median([x / y for x, y in pairs] or [math.nan]):.2f}"
            print(row)
        self.replicas()
        if self.rays:
            self.rays.ray.shutdown()
        sys.stdout.flush()

    def measure(self, name: str, sides: dict[str, Callable[[], float]], times: int = 1) -> Any:
        """Every side once a round, in an order drawn anew; each gives its own seconds."""
        taken: defaultdict[str, list[float]] = defaultdict(list)
        for i in range(-2, self.pipeline_config.rounds * times):
            for side in random.sample(list(sides), len(sides)):
                seconds = sides[side]()
                if i >= 0:
                    taken[side].append(seconds)
        return name, taken

    def size(self, name: str, shape: tuple[int, int]) -> Any:
        data = columns(*shape)
        batch, expected = DataProto(data), data["old_log_probs"] * 2
        bodies = {"ours": lambda: self.a.double(batch)["log_probs"]}
        if rays := self.rays:
            bodies["ROLL"] = lambda: rays.saved(data)
            bodies["cloned"] = lambda: rays.cloned(data)
            bodies["numpy"] = lambda: rays.arrays(data)
        for key, body in bodies.items():
            assert torch.equal(body(), expected), key
        calls = IN_A_ROW if name == "64k" else 1
        sides = {key: partial(clock, body, calls=calls) for key, body in bodies.items()}
        sides["bare"] = lambda: self.bare(data)
        return self.measure(name, sides, 5 if name == "64k" else 1)

    def bare(self, data: dict[str, torch.Tensor]) -> float:
        group = current_driver().transport.group(self.a._data_group)
        rows, width = data["input_ids"].shape
        refs = self.a.peer(self.a._data_group.ranks, rows // RANKS, width, blocking=False)
        for peer in range(1, RANKS + 1):
            dist.recv(torch.empty(1), group=group, group_src=peer, tag=TAG + 1)
        began = time.perf_counter()
        result = torch.empty(rows, width)
        works = [
            dist.irecv(into, group=group, group_src=peer, tag=TAG)
            for peer, into in enumerate(result.chunk(RANKS), 1)
        ]
        works += [
            dist.isend(part, group=group, group_dst=peer, tag=TAG)
            for column in data.values()
            for peer, part in enumerate(column.chunk(RANKS), 1)
        ]
        for work in works:
            work.wait()
        seconds = time.perf_counter() - began
        get(refs)
        return seconds

    def empty(self) -> Any:
        sides = {"ours": lambda: clock(self.a.empty)}
        if self.rays:
            sides["numpy"] = partial(clock, self.rays.empty)  # there is one way only
        return self.measure("empty", sides, 10)

    def uneven(self) -> Any:
        lengths = (torch.randn(1024) * 250 + 608).clamp(50, 1625).long()
        mask = torch.arange(4096) < lengths[:, None]
        data = {k: v * mask for k, v in columns(1024, 4096).items()}
        packed, padded = DataProto({**data, "lengths": lengths}), DataProto(data)
        want = data["old_log_probs"][mask] * 2
        before = self.bytes_out
        self.a.double(padded)
        between = self.bytes_out
        assert torch.equal(self.a.double(packed)["log_probs"][mask], want)
        ratio = (between - before) / (self.bytes_out - between)
        print(f"uneven: bytes out, padded / packed {ratio:.2f}")
        return self.measure("uneven", {"ours": lambda: clock(self.a.double, packed),
                                       "padded": lambda: clock(self.a.double, padded)})  # fmt: skip

    @property
    def bytes_out(self) -> int:
        """What has left the driver so far."""
        driver = current_driver()
        return int(driver.sending.bytes_sent + driver.hub.bytes_sent)

    def replicas(self) -> None:
        """Bytes out and peak memory of one call, in roles without and with replicas."""
        data = columns(*SIZES["128M"])
        batch, size = DataProto(data), sum(t.nbytes for t in data.values())
        for name, cluster in {"dp = 4": self.a, "dp = 2, tp = 2": self.tp}.items():
            cluster.double(DataProto(columns(16, 308)))
            before, result = self.bytes_out, None
            ctypes.CDLL(None).malloc_trim(0)  # or the result lands in freed, resident memory
            Path("/proc/self/clear_refs").write_text("5")
            resident = memory("VmRSS")
            result = cluster.double(batch)["log_probs"]
            peak = size + memory("VmHWM") - resident
            out = self.bytes_out - before
            print(f"{name}: bytes out / batch {out / size:.4f}, driver's peak / (batch + result) "
                  f"{peak / (size + result.nbytes):.3f}")  # fmt: skip


def clock(body: Callable[..., Any], *args: Any, calls: int = 1) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        body(*args)
    return (time.perf_counter() - began) / calls


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-ray", action="store_true")
    args = parser.parse_args()
    here = Path(__file__).resolve()
    from posting import post  # it imports this file as a module

    for ranks in (128, 256, 512, 1024):
        print(f"{ranks:5} ranks: posting a batch {post(ranks, False):6.2f} ms, "
              f"an empty call {post(ranks, True):6.2f} ms", flush=True)  # fmt: skip
    role = {"worker_cls": f"{here.stem}.BenchWorker", "device_mapping": list(range(RANKS))}
    with tempfile.TemporaryDirectory() as folder:
        config = {"pipeline_cls": f"{here.stem}.BenchPipeline", "output_dir": folder, "a": role,
                  "tp": {**role, "worker_cls": f"{here.stem}.TPBenchWorker"},
                  "rounds": args.rounds, "ray": not args.no_ray}  # fmt: skip
        return start_job(config, RANKS + 1)


if __name__ == "__main__":
    sys.exit(main())
