"""Engines: they sample answers while further ones come in, until they are told to rest.

Requests come from any thread; pausing, new weights and resuming are commands (contracts,
"Requests"). Of a CoreEngine a thread steps a `Core`, which is what a strategy brings.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from roll_td.platform import current_platform
from roll_td.strategies.batches import Response


@dataclass
class Answer(Response):
    """An answer on its way. It goes to an engine with the tokens that it has, and comes back with
    more: ended (stop, length), or given up (abort) with what it had got."""

    sample_id: int = 0
    """Says with the seed what its random numbers are; no other answer in flight has it."""
    prompt: list[int] = field(default_factory=list)
    """Tokens of the prompt; empty on the way back."""
    versions: list[int] = field(default_factory=list)
    """Of the weights that made each token."""
    text: str = ""
    """Of the tokens, once it has ended."""


@dataclass(frozen=True)
class Failure:
    """The engine has failed and gives no further answers."""

    text: str
    """The traceback, or what is wrong with the request."""
    sample_id: int | None = None
    """Of the request, if no engine can do it: asking another is of no use."""


Ended = queue.SimpleQueue[list[Answer] | Failure | None]
"""What an engine gives; None is the end."""


def until_the_end(ended: Ended) -> Iterator[list[Answer] | Failure]:
    """What comes before the end; a Failure is one too."""
    while (item := ended.get()) is not None:
        yield item
        if isinstance(item, Failure):
            return


class Core(Protocol):
    """What samples. One thread at a time is in it."""

    def rest(self) -> None:
        """It is stepped no further for a time."""

    def begin(self) -> None:
        """It goes on after a rest."""

    def add(self, answers: Sequence[Answer]) -> None:
        """Take further answers."""

    def wait_s(self) -> float | None:
        """Seconds until there is something to step; None: not before further answers come."""

    def step(self) -> list[Answer]:
        """Sample on; the answers that have ended."""

    def abort(self, sample_ids: Collection[int] | None) -> list[Answer]:
        """Give these up, or all: the answers as they are."""

    def forget(self) -> None:
        """The weights are others: nothing that was computed with the old ones is used again."""


class Engine(Protocol):
    """What takes requests while it works. Those who submit, abort and close may be any threads."""

    def submit(self, answers: Sequence[Answer]) -> None:
        """Begin these, or go on with them."""

    def ended(self) -> Iterator[list[Answer] | Failure]:
        """What has ended or was given up, as it comes; a Failure is the last. One reader."""

    def abort(self, sample_ids: Collection[int]) -> None:
        """Give these up; those that have not ended come back as they are."""

    def close(self) -> None:
        """No further answers; who waits for it to rest waits no more, even if it hangs."""

    def pause(self, abort: bool, timeout_s: float) -> None:
        """Return when it rests, between two steps; `abort` gives up what is in flight. TimeoutError
        if the step has not ended after timeout_s."""

    def resume(self) -> None:
        """Go on."""

    def forget(self) -> None:
        """The weights change: nothing computed with the old ones is used again. It has to rest."""

    def require_rest(self, what: str) -> None:
        """RuntimeError that says `what`, if it is at work and has not been paused."""


class CoreEngine:
    """An Engine that steps a core, by a thread of its own."""

    def __init__(self, core: Core, owner: str, device: torch.device) -> None:
        """`owner` names the worker in errors; `device` is its own."""
        self._core, self._owner, self._device = core, owner, device
        self._changed = threading.Condition(threading.RLock())
        # all below is guarded by it, and the core by the thread or by its being at rest
        self._inbox: list[Answer] = []
        self._given_up: set[int] = set()
        self._holds = False
        self._at_rest = True
        """Paused, or without anything to do."""
        self._closed = False
        self._ended: Ended = queue.SimpleQueue()
        threading.Thread(target=self._run, name="roll-td engine", daemon=True).start()

    # --- requests ---------------------------------------------------------------------------

    def submit(self, answers: Sequence[Answer]) -> None:
        """Begin these, or go on with them."""
        with self._changed:
            self._inbox += answers
            self._at_rest = self._holds and self._at_rest
            self._changed.notify_all()

    def ended(self) -> Iterator[list[Answer] | Failure]:
        """What has ended or was given up, as it comes; a Failure is the last. One reader."""
        return until_the_end(self._ended)

    def abort(self, sample_ids: Collection[int]) -> None:
        """Give these up; those that have not ended come back as they are."""
        with self._changed:
            self._given_up |= set(sample_ids)
            self._changed.notify_all()

    def close(self) -> None:
        """No further answers; who waits for it to rest waits no more, even if it hangs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._ended.put(None)

    # --- commands ---------------------------------------------------------------------------

    def pause(self, abort: bool, timeout_s: float) -> None:
        """Return when it rests, between two steps; `abort` gives up what is in flight. TimeoutError
        if the step has not ended after timeout_s."""
        with self._changed:
            self._holds, self._at_rest = True, False
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._at_rest or self._closed, timeout_s):
                raise TimeoutError(
                    f"{self._owner}: the engine has not ended its step within {timeout_s:g} s, the "
                    "role's timeout_s"
                )
            if abort and not self._closed:
                waiting, self._inbox = self._inbox, []
                for answer in waiting:
                    answer.finish_reason = "abort"
                self._ended.put([*self._core.abort(None), *waiting])

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self._holds = self._at_rest = False
            self._changed.notify_all()

    def forget(self) -> None:
        """The weights have changed. RuntimeError while it is at work."""
        with self._changed:
            self.require_rest("new weights have come")
            if not self._closed:
                self._core.forget()

    def require_rest(self, what: str) -> None:
        """RuntimeError that says `what`, if it is at work and has not been paused."""
        with self._changed:
            if not (self._at_rest or self._closed):
                raise RuntimeError(
                    f"{self._owner}: {what} while the engine is at work; pause it before"
                )

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            current_platform.use(self._device)
            while self._is_due():
                if ended := self._core.step():
                    self._ended.put(ended)
        except BaseException:  # a thread's edge: the driver decides what it means
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._ended.put(Failure(traceback.format_exc()))

    def _is_due(self) -> bool:
        """Wait until there is something to step; False: it is closed."""
        rested = False
        with self._changed:
            while not self._closed:
                if self._holds:
                    if not rested:
                        self._core.rest()
                    self._at_rest = rested = True
                    self._changed.notify_all()
                    self._changed.wait()
                    continue
                if rested:
                    self._core.begin()
                    rested = False
                if self._given_up:
                    self._give_up()
                if self._inbox:
                    self._core.add(self._inbox)
                    self._inbox = []
                wait_s = self._core.wait_s()
                self._at_rest = wait_s is None
                if wait_s == 0:
                    return True
                self._changed.wait(wait_s)
            return False

    def _give_up(self) -> None:
        ids, self._given_up = self._given_up, set()
        waiting = [answer for answer in self._inbox if answer.sample_id in ids]
        self._inbox = [answer for answer in self._inbox if answer.sample_id not in ids]
        for answer in waiting:
            answer.finish_reason = "abort"
        if found := [*self._core.abort(ids), *waiting]:
            self._ended.put(found)
