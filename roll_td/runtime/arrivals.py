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
from roll_td.runtime.wire import Place, loads, loads_whole, memory_of, owned, table


class Command:
    """A queued command; unpickled when it is looked at, by whichever thread is first."""

    def __init__(self, frame: Frame):
        self.frame, self.received = frame, time.time()
        self._lock = threading.Lock()
        self._loaded: tuple[int, str, dict[str, Any]] | None = None

    def load(self) -> tuple[int, str, dict[str, Any]]:
        """Number, kind and body."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self.frame.load()
            return self._loaded

    def shares(self) -> list[Share]:
        """What this rank gets of each parcel of a call."""
        return [Share(*share) for share in pickle.loads(self.frame.own)]


class Arrivals:
    """The parcels of one call. Making one takes the inline bytes, posts the receives of what
    the driver sends to this rank, and tells it so."""

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
        self.buffers: list[list[torch.Tensor]] = []
        self._link, self._works = link, list[list[Work]]()
        self.waiter: threading.Thread | None = None
        """Waits for the bytes where the main thread is busy."""
        offset, tag = 0, self.number & 0x7FFFFFFF
        for index, share in enumerate(self.shares):
            buffers, works = [], []
            for size, place in zip(share.sizes, share.places, strict=True):
                if place is Place.INLINE:
                    buffers.append(owned(command.frame.inline[offset : offset + size]))
                    offset += size
                    continue
                into = torch.empty(size, dtype=torch.uint8)
                buffers.append(into)
                if share.source == transport.rank:
                    works.append(transport.irecv(into, driver_rank, group, tag))
            if works and not share.at_once:
                link.send(Kind.READY, pickle.dumps((self.number, index), 5))
            self.buffers.append(buffers)
            self._works.append(works)

    def wait(self) -> None:
        """Wait for the driver's bytes and acknowledge them. Nothing else may be waited for
        before: the driver holds back bytes for other ranks until it hears of these."""
        for index, (share, works) in enumerate(zip(self.shares, self._works, strict=True)):
            for work in works:
                work.wait()
            if works and not share.at_once:
                self._link.send(Kind.ACK, pickle.dumps((self.number, index), 5))

    def shared(self) -> list[tuple[int, Share, list[torch.Tensor]]]:
        """(index, share, sent buffers) of what its source passes on to others."""
        found = []
        for index, (share, buffers) in enumerate(zip(self.shares, self.buffers, strict=True)):
            pairs = zip(buffers, share.places, strict=True)
            sent = [b for b, place in pairs if place is Place.SENT]
            if sent and share.copies > 1:
                found.append((index, share, sent))
        return found

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], list[DataProto]]:
        """args, kwargs, and the DataProtos among them that came as parcels."""
        slots: dict[int, tuple[Parcel, Share, list[torch.Tensor]]] = {}
        batches: list[DataProto] = []
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        for parcel, share, buffers in zip(self.parcels, self.shares, self.buffers, strict=True):
            if parcel.slot is not None:
                slots[parcel.slot] = parcel, share, buffers
            else:
                skeleton = parcel.rest or memory_of(buffers.pop().numpy())
                args, kwargs = loads(skeleton, buffers)

        def fill(value: Any) -> Any:
            if not isinstance(value, Slot):
                return value
            batches.append(_batch(*slots[value.index]))  # given twice: it comes once, and is two
            return batches[-1]

        return tuple(fill(a) for a in args), {k: fill(v) for k, v in kwargs.items()}, batches


def _batch(parcel: Parcel, share: Share, buffers: list[torch.Tensor]) -> DataProto:
    count = len(parcel.columns)
    tensors = rebuild_tensors(parcel.columns, buffers[:count], share.num_rows)
    objects = loads_whole(memory_of(buffers[count].numpy())) if len(buffers) > count else {}
    batch = table(tensors, objects, share.num_rows)
    data: Any = DataProto(batch, objects, pickle.loads(parcel.rest))
    data.plan = share.plan
    return data  # type: ignore[no-any-return]
