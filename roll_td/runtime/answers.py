"""A rank's answers: a result as a head and bytes, and the bytes until they have arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from roll_td.protocol import TOKEN_COLUMNS, DataProto
from roll_td.runtime.batches import Batch
from roll_td.runtime.parcel import Spec, places_of
from roll_td.runtime.transport import Group, Transport, Work
from roll_td.runtime.wire import Place, dumps, dumps_whole, find_unpicklable, memory_of

OUTBOX_BYTES = 1024**3
"""Bytes of unfetched answers beyond which a rank starts no further command."""

Lengths = np.ndarray[Any, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Doing:
    """What a thread of the rank is doing, for an error report."""

    role: str
    worker: int | None
    method: str


@dataclass
class Unfetched:
    """An answer's buffers, kept until they have arrived."""

    buffers: list[torch.Tensor]
    shared: list[bool]
    """Whether the worker may still write into the buffer."""
    group: Group
    works: list[Work] | None = None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(b.numel() for b in self.buffers)


class Outbox:
    """Answers that the driver has not got yet, by command. Its user holds a lock."""

    def __init__(self, transport: Transport, driver_rank: int):
        self._transport, self._driver_rank = transport, driver_rank
        self._answers: dict[int, Unfetched] = {}

    def put(self, number: int, answer: Unfetched) -> None:
        self._answers[number] = answer

    def send(self, number: int) -> None:
        """The driver waits for the bytes: send them."""
        answer, tag = self._answers[number], number & 0x7FFFFFFF
        answer.works = [
            self._transport.isend(b, self._driver_rank, answer.group, tag) for b in answer.buffers
        ]

    def free(self, number: int) -> None:
        """The bytes have arrived."""
        for work in self._answers.pop(number).works or ():
            work.wait()

    @property
    def is_ready(self) -> bool:
        """Whether the next command may start: no bytes are under way that a worker may still write
        into, and there are not too many."""
        answers = self._answers.values()
        if any([a.works is not None and any(a.shared) for a in answers]):
            return False
        return sum([a.nbytes for a in answers]) <= OUTBOX_BYTES

    def settle(self) -> None:
        """Copy what a worker may still write into, so that an answer stays as it was given."""
        for answer in self._answers.values():
            if answer.works is None and any(answer.shared):
                pairs = zip(answer.buffers, answer.shared, strict=True)
                answer.buffers = [b.clone() if shared else b for b, shared in pairs]
                answer.shared = [False] * len(answer.buffers)


@dataclass
class Given:
    """What of an argument says how long the rows of the result are."""

    lengths: Lengths | None
    width: int | None
    """T of its token columns."""

    @classmethod
    def of(cls, data: DataProto) -> Given:
        tensors = data.tensors()
        width = _width(tensors) if "lengths" in tensors else None
        return cls(None if width is None else tensors["lengths"].numpy().copy(), width)

    def lengths_for(self, result: DataProto) -> Lengths | None:
        """The lengths, if the result has the same rows; other widths are other tokens."""
        if self.lengths is None or len(self.lengths) != len(result):
            return None
        return self.lengths if _width(result.tensors()) == self.width else None


def _width(tensors: dict[str, torch.Tensor]) -> int | None:
    """T of the token columns; None where there are none, or they differ."""
    widths = {t.shape[1] for n, t in tensors.items() if n in TOKEN_COLUMNS and t.dim() >= 2}
    return int(widths.pop()) if len(widths) == 1 else None


def dump_result(dump: Callable[[Any], T], value: Any, whole: Any, doing: Doing) -> T:
    """`dump` of a part of the result `whole`; a TypeError that names what can't be pickled."""
    try:
        return dump(value)
    except Exception as error:  # pickling runs the code of whatever is in the value
        raise TypeError(
            f"{doing.role}.{doing.method} (worker {doing.worker}) gave what can't be sent to the "
            f"driver: {find_unpicklable(whole, 'result')}: {error}. Give plain data; keep locks, "
            "files and functions in the worker"
        ) from error


@dataclass
class Encoded:
    """A result, ready to travel."""

    kind: str
    spec: Spec
    inline: list[memoryview]
    sent: list[torch.Tensor]
    shared: list[bool]
    """Of each of `sent`, whether the worker may still write into it."""


def encode(result: Any, given: Given, doing: Doing, room: int) -> Encoded:
    """A result as what an ANSWER carries; it carries all buffers if they have at most `room` bytes.
    Copies only what is packed or not in main memory."""
    if isinstance(result, DataProto):
        if not all([t.is_cpu for t in result.tensors().values()]):
            result = result.to("cpu")
        batch = Batch(result, given.lengths_for(result))
        lengths = None
        if any([c.packed for c in batch.columns]) and "lengths" not in batch.tensors:
            lengths = np.asarray(batch.lengths, dtype=np.int64)
        beside = (result.non_tensor_batch, result.meta_info, lengths)
        has_rest = result.non_tensor_batch or result.meta_info or lengths is not None
        rest = dump_result(dumps_whole, beside, result, doing) if has_rest else b""
        arrays = [batch.piece(i, slice(None)) for i in range(len(batch.columns))]
        views = batch.in_place
        kind, columns, num_rows = "batch", tuple(batch.columns), batch.num_rows
    else:
        rest, arrays, _ = dump_result(dumps, result, result, doing)
        views = [True] * len(arrays)
        kind, columns, num_rows = "value", (), 0
    sizes = tuple([a.nbytes for a in arrays])
    in_message = sum(sizes) <= room
    places = places_of(sizes, in_message)
    inline = [memory_of(a) for a, p in zip(arrays, places, strict=True) if p is Place.INLINE]
    sent = [i for i, place in enumerate(places) if place is Place.SENT]
    spec = Spec(columns, num_rows, sizes, in_message, rest)
    buffers = [torch.from_numpy(arrays[i]) for i in sent]
    return Encoded(kind, spec, inline, buffers, [views[i] for i in sent])
