"""The driver's receiving side: answers of the workers, straight into the batch they form."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch

from roll_td.protocol import DataProto
from roll_td.runtime.transport import Ranks, Transport, Work
from roll_td.runtime.wire import Column, Place, as_bytes, from_bytes, loads, unpack


@dataclass
class Answer:
    """What one worker answered: the head, the inline bytes, and later the buffers."""

    worker: int
    rank: int
    kind: str
    spec: Any
    times: tuple[float, ...]
    inline: memoryview

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(self.spec[0]) if self.kind == "batch" else ()

    @property
    def num_rows(self) -> int:
        return int(self.spec[1]) if self.kind == "batch" else 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return () if self.kind == "none" else tuple(self.spec[-3 if self.kind == "batch" else 1])

    @property
    def places(self) -> tuple[Place, ...]:
        return () if self.kind == "none" else tuple(self.spec[-2 if self.kind == "batch" else 2])

    @property
    def is_sent(self) -> bool:
        """Whether some of its bytes come by the transport."""
        return Place.SENT in self.places


def _same(a: Answer, b: Answer) -> bool:
    def key(answer: Answer) -> list[tuple[Any, ...]]:
        return [(c.name, c.dtype, c.tail) for c in answer.columns]

    return a.kind == b.kind == "batch" and key(a) == key(b)


class Landing:
    """The buffers of the answers of one call. `whole` holds the joined columns, where all
    answers are batches of one schema; each part is then a slice of it."""

    def __init__(self, answers: list[Answer], join: bool):
        self.answers = answers
        self.whole: dict[str, torch.Tensor] | None = None
        self.starts = [0]
        for answer in answers:
            self.starts.append(self.starts[-1] + answer.num_rows)
        if join and answers and all(_same(answers[0], a) for a in answers):
            self.whole = {
                c.name: torch.empty((self.starts[-1], *c.tail), dtype=c.dtype)
                for c in answers[0].columns
            }
        self.tensors = [self._columns_of(i) for i in range(len(answers))]
        self.buffers = [self._buffers_of(i) for i in range(len(answers))]

    def _columns_of(self, i: int) -> dict[str, torch.Tensor]:
        answer = self.answers[i]
        if self.whole is not None:
            return {k: v[self.starts[i] : self.starts[i + 1]] for k, v in self.whole.items()}
        return {
            c.name: torch.empty((answer.num_rows, *c.tail), dtype=c.dtype) for c in answer.columns
        }

    def _buffers_of(self, i: int) -> list[torch.Tensor]:
        """Where each buffer lands: a slice of the column, or memory of its own if packed."""
        answer = self.answers[i]
        if answer.kind != "batch":
            return [torch.empty(size, dtype=torch.uint8) for size in answer.sizes]
        return [
            torch.empty(size, dtype=torch.uint8) if c.packed else as_bytes(self.tensors[i][c.name])
            for c, size in zip(answer.columns, answer.sizes, strict=True)
        ]

    def receive(self, transport: Transport, group: Ranks, tag: int) -> list[Work]:
        """Copy what came inline; post the receives of the rest."""
        works = []
        for answer, buffers in zip(self.answers, self.buffers, strict=True):
            offset = 0
            for buffer, place in zip(buffers, answer.places, strict=True):
                if place is Place.SENT:
                    works.append(transport.irecv(buffer, answer.rank, group, tag))
                elif buffer.numel():
                    raw = answer.inline[offset : offset + buffer.numel()]
                    buffer.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
                    offset += buffer.numel()
        return works

    def value(self, i: int) -> Any:
        """The value that worker i of the answering ones gave."""
        answer = self.answers[i]
        if answer.kind == "none":
            return None
        if answer.kind == "value":
            return loads(answer.spec[0], self.buffers[i])
        skeleton, raw, lengths = pickle.loads(answer.spec[-1])
        rest = [torch.frombuffer(bytearray(b), dtype=torch.uint8) if b else _EMPTY for b in raw]
        objects, meta_info = loads(skeleton, rest)
        tensors = self.tensors[i]
        own = tensors.get("lengths")
        if own is None and lengths is not None:
            own = torch.frombuffer(bytearray(lengths), dtype=torch.int64)
        for column, flat in zip(answer.columns, self.buffers[i], strict=True):
            if column.packed:
                assert own is not None, "a packed column came without lengths"
                tail = column.tail[1:]
                tokens = flat.numel() // max(column.token_bytes, 1)
                typed = from_bytes(flat, column.dtype, (tokens, *tail))
                unpack(typed, own, column, tensors[column.name])
        return DataProto(dict(tensors) or None, objects, meta_info)

    def values(self) -> list[Any]:
        """All values, in order."""
        return [self.value(i) for i in range(len(self.answers))]

    def joined(self, parts: list[DataProto]) -> DataProto:
        """The parts as one batch; the columns are already in place."""
        assert self.whole is not None
        rest = [DataProto(None, dict(p.non_tensor_batch), p.meta_info) for p in parts]
        merged = DataProto.concat(rest)
        return DataProto(dict(self.whole) or None, merged.non_tensor_batch, merged.meta_info)


_EMPTY = torch.empty(0, dtype=torch.uint8)
