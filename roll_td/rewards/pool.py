"""Processes in which rewards run that have a time limit. They import no torch.

Not pebble's: there a process that ends right after it has taken a task ends the whole pool (5.2.3,
measured), and sys.exit in a function is raised in the caller.
"""

from __future__ import annotations

import fcntl
import math
import multiprocessing
import os
import select
import signal
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, Literal

from roll_td.config.classes import import_object


@dataclass(frozen=True)
class Call:
    """One call of a function in another process."""

    path: str
    """Dotted path of the function."""
    arguments: tuple[Any, ...]
    """Its positional arguments."""
    settings: dict[str, Any]
    """Its keyword arguments."""
    timeout_s: float | None
    """Seconds after which its process is ended; None: never."""


@dataclass(frozen=True)
class Outcome:
    """What came of a call."""

    kind: Literal["value", "error", "timeout"]
    """timeout: it took longer, or took its process down."""
    value: float = math.nan
    """What it returned; NaN for None."""
    text: str = ""
    """Of an error the traceback."""


class Pool:
    """`processes` processes, each made when it is first needed; one that ends is replaced.

    `modules` are imported before the first call, so that no limit counts the time of that. Those of
    this package are imported once, in the process from which the others are forked: a new one is
    there within 50 ms instead of 0.5 s. All end with this process, however that ends.
    """

    def __init__(self, processes: int, modules: Sequence[str]) -> None:
        own = [module for module in modules if module.startswith("roll_td.")]
        multiprocessing.set_forkserver_preload([__name__, *own])  # others might start threads
        self._processes = [_Process(modules) for _ in range(processes)]

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """The outcomes of all calls, in order. The time limit of a call counts from its start.

        RuntimeError if a process can't be started, since a module can't be imported there.
        """
        waiting = deque(enumerate(calls))
        outcomes: dict[int, Outcome] = {}
        running: dict[_Process, int] = {}
        try:
            while waiting or running:
                for process in self._processes:
                    if waiting and process not in running:
                        running[process], call = waiting.popleft()
                        process.begin(call)
                deadline = min(process.deadline for process in running)
                patience_s = None if deadline == math.inf else max(deadline - monotonic(), 0)
                ready = wait([process.connection for process in running], patience_s)
                for process in list(running):
                    outcome = process.outcome(process.connection in ready)
                    if outcome is not None:
                        outcomes[running.pop(process)] = outcome
        finally:
            for process in running:  # else its answer would be taken for that to the next call
                process.end()
        return [outcomes[number] for number in range(len(calls))]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.end()


class _Process:
    """One process, as long as that lasts; then another in its place."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._process: BaseProcess | None = None

    def begin(self, call: Call) -> None:
        """Have it run a call. Until it has started there is no deadline."""
        if self._process is not None and not self._process.is_alive():
            self.end()
        self._limit_s = math.inf if call.timeout_s is None else call.timeout_s
        self._is_starting = self._process is None
        if self._is_starting:
            self._start()
        self.deadline = math.inf if self._is_starting else monotonic() + self._limit_s
        with suppress(ConnectionError):  # it has ended since: told by the end of the file
            self.connection.send(call)

    def outcome(self, is_ready: bool) -> Outcome | None:
        """What came of the call; None: nothing yet. `is_ready`: whether there is something to
        read."""
        try:
            message: Outcome | None = self.connection.recv() if is_ready else None
        except (EOFError, ConnectionError):
            message = Outcome("timeout")
        if message is not None and self._is_starting:
            if message.kind != "value":
                text = message.text or "it ended by itself"
                raise RuntimeError(f"a process for rewards could not start: {text}")
            self._is_starting, self.deadline = False, monotonic() + self._limit_s
            return None
        if message is None and monotonic() >= self.deadline:
            message = Outcome("timeout")
        if message is not None and message.kind == "timeout":
            self.end()
        return message

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self.connection.close()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=[theirs, self._modules], daemon=True)
        self._process.start()
        theirs.close()


def run_call(call: Call) -> Outcome:
    """Call a function; an exception becomes a value, and so do sys.exit, which must not end the
    rank, and a result that is no score."""
    try:
        return Outcome("value", _number(import_object(call.path)(*call.arguments, **call.settings)))
    except (Exception, SystemExit):
        return Outcome("error", text=traceback.format_exc())


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, str):  # which float() would read
        raise _no_score(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _no_score(value) from None
    if math.isinf(number):
        raise ValueError(f"returned {value}: a score is finite, or None where there is none")
    return number


def _no_score(value: object) -> TypeError:
    shown = f"{value!r:.80} ({type(value).__name__})"
    return TypeError(f"returned {shown}: a score is a number, or None where there is none")


def _serve(connection: Connection, modules: Sequence[str]) -> None:
    """What a process does: calls, one after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal it goes to all processes
    _end_with_parent()
    try:
        for module in modules:
            import_module(module)
    except Exception:
        connection.send(Outcome("error", text=traceback.format_exc()))
        return
    connection.send(Outcome("value"))
    while True:
        try:
            call = connection.recv()
        except EOFError:  # the pool has ended
            return
        connection.send(run_call(call))


def _end_with_parent() -> None:
    """Have the kernel end this process with the one that made the pool: a thread would have to
    wait where C holds the GIL. The pipe to that process raises SIGIO when it ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a pool's process has a parent"
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it has ended already
        os._exit(1)
