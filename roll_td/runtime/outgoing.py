"""The driver's sending side: which bytes of a call go where, and when.

A parcel is sent when its first receiver has said that it is ready, straight from the batch.
Where sending needs a copy (packed or permuted rows) the copies in flight are bounded.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from roll_td.plan import LocalPlan
from roll_td.protocol import DataProto
from roll_td.runtime.control import Chunk
from roll_td.runtime.parcel import Parcel
from roll_td.runtime.transport import Ranks, Transport, Work
from roll_td.runtime.wire import INLINE_BYTES, Batch, Place, Rows, as_bytes, memory_of

COPY_BUDGET_BYTES = 16 * 1024 * 1024
"""Copies in flight; one larger parcel may exceed it alone."""

Key = tuple[int, int]
Take = Callable[[int], torch.Tensor]


@dataclass
class Outgoing:
    """A parcel with the bytes behind it."""

    parcel: Parcel
    take: Take
    copies: bool

    @property
    def head(self) -> Parcel:
        """What a receiver is told: who the others are only where bytes fan out to them."""
        if self.parcel.fan_out:
            return self.parcel
        return replace(self.parcel, receivers=self.parcel.receivers[:1])

    def inline(self) -> list[Chunk]:
        """The bytes that travel in the control message."""
        return [
            memory_of(self.take(i))
            for i, place in enumerate(self.parcel.places)
            if place is Place.INLINE and self.parcel.sizes[i]
        ]


def places_of(sizes: Sequence[int], receivers: Ranks) -> tuple[Place, ...]:
    """Small buffers go inline; those for several ranks don't, so that nothing is sent twice."""
    several = len(receivers) > 1
    return tuple(
        Place.SENT if size and (several or size >= INLINE_BYTES) else Place.INLINE for size in sizes
    )


def batch_parcel(
    slot: int,
    batch: Batch,
    meta: dict[str, Any],
    rows: Rows,
    receivers: Ranks,
    fan_out: Ranks | None,
    plan: LocalPlan | None,
) -> Outgoing:
    """A shard of a DataProto argument."""
    sizes = tuple(batch.nbytes(rows))
    rest = pickle.dumps((batch.object_bytes(rows), meta), 5)
    places = places_of(sizes, receivers)
    parcel = Parcel(
        slot, receivers, _fan(fan_out, receivers, places), tuple(batch.columns),
        batch.size_of(rows)[0], sizes, places, rest, plan,
    )  # fmt: skip
    return Outgoing(parcel, batch.take(rows), batch.copies(rows))


def value_parcel(
    skeleton: bytes, buffers: Sequence[torch.Tensor], receivers: Ranks, fan_out: Ranks | None
) -> Outgoing:
    """The plain arguments of a call: a skeleton, and the tensors in it."""
    sizes = tuple(b.numel() * b.element_size() for b in buffers)
    places = places_of(sizes, receivers)
    fan = _fan(fan_out, receivers, places)
    parcel = Parcel(None, receivers, fan, (), 0, sizes, places, skeleton)
    return Outgoing(parcel, lambda i: as_bytes(buffers[i]), False)


def _fan(group: Ranks | None, receivers: Ranks, places: Sequence[Place]) -> Ranks | None:
    """A group is needed only where there are bytes to fan out."""
    return group if len(receivers) > 1 and Place.SENT in places else None


def strip_metrics(data: DataProto) -> dict[str, Any]:
    """What of meta_info goes to every shard: not the metrics, which would come back n-fold."""
    return {k: v for k, v in data.meta_info.items() if k != "metrics"}


class Sending:
    """Parcels offered, ready, in flight. Offered by the driver, moved by its io thread."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self._offered: dict[Key, tuple[Outgoing, Ranks]] = {}
        self._ready: deque[Key] = deque()
        self._flying: dict[Key, tuple[list[Work], list[torch.Tensor], int]] = {}
        self._copied = 0
        self.bytes_sent = 0

    def offer(self, key: Key, outgoing: Outgoing, group: Ranks) -> None:
        """Keep the parcel until its receiver has it."""
        self._offered[key] = (outgoing, group)

    def ready(self, key: Key) -> None:
        """The receiver waits for it."""
        self._ready.append(key)
        self._pump()

    def arrived(self, key: Key) -> None:
        """The receiver has it: free it."""
        works, _, cost = self._flying.pop(key, ([], [], 0))
        for work in works:
            work.wait()
        self._offered.pop(key, None)
        self._copied -= cost
        self._pump()

    def _pump(self) -> None:
        while self._ready:
            outgoing, group = self._offered[self._ready[0]]
            cost = sum(outgoing.parcel.sizes) if outgoing.copies else 0
            if self._copied and self._copied + cost > COPY_BUDGET_BYTES:
                return
            key = self._ready.popleft()
            self._copied += cost
            parcel = outgoing.parcel
            indices = [i for i, p in enumerate(parcel.places) if p is Place.SENT]
            buffers, works = [], []
            for i in indices:
                data = outgoing.take(i)
                assert data.numel() == parcel.sizes[i], "a parcel's bytes differ from its head"
                buffers.append(data)
                tag = key[0] & 0x7FFFFFFF
                works.append(self._transport.isend(data, parcel.receivers[0], group, tag))
                self.bytes_sent += data.numel()
            self._flying[key] = (works, buffers, cost)
