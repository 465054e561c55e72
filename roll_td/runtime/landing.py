"""The driver's receiving side: answers of the workers, straight into the batch they form."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from roll_td.protocol import DataProto, merge_meta
from roll_td.runtime.batches import Column, blank, unpack
from roll_td.runtime.transport import Group, Transport, Work
from roll_td.runtime.wire import Place, as_bytes, loads, loads_whole, owned, table


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
            self.whole = {c.name: blank(c, self.starts[-1]) for c in answers[0].columns}
        made_for = answers[:1] if self.whole is not None else answers
        self._zeros = {c.name for a in made_for for c in a.columns if c.packed and c.fill == 0}
        self._lock = threading.Lock()
        self.tensors = [self._columns_of(i) for i in range(len(answers))]
        self.buffers = [self._buffers_of(i) for i in range(len(answers))]

    def _columns_of(self, i: int) -> dict[str, torch.Tensor]:
        answer = self.answers[i]
        if self.whole is not None:
            return {k: v[self.starts[i] : self.starts[i + 1]] for k, v in self.whole.items()}
        return {c.name: blank(c, answer.num_rows) for c in answer.columns}

    def _buffers_of(self, i: int) -> list[torch.Tensor]:
        """Where each buffer lands: a slice of the column, or memory of its own if packed."""
        answer = self.answers[i]
        if answer.kind != "batch":
            return [torch.empty(size, dtype=torch.uint8) for size in answer.sizes]
        return [
            torch.empty(size, dtype=torch.uint8) if c.packed else as_bytes(self.tensors[i][c.name])
            for c, size in zip(answer.columns, answer.sizes, strict=True)
        ]

    def receive(self, transport: Transport, group: Group, tag: int) -> list[Work]:
        """Copy what came inline; post the receives of the rest."""
        works = []
        for answer, buffers in zip(self.answers, self.buffers, strict=True):
            offset = 0
            for buffer, place in zip(buffers, answer.places, strict=True):
                if place is Place.SENT:
                    works.append(transport.irecv(buffer, answer.rank, group, tag))
                elif buffer.numel():
                    buffer.copy_(owned(answer.inline[offset : offset + buffer.numel()]))
                    offset += buffer.numel()
        return works

    def value(self, i: int) -> Any:
        """The value that worker i of the answering ones gave."""
        answer = self.answers[i]
        if answer.kind == "none":
            return None
        if answer.kind == "value":
            return loads(answer.spec[0], self.buffers[i])
        objects, meta_info = self._rest(i)
        return DataProto(table(dict(self.tensors[i]), objects, answer.num_rows), objects, meta_info)

    def _rest(self, i: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Object columns and meta_info of a batch, after its packed columns are put into place."""
        objects, meta_info, lengths = loads_whole(self.answers[i].spec[-1])
        tensors = self.tensors[i]
        own = tensors.get("lengths")
        if own is None and lengths is not None:
            own = torch.from_numpy(lengths)
        with self._lock:
            buffers, self.buffers[i] = self.buffers[i], []
            for column, flat in zip(self.answers[i].columns, buffers, strict=False):
                if column.packed:
                    assert own is not None, "a packed column came without lengths"
                    unpack(flat, own, column, tensors[column.name], column.name in self._zeros)
        return objects, meta_info

    def values(self) -> list[Any]:
        """All values, in order."""
        return [self.value(i) for i in range(len(self.answers))]

    def joined(self) -> DataProto:
        """All answers as one batch; the columns are already in place."""
        assert self.whole is not None
        rests = [self._rest(i) for i in range(len(self.answers))]
        objects = DataProto.concat([DataProto(None, columns) for columns, _ in rests])
        meta_info = merge_meta([meta_info for _, meta_info in rests])
        columns = objects.non_tensor_batch
        return DataProto(table(dict(self.whole), columns, self.starts[-1]), columns, meta_info)
