"""Weight updates: the driver's side, and what runs on the ranks of source and target.

    pair = Pair(actor_train, actor_infer, ModelUpdateConfig())
    print(pair.plan)
    pair.update(version=1)  # → metrics; the target has the source's weights

On the ranks packing, sending and loading overlap: while one bucket is under way, its owner fills
another one and a receiver loads the one before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roll_td.config.model_update import ModelUpdateConfig
from roll_td.metrics import Last, Metric, Sum
from roll_td.runtime.cluster import Cluster
from roll_td.runtime.refs import Refs
from roll_td.runtime.together import Here, call_together, homes, make_groups
from roll_td.runtime.transport import Group, Work
from roll_td.strategies.parts import Part, Weight
from roll_td.weights.plan import Bucket, UpdatePlan, make_plan

SOURCE = ("setup_model_update", "model_update")
TARGET = ("setup_model_update", "update_parameter_in_bucket", "process_weights_after_loading")
"""What a strategy needs to be one."""
DEPTH = 2
"""Buckets in memory on each rank that sends or receives."""


class Pair:
    """A role that gives weights and one that takes them."""

    def __init__(self, source: Cluster, target: Cluster, config: ModelUpdateConfig) -> None:
        """Plans the updates. Blocks, and both roles' workers have to be initialised.

        ValueError for strategies that can't, and models that don't fit each other.
        """
        if source.name == target.name:
            raise ValueError(f"{source.name} can't get its weights from itself; name two roles")
        self.source, self.target, self.config = source, target, config
        self.version = 0
        """Of the target's weights: 0 are those that it was made with."""
        names = {"source": source.name, "target": target.name}
        adapters = _takes_adapters(target)
        found = self._call(
            "look_at_weights", **names, verify=config.verify, adapters=adapters
        ).get()
        given = found[0].tables[source.name]
        wanted = next(f.tables[target.name] for f in found if target.name in f.tables)
        # a CPU and a GPU meet in main memory
        self._on_host = any(f.device_type == "cpu" for f in found)
        ranks = homes([source]), homes([target])
        size_mb = config.bucket_mb
        self.plan = make_plan(
            source.name, target.name, ranks, given, wanted or given, size_mb, adapters
        )
        timeout_s = max(source.worker_config.timeout_s, target.worker_config.timeout_s)
        self._groups = {
            owner: Group((owner, *self.plan.receivers), timeout_s) for owner in self.plan.owners
        }
        make_groups(list(self._groups.values()))

    def update(self, version: int) -> dict[str, Metric]:
        """Give the target the source's weights, as this version. Blocks.

        Returns weights/TARGET/megabytes (the target's weights once) and version, and how long it
        took as time/weights_TARGET_s. ValueError if config.verify finds a weight that differs.
        """
        return self.begin(version)()

    def begin(self, version: int) -> Callable[[], dict[str, Metric]]:
        """As `update`, but returns at once: a function that waits for the end."""
        arguments = {"plan": self.plan, "groups": self._groups, "on_host": self._on_host}
        taken = self._call("update_weights", **arguments, version=version)
        verify = self.config.verify
        sums = self._call("checksum_weights", plan=self.plan) if verify else None
        self.version = version
        return partial(self._end, version, taken, sums)

    def _end(self, version: int, taken: Refs, sums: Refs | None) -> dict[str, Metric]:
        seconds = max(taken.get())
        if sums is not None:
            self._verify(version, sums.get())
        name = self.target.name
        return {
            f"weights/{name}/megabytes": Last(self.plan.nbytes / 1e6),
            f"weights/{name}/version": Last(version),
            f"time/weights_{name}_s": Sum(seconds),
        }

    def _verify(self, version: int, sums: Sequence[dict[str, dict[str, int]]]) -> None:
        want = sums[0][self.source.name]
        for rank, found in zip(homes([self.source, self.target]), sums, strict=True):
            got = found.get(self.target.name, {})
            if wrong := [name for name in got if got[name] != want[name]]:
                raise ValueError(
                    f"update {version} from {self.source.name} to {self.target.name}: on rank "
                    f"{rank} {len(wrong)} of {len(got)} weights are not the source's: {wrong[:4]}"
                )

    def _call(self, function: str, **arguments: Any) -> Refs:
        """A call of a function of this module on each rank, in the order of `homes`."""
        clusters, name = [self.source, self.target], f"{__name__}.{function}"
        refs: Refs = call_together(clusters, name, blocking=False, **arguments)
        return refs


def _takes_adapters(target: Cluster) -> bool:
    """Whether its strategy puts the source's adapters on weights that it has."""
    args = target.worker_config.strategy_args
    return args is not None and getattr(args.settings, "lora", "merged") == "adapters"


# On the ranks


class Found(NamedTuple):
    """What a rank has of an update's two sides."""

    tables: dict[str, dict[str, Weight] | None]
    """Role → what setup_model_update says; of worker 0 of each role only."""
    device_type: str


def look_at_weights(here: Here, source: str, target: str, verify: bool, adapters: bool) -> Found:
    """Look at the weights of both sides, or the source's adapters. ValueError if a strategy isn't
    there, or can't."""
    tables = {}
    wanted = (*TARGET, "full_parameters") if verify else TARGET
    for role, methods in ((source, SOURCE), (target, wanted)):
        if role not in here.workers:
            continue
        worker = here.workers[role]
        if worker.strategy is None:
            raise ValueError(
                f"role {role} has no strategy yet; call initialize(pipeline_config) of both "
                "clusters before they are paired"
            )
        if missing := [name for name in methods if not hasattr(worker.strategy, name)]:
            strategy = worker.worker_config.strategy_args.strategy_name
            raise ValueError(
                f"role {role}: {strategy} has no {' and no '.join(missing)}, so weights can't go "
                f"from {source} to {target}{' with verify' if verify else ''}; give it another "
                "strategy"
            )
        of_adapters = {"adapters": True} if adapters and role == source else {}
        table = worker.strategy.setup_model_update(**of_adapters)
        if worker.rank == 0:
            tables[role] = table
    device = next(iter(here.workers.values())).device
    return Found(tables, device.type)


