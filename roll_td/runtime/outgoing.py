"""The driver's sending side: which bytes of a call go where, and when.

A share goes in the control message if it is small, or not large and its source has nothing else to
do. Else it is sent straight from the batch when its source has said that it is ready, or at once if
that has nothing else to do. Where sending needs a copy (packed or permuted rows) the copies in
flight are bounded.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from roll_td.plan import LocalPlan
from roll_td.protocol import DataProto
from roll_td.runtime.batches import Batch, Rows
from roll_td.runtime.control import Chunk
from roll_td.runtime.parcel import Share
from roll_td.runtime.transport import Group, Ranks, Transport, Work
from roll_td.runtime.wire import Array, Dumped, Place, Watch, memory_of

COPY_BUDGET_BYTES = 16 * 1024 * 1024
"""Copies in flight; one larger parcel may exceed it alone."""

Key = tuple[int, int]


@dataclass
class Outgoing:
    """A share with the bytes behind it."""

    share: Share
    receivers: Ranks
    """Global ranks that get it, the source first."""
    piece: Callable[[int], Array]
    """The bytes of a buffer, uint8 (nbytes,)."""
    copies: bool
    """Whether `piece` makes a copy."""
    watch: Watch
    """Over what is sent."""

    def inline(self, places: Sequence[Place]) -> list[Chunk]:
        """The buffers that travel in the control message, of those in these places."""
        return [memory_of(self.piece(i)) for i, p in enumerate(places) if p is Place.INLINE]


@dataclass(frozen=True)
class Way:
    """To whom the same goes."""

    receivers: Ranks
    """Global ranks; the first gets the bytes from the driver, the rest from the first."""
    group: str | None
    """The role's group that they are, by name; None for a single one."""


def batch_share(batch: Batch, rows: Rows, way: Way, plan: LocalPlan | None) -> Outgoing:
    """A shard of a DataProto argument."""
    num_rows, sizes = batch.nbytes(rows)
    piece = partial(batch.piece, rows=rows)
    if batch.objects:
        objects = _array(batch.object_bytes(rows))
        sizes.append(objects.nbytes)
        piece = partial(_piece_or_last, piece, len(sizes) - 1, objects)
    share = _share(num_rows, sizes, way, plan)
    return Outgoing(share, way.receivers, piece, batch.copies(rows), batch.watch)


def _piece_or_last(piece: Callable[[int], Array], last: int, array: Array, i: int) -> Array:
    return array if i == last else piece(i)


def value_share(value: Dumped, way: Way) -> Outgoing:
    """Plain arguments; an empty skeleton is one that the parcel has."""
    arrays = [*value.buffers, *([_array(value.skeleton)] if value.skeleton else [])]
    watch = Watch("tensor {} of the arguments", dict(enumerate(value.tensors)))
    share = _share(0, [a.nbytes for a in arrays], way, None)
    return Outgoing(share, way.receivers, arrays.__getitem__, False, watch)


def _share(num_rows: int, sizes: list[int], way: Way, plan: LocalPlan | None) -> Share:
    first = way.receivers[0]
    return Share(num_rows, tuple(sizes), len(way.receivers), first, way.group, plan)


def _array(data: bytes) -> Array:
    return np.frombuffer(bytearray(data), dtype=np.uint8)


def strip_metrics(data: DataProto) -> dict[str, Any]:
    """What of meta_info goes to every shard: not the metrics, which would come back n-fold."""
    return {k: v for k, v in data.meta_info.items() if k != "metrics"}


class Sending:
    """Shares offered, ready, in flight. Called by the driver's thread and its io thread."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self._lock = threading.RLock()
        self._offered: dict[Key, tuple[Outgoing, Group]] = {}
        self._ready: deque[Key] = deque()
        self._flying: dict[Key, tuple[list[Work], int]] = {}
        self._copied = 0
        self.bytes_sent = 0

    def offer(self, key: Key, outgoing: Outgoing, group: Group) -> None:
        """Keep the share until its source has it."""
        with self._lock:
            self._offered[key] = (outgoing, group)

    def ready(self, key: Key) -> None:
        """The source waits for it."""
        with self._lock:
            self._ready.append(key)
            self._pump()

    def arrived(self, key: Key) -> None:
        """The source has it: free it."""
        with self._lock:
            works, cost = self._flying.pop(key)
            for work in works:
                work.wait()
            del self._offered[key]
            self._copied -= cost
            self._pump()

    def _pump(self) -> None:
        while self._ready:
            outgoing, group = self._offered[self._ready[0]]
            share = outgoing.share
            cost = sum(share.sizes) if outgoing.copies else 0
            if self._copied and self._copied + cost > COPY_BUDGET_BYTES:
                return
            key = self._ready.popleft()
            self._copied += cost
            works = []
            for i, place in enumerate(share.places):
                if place is not Place.SENT:
                    continue
                data = torch.from_numpy(outgoing.piece(i))
                assert data.numel() == share.sizes[i], "a share's bytes differ from its head"
                tag = key[0] & 0x7FFFFFFF
                works.append(self._transport.isend(data, share.source, group, tag))
                self.bytes_sent += data.numel()
            self._flying[key] = (works, cost)
