"""The driver's receiving side: answers of the workers, straight into the batch they form."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roll_td.protocol import DataProto, merge_meta
from roll_td.runtime.batches import Column, blank, unpack
from roll_td.runtime.parcel import Spec
from roll_td.runtime.transport import Group, Transport, Work
from roll_td.runtime.wire import Buffer, Place, from_bytes, loads, loads_whole, memory_of, table


@dataclass
class Answer:
    """What one worker answered: the head and the inline bytes."""

    worker: int
    rank: int
    kind: str
    spec: Spec
    times: tuple[float, ...]
    inline: list[memoryview]


def _same(a: Answer, b: Answer) -> bool:
    def key(answer: Answer) -> list[tuple[Any, ...]]:
        return [(c.name, c.dtype, c.tail) for c in answer.spec.columns]

    return a.kind == b.kind == "batch" and key(a) == key(b)


class _Rows:
    """Memory for rows of the columns of a batch."""

    def __init__(self, columns: Sequence[Column], num_rows: int):
        flat = {c.name: blank(c, num_rows) for c in columns}
        self._memory = {name: memory_of(f) for name, f in flat.items()}
        self.zeros = {c.name for c in columns if c.packed and c.fill == 0}
        self.tensors = {
            c.name: from_bytes(flat[c.name], c.dtype, (num_rows, *c.tail)) for c in columns
        }

    def bytes_of(self, column: Column, first: int, last: int) -> memoryview:
        """The memory of some rows of a column."""
        size = column.row_bytes
        return self._memory[column.name][first * size : last * size]


def _landing_place(size: int, into: memoryview | None) -> torch.Tensor:
    if into is None:
        return torch.empty(size, dtype=torch.uint8)
    return torch.frombuffer(into, dtype=torch.uint8)


class Landing:
    """The memory for the answers of one call. `whole` holds the joined columns, where all
    answers are batches of one schema; each part is then a slice of it."""

    def __init__(self, answers: list[Answer], join: bool):
        self.answers = answers
        self.starts = [0]
        for answer in answers:
            self.starts.append(self.starts[-1] + answer.spec.num_rows)
        self.whole: _Rows | None = None
        if join and answers and all([_same(answers[0], a) for a in answers]):
            self.whole = _Rows(answers[0].spec.columns, self.starts[-1])
        self._parts = [self.whole or _Rows(a.spec.columns, a.spec.num_rows) for a in answers]
        self._lock = threading.Lock()
        self.buffers: list[list[Buffer]] = [[] for _ in answers]
        """Of each answer, what does not land in a column: buffers of a value, packed columns."""

    def _rows_of(self, i: int) -> tuple[int, int]:
        """Where the rows of answer i are in their part."""
        start = self.starts[i] if self.whole is not None else 0
        return start, start + self.answers[i].spec.num_rows

    def receive(self, transport: Transport, group: Group, tag: int) -> list[Work]:
        """Copy what came inline; post the receives of the rest."""
        works = []
        for i, (answer, part) in enumerate(zip(self.answers, self._parts, strict=True)):
            spec, inline, answer.inline = answer.spec, iter(answer.inline), []
            for k, (size, place) in enumerate(zip(spec.sizes, spec.places, strict=True)):
                column, into = spec.columns[k] if spec.columns else None, None
                if column is not None and not column.packed:
                    into = part.bytes_of(column, *self._rows_of(i))
                if place is Place.INLINE:
                    buffer: Any = next(inline)
                    if into is not None:
                        into[:] = buffer
                else:
                    buffer = _landing_place(size, into)
                    works.append(transport.irecv(buffer, answer.rank, group, tag))
                if into is None:
                    self.buffers[i].append(buffer)
        return works

    def value(self, i: int) -> Any:
        """The value that worker i of the answering ones gave."""
        answer = self.answers[i]
        if answer.kind == "none":
            return None
        if answer.kind == "value":
            return loads(answer.spec.rest, self.buffers[i])
        objects, meta_info = self._rest(i)
        first, last = self._rows_of(i)
        tensors = {name: t[first:last] for name, t in self._parts[i].tensors.items()}
        return DataProto(table(tensors, objects, answer.spec.num_rows), objects, meta_info)

    def _rest(self, i: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Object columns and meta_info of a batch, after its packed columns are put into place."""
        answer, part = self.answers[i], self._parts[i]
        objects, meta_info, lengths = {}, {}, None
        if answer.spec.rest:
            objects, meta_info, lengths = loads_whole(answer.spec.rest)
        with self._lock:
            buffers, self.buffers[i] = self.buffers[i], []
            if not buffers:
                return objects, meta_info
            first, last = self._rows_of(i)
            if "lengths" in part.tensors:
                lengths = part.tensors["lengths"][first:last].numpy()
            assert lengths is not None, "a packed column came without lengths"
            packed = [c for c in answer.spec.columns if c.packed]
            for column, buffer in zip(packed, buffers, strict=True):
                out = part.bytes_of(column, first, last)
                unpack(memory_of(buffer), lengths, column, out, column.name in part.zeros)
        return objects, meta_info

    def values(self) -> list[Any]:
        """All values, in order."""
        return [self.value(i) for i in range(len(self.answers))]

    def joined(self) -> DataProto:
        """All answers as one batch; the columns are already in place."""
        assert self.whole is not None
        rests = [self._rest(i) for i in range(len(self.answers))]
        columns: dict[str, Any] = {}
        if any([objects for objects, _ in rests]):
            parts = [DataProto(None, objects) for objects, _ in rests]
            columns = DataProto.concat(parts).non_tensor_batch
        meta_info = merge_meta([meta_info for _, meta_info in rests])
        tensors = table(dict(self.whole.tensors), columns, self.starts[-1])
        return DataProto(tensors, columns, meta_info)