def update_weights(
    here: Here, plan: UpdatePlan, groups: Mapping[int, Group], on_host: bool, version: int
) -> float:
    """This rank's part of an update; gives the seconds that it took."""
    began = time.monotonic()
    device = next(iter(here.workers.values())).device
    source, target = here.workers.get(plan.source), here.workers.get(plan.target)
    wire = _Wire(here, plan, groups, torch.device("cpu") if on_host else device)
    if source is not None:
        _give(source.strategy, None if target is None else target.strategy, plan, wire)
    elif target is not None:
        for parts in wire.receive():
            target.strategy.update_parameter_in_bucket(parts)
    if target is not None:
        target.strategy.process_weights_after_loading(version)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.monotonic() - began


def _give(source: Any, target: Any, plan: UpdatePlan, wire: _Wire) -> None:
    for bucket, parts in zip(plan.buckets, source.model_update(plan), strict=True):
        if wire.sends(bucket):
            wire.send(bucket, parts)
        if target is not None:
            target.update_parameter_in_bucket(parts)
    wire.flush()


class _Wire:
    """Buckets between this rank and others, DEPTH of them in memory."""

    def __init__(
        self, here: Here, plan: UpdatePlan, groups: Mapping[int, Group], device: torch.device
    ) -> None:
        self._here, self._plan, self._groups, self._device = here, plan, groups, device
        self._under_way: deque[tuple[Bucket, Tensor, Work]] = deque()

    def sends(self, bucket: Bucket) -> bool:
        """Whether this rank has to send it."""
        return bucket.owner == self._here.rank and bool(self._plan.receivers)

    def send(self, bucket: Bucket, parts: Sequence[Part]) -> None:
        """Pack parts, in the target's dtypes, and start to send them."""
        buffer = self._empty() if len(self._under_way) < DEPTH else self._sent()
        for packed, part in zip(_parts(bucket, buffer), parts, strict=True):
            packed.values.copy_(part.values)
        self._start(bucket, buffer)

    def flush(self) -> None:
        """Wait until all is sent."""
        while self._under_way:
            self._sent()

    def receive(self) -> Iterator[list[Part]]:
        """The parts of each bucket; their values are overwritten after the next one is asked
        for."""
        waiting = iter(self._plan.buckets)
        for bucket in islice(waiting, DEPTH):
            self._start(bucket, self._empty())
        while self._under_way:
            bucket, buffer, work = self._under_way.popleft()
            work.wait()
            yield _parts(bucket, buffer)
            for following in islice(waiting, 1):
                self._start(following, buffer)

    def _empty(self) -> Tensor:
        return torch.empty(self._plan.bucket_bytes, dtype=torch.uint8, device=self._device)

    def _start(self, bucket: Bucket, buffer: Tensor) -> None:
        transport, group = self._here.transport, self._groups[bucket.owner]
        work = transport.broadcast(buffer[: bucket.nbytes], bucket.owner, group)
        self._under_way.append((bucket, buffer, work))

    def _sent(self) -> Tensor:
        """The buffer that was sent first, when it has gone."""
        _, buffer, work = self._under_way.popleft()
        work.wait()
        return buffer


def _parts(bucket: Bucket, buffer: Tensor) -> list[Part]:
    """The parts of a bucket, in its bytes."""
    found = []
    for piece in bucket.pieces:
        end = piece.offset + piece.count * piece.dtype.itemsize
        values = buffer[piece.offset : end].view(piece.dtype)
        found.append(Part(piece.name, piece.shape, piece.start, values))
    return found


def checksum_weights(here: Here, plan: UpdatePlan) -> dict[str, dict[str, int]]:
    """Role → checksums of its weights by name, in the target's dtype; of the source on its worker 0
    alone."""
    found: dict[str, dict[str, int]] = {}
    for role in (plan.source, plan.target):
        if role not in here.workers:
            continue
        worker = here.workers[role]
        of_adapters = plan.adapters and role == plan.source
        given = "adapter_parameters" if of_adapters else "full_parameters"
        weights = getattr(worker.strategy, given)()
        if role == plan.source and worker.rank != 0:
            deque(weights, maxlen=0)  # they gather together
        else:
            found[role] = {n: checksum(w.to(plan.weights[n].dtype)) for n, w in weights}
    return found


def checksum(tensor: Tensor) -> int:
    """The sum of the tensor's bits times their position, modulo 2^64: it changes with any number,
    and with any two that change places."""
    numbers = tensor.reshape(-1).view(torch.uint8)
    if len(numbers) % 4 == 0:
        numbers = numbers.view(torch.int32)
    total = 0
    for start in range(0, len(numbers), CHUNK):
        chunk = numbers[start : start + CHUNK].to(torch.int64)
        at = torch.arange(start + 1, start + 1 + len(chunk), device=chunk.device)
        total += int((chunk * at).sum())
    return total % 2**64


CHUNK = 1 << 20
"""Numbers at once: a checksum takes so many times 24 bytes of memory."""
