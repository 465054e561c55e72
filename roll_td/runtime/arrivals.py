"""What comes to a rank with a command: parcels, as posted receives and then as arguments."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import torch

from roll_td.protocol import DataProto
from roll_td.runtime.batches import rebuild_tensors
from roll_td.runtime.control import Frame, Kind, Sender
from roll_td.runtime.parcel import Parcel, Share, Slot
from roll_td.runtime.transport import Group, Transport, Work
from roll_td.runtime.wire import Buffer, Place, loads, loads_whole, memory_of, table


class Command:
    """A queued command; unpickled when it is first looked at. Whoever looks holds the lock of the
    queue, or has taken it off."""

    def __init__(self, frame: Frame):
        self.frame, self.received = frame, time.time()
        self._loaded: tuple[int, str, dict[str, Any]] | None = None

    def load(self) -> tuple[int, str, dict[str, Any]]:
        """Number, kind and body."""
        if self._loaded is None:
            self._loaded = self.frame.load()
        return self._loaded

    def shares(self) -> list[Share]:
        """What this rank gets of each parcel of a call."""
        return [Share(*share) for share in pickle.loads(self.frame.own)] if self.frame.own else []


class Arrivals:
    """The parcels of one call. Making one takes the inline bytes, and posts the receives of what
    the driver sends to this rank."""

    def __init__(
        self,
        command: Command,
        transport: Transport,
        link: Sender,
        driver_rank: int,
        group: Group,
    ):
        self.number, _, body = command.load()
        self.parcels: tuple[Parcel, ...] = body["parcels"]
        self.shares = command.shares()
        self.buffers: list[list[Buffer]] = []
        self._link, self._works = link, list[list[Work]]()
        self.waiter: threading.Thread | None = None
        """Waits for the bytes where the main thread is busy and some come by the transport."""
        inline, tag = iter(command.frame.inline), self.number & 0x7FFFFFFF
        command.frame.inline = []  # a column lives no longer than it is wanted
        for share in self.shares:
            buffers: list[Buffer] = []
            works: list[Work] = []
            for size, place in zip(share.sizes, share.places, strict=True):
                if place is Place.INLINE:
                    buffers.append(next(inline))
                    continue
                into = torch.empty(size, dtype=torch.uint8)
                buffers.append(into)
                if share.source == transport.rank:
                    works.append(transport.irecv(into, driver_rank, group, tag))
            self.buffers.append(buffers)
            self._works.append(works)

    @property
    def are_awaited(self) -> bool:
        """Whether some bytes come by the transport: `wait` waits for these alone."""
        return any(self._works)

    def wait(self) -> None:
        """Ask for the driver's bytes, wait for them and acknowledge them. Nothing else may be
        waited for before: the driver holds back bytes for other ranks until it hears of these. Not
        for the reader thread, which sends nothing: it could wait for a driver that waits for it."""
        told = [i for i, share in enumerate(self.shares) if self._works[i] and not share.at_once]
        for index in told:
            self._link.send(Kind.READY, pickle.dumps((self.number, index), 5))
        for index, works in enumerate(self._works):
            for work in works:
                work.wait()
            if index in told:
                self._link.send(Kind.ACK, pickle.dumps((self.number, index), 5))

    def shared(self) -> list[tuple[int, Share, list[torch.Tensor]]]:
        """(index, share, sent buffers) of what its source passes on to others."""
        found = []
        for index, (share, buffers) in enumerate(zip(self.shares, self.buffers, strict=True)):
            if share.copies > 1 and share.is_sent:
                sent = [b for b in buffers if isinstance(b, torch.Tensor)]
                found.append((index, share, sent))
        return found

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], list[DataProto]]:
        """args, kwargs, and the DataProtos among them that came as parcels."""
        *parcels, plain = self.parcels
        slots = list(zip(parcels, self.shares, self.buffers, strict=False))
        batches: list[DataProto] = []
        buffers = self.buffers[len(parcels)] if len(self.buffers) > len(parcels) else []
        args, kwargs = loads(plain.rest or memory_of(buffers.pop()), buffers)

        def fill(value: Any) -> Any:
            if not isinstance(value, Slot):
                return value
            batches.append(_batch(*slots[value.number]))  # given twice: it comes once, and is two
            return batches[-1]

        return tuple(fill(a) for a in args), {k: fill(v) for k, v in kwargs.items()}, batches


def _batch(parcel: Parcel, share: Share, buffers: list[Buffer]) -> DataProto:
    count = len(parcel.columns)
    tensors = rebuild_tensors(parcel.columns, buffers[:count], share.num_rows)
    objects = loads_whole(memory_of(buffers[count])) if len(buffers) > count else {}
    batch = table(tensors, objects, share.num_rows)
    meta_info = pickle.loads(parcel.rest) if parcel.rest else {}
    data: Any = DataProto(batch, objects, meta_info)
    data.plan = share.plan
    return data  # type: ignore[no-any-return]
