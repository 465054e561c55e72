"""What comes to a rank with a command: parcels, as posted receives and then as arguments."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import torch

from roll_td.protocol import DataProto
from roll_td.runtime.control import Frame, Kind, Sender
from roll_td.runtime.parcel import Parcel, Slot
from roll_td.runtime.transport import Ranks, Transport, Work
from roll_td.runtime.wire import Place, load_objects, loads, rebuild_tensors

_EMPTY = torch.empty(0, dtype=torch.uint8)


class Command:
    """A queued command; unpickled when it is looked at, by whichever thread is first."""

    def __init__(self, frame: Frame):
        self.frame, self.received = frame, time.time()
        self._lock = threading.Lock()
        self._loaded: tuple[int, str, dict[str, Any], list[Parcel]] | None = None

    def load(self) -> tuple[int, str, dict[str, Any], list[Parcel]]:
        with self._lock:
            if self._loaded is None:
                number, op, body = self.frame.load()
                parcels = pickle.loads(self.frame.own) if len(self.frame.own) else []
                self._loaded = number, op, body, parcels
            return self._loaded


class Arrivals:
    """The parcels of one call. Making one takes the inline bytes, posts the receives of what
    the driver sends to this rank, and tells it so."""

    def __init__(
        self,
        command: Command,
        transport: Transport,
        link: Sender,
        driver_rank: int,
        group: Ranks,
    ):
        number, _, _, parcels = command.load()
        self.number, self.parcels, self._link = number, parcels, link
        self.buffers: list[list[torch.Tensor]] = []
        self._works: list[list[Work]] = []
        self.waiter: threading.Thread | None = None
        """Waits for the bytes where the main thread is busy."""
        offset = 0
        for index, parcel in enumerate(parcels):
            buffers, works = [], []
            is_first = parcel.receivers[0] == transport.rank
            for size, place in zip(parcel.sizes, parcel.places, strict=True):
                if place is Place.INLINE:
                    raw = bytearray(command.frame.inline[offset : offset + size])
                    buffers.append(torch.frombuffer(raw, dtype=torch.uint8) if size else _EMPTY)
                    offset += size
                    continue
                into = torch.empty(size, dtype=torch.uint8)
                buffers.append(into)
                if is_first:
                    tag = number & 0x7FFFFFFF
                    works.append(transport.irecv(into, driver_rank, group, tag))
            if works:
                link.send(Kind.READY, pickle.dumps((number, index), 5))
            self.buffers.append(buffers)
            self._works.append(works)

    def wait(self) -> None:
        """Wait for the driver's bytes and acknowledge them. Nothing else may be waited for
        before: the driver holds back bytes for other ranks until it hears of these."""
        for index, works in enumerate(self._works):
            for work in works:
                work.wait()
            if works:
                self._link.send(Kind.ACK, pickle.dumps((self.number, index), 5))

    def shared(self) -> list[tuple[int, Parcel, list[torch.Tensor]]]:
        """(index, parcel, sent buffers) of what the first receiver passes on to others."""
        found = []
        for index, (parcel, buffers) in enumerate(zip(self.parcels, self.buffers, strict=True)):
            pairs = zip(buffers, parcel.places, strict=True)
            sent = [b for b, place in pairs if place is Place.SENT]
            if sent and len(parcel.receivers) > 1:
                found.append((index, parcel, sent))
        return found

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], list[DataProto]]:
        """args, kwargs, and the DataProtos among them that came as parcels."""
        slots: dict[int, DataProto] = {}
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        for parcel, buffers in zip(self.parcels, self.buffers, strict=True):
            if parcel.slot is None:
                args, kwargs = loads(parcel.rest, buffers)
                continue
            tensors = rebuild_tensors(parcel.columns, buffers, parcel.num_rows)
            objects, meta = pickle.loads(parcel.rest)
            data: Any = DataProto(tensors or None, load_objects(objects), meta)
            data.plan = parcel.plan
            slots[parcel.slot] = data

        def fill(value: Any) -> Any:
            return slots[value.index] if isinstance(value, Slot) else value

        filled = tuple(fill(a) for a in args), {k: fill(v) for k, v in kwargs.items()}
        return *filled, [slots[i] for i in sorted(slots)]
