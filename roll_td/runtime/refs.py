"""Refs: what a call with blocking=False gives, and `get`, which waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from roll_td.distributed.topology import RankInfo
from roll_td.plan import StepPlan
from roll_td.protocol import DataProto
from roll_td.runtime import dispatch
from roll_td.runtime.driver import Call, Driver


class Ref:
    """The result of one worker of a call."""

    def __init__(self, refs: Refs, worker: int):
        self._refs, self.worker = refs, worker

    def get(self) -> Any:
        """Wait, and give the worker's value; None if it is not one of the answering workers."""
        call = self._refs.call
        landing = self._refs.driver.wait(call)
        if self.worker not in call.answering:
            return None
        return landing.value(call.answering.index(self.worker))


class Refs(Sequence[Ref]):
    """The result of a call under way: one ref per worker. Dropping it frees the result."""

    def __init__(
        self,
        driver: Driver,
        call: Call,
        mode: dispatch.Mode,
        plan: StepPlan | None,
        infos: tuple[RankInfo, ...],
    ):
        self.driver, self.call = driver, call
        self._mode, self._plan, self._infos = mode, plan, infos

    def __len__(self) -> int:
        return len(self._infos)

    def __getitem__(self, index: Any) -> Any:
        workers = range(len(self._infos))[index]
        return Ref(self, workers) if isinstance(workers, int) else [Ref(self, w) for w in workers]

    def get(self) -> Any:
        """Wait, and give what the blocking call gives."""
        landing = self.driver.wait(self.call)
        if isinstance(self._mode, tuple):
            return self._mode[1](landing.values(), self._infos)
        try:
            if self._plan is not None:
                return dispatch.collect_planned(landing.values(), self._plan)
            if landing.whole is not None:
                return landing.joined()
            return dispatch.collect(self._mode, landing.values())
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{self.call.role}.{self.call.method}: the answers of workers "
                f"{list(self.call.answering)} don't fit together: {error}"
            ) from error

    def collecting(self) -> list[Any]:
        """The values of the collecting workers, in dp order."""
        workers = sorted((i for i in self._infos if i.is_collecting), key=lambda i: i.dp_rank)
        return [self[i.rank].get() for i in workers]


class Stream:
    """What a request method yields, as it comes."""

    def __init__(self, items: Iterator[Any]):
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items

    def get(self) -> Any:
        """Wait for the end: a list of the items, or of a plain method its value."""
        return list(self._items)


class Reply:
    """What a request method gives."""

    def __init__(self, items: Iterator[Any]):
        self._items = items

    def get(self) -> Any:
        """Wait, and give the value."""
        return next(self._items)


def get(refs: Any) -> Any:
    """Wait for a call (or a ref, or a list of them) and give what the blocking call gives."""
    if isinstance(refs, (list, tuple)):
        return [get(r) for r in refs]
    if not isinstance(refs, (Refs, Ref, Stream, Reply)):
        raise TypeError(
            f"get() takes what a call with blocking=False gave, or a list of that, not a "
            f"{type(refs).__name__}; a blocking call gives its value at once"
        )
    return refs.get()


def materialize_concat(refs: Any) -> DataProto:
    """Wait for every worker; the DataProtos of the collecting ones as one, in dp order."""
    if isinstance(refs, Refs):
        if refs.call.join or refs._plan is not None:
            value = refs.get()
            if isinstance(value, DataProto):
                return value
        values = refs.collecting()
    else:
        values = get(list(refs))
    return DataProto.concat([v for v in values if v is not None])
