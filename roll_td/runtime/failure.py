"""How a job ends when it fails: one cause is chosen, told to all ranks, printed last."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from roll_td.runtime.control import Hub, Kind

BETTER_CAUSE_S = 0.3
"""How long the first cause waits for a better one: who waits on a dead rank fails too."""
LAST_ENDS_S = 2.0
"""How long the driver waits for the ranks to end before it prints and ends itself."""
FLUSH_S = 1.0
"""How long the end waits for each thing that is to be written."""
ABORT_BYTES = 32_768
"""An abort has to fit into a socket's buffer in one piece."""

_WEIGHT = {"death": 0, "exception": 1, "driver": 1, "signal": 2}


class WorkerError(RuntimeError):
    """The job failed; raised only where its ranks are threads of one process."""


@dataclass(frozen=True)
class Cause:
    """What went wrong first."""

    kind: Literal["exception", "death", "signal", "driver"]
    role: str
    worker: int | None
    rank: int
    host: str
    method: str
    text: str
    """A traceback, or a sentence."""
    time_s: float

    @classmethod
    def of(
        cls,
        error: BaseException,
        kind: Literal["exception", "driver"],
        rank: int,
        role: str = "",
        worker: int | None = None,
        method: str = "",
        host: str = "",
    ) -> Cause:
        """The cause that an exception of this process is."""
        text = "".join(traceback.format_exception(error))
        return cls(
            kind, role, worker, rank, host or socket.gethostname(), method, text, time.time()
        )

    def render(self) -> str:
        """As text: a line that tells it all, then the traceback if there is one."""
        lines = self.text.strip().splitlines() or ["no more is known"]
        who = f"worker {self.worker} of {self.role}, " if self.role else ""
        where = f"{who}rank {self.rank} on {self.host}"
        if self.kind == "exception":
            method = f"{self.role}.{self.method}" if self.role else self.method
            head = f"{method or 'the runtime'} failed ({where}): {_error_in(lines)}"
        elif self.kind == "driver":
            head = f"the driver failed ({where}): {_error_in(lines)}"
        else:
            head = f"{lines[0]} ({where})"
            lines = lines[1:]
        more = lines if len(lines) > 1 else []
        return "\n".join([f"roll-td: {head}", *more])


def _error_in(lines: Sequence[str]) -> str:
    """Where a traceback names the error, or its last note: frames, and the further lines that our
    messages have, are indented."""
    return next((line for line in reversed(lines) if line and not line[0].isspace()), lines[-1])


def end_process(code: int) -> NoReturn:
    """Flush what was printed, and end at once: no atexit, no destructors, no waiting."""
    _within(FLUSH_S, _flush)
    os._exit(code)


def say(text: str) -> None:
    """Print to stderr in one piece, whatever other threads do."""
    _within(FLUSH_S, lambda: _write(2, f"{text}\n".encode(errors="replace")))


def _within(timeout_s: float, action: Callable[[], None]) -> None:
    """Do it, by a thread: writing may wait for ever on who doesn't read, or on a lock."""
    thread = threading.Thread(target=action, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads are to be had
        return action()
    thread.join(timeout_s)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # somebody has made our stderr non-blocking
            select.select([], [descriptor], [], FLUSH_S)
        except OSError:
            return  # there is nobody to tell


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream
            stream.flush()


def write_error_file(cause_text: str, full: bool) -> None:
    """Leave the cause where torchrun looks for it; not `full`: its first line.

    torchrun takes the earliest record for the root, and makes one itself for a killed rank: ours
    is dated back by two seconds.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    text = cause_text if full else cause_text.partition("\n")[0]
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) - 2)}
    with contextlib.suppress(OSError):
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
        os.replace(temporary, path)


class Undertaker:
    """Ends a failed job, from the driver's process, which is rank `own_rank`.

    `hosts` has one host a rank. `on_end` is called once the cause is chosen, before anybody is
    told; `save` when all have ended, to write what is still buffered, for a second at most.
    """

    def __init__(
        self,
        hub: Hub,
        hosts: Sequence[str],
        on_end: Callable[[], None],
        save: Callable[[], None],
        own_rank: int,
    ):
        self._hub, self._hosts, self._on_end, self._save = hub, list(hosts), on_end, save
        self._own_rank = own_rank
        self._lock = threading.Lock()
        self._causes: list[Cause] = []
        self._left = set(range(len(self._hosts))) - {own_rank}
        self._all_gone = threading.Event()
        if not self._left:
            self._all_gone.set()

    @property
    def ending(self) -> bool:
        """Whether the job is being ended."""
        return bool(self._causes)

    def fail(self, cause: Cause) -> None:
        """End the job for this cause, or a better one that comes right after it. Returns."""
        with self._lock:
            self._causes.append(cause)
            first = len(self._causes) == 1
        if first:
            threading.Thread(target=self._bury, name="undertaker", daemon=True).start()

    def eof(self, rank: int) -> None:
        """A rank's connection has ended."""
        with self._lock:
            self._left.discard(rank)
            if not self._left:
                self._all_gone.set()

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until every rank but our own has ended; whether it has."""
        return self._all_gone.wait(timeout_s)

    def choose(self) -> Cause:
        """The best cause so far: a death, else the earliest; a signal only if there is no other."""
        with self._lock:
            return min(self._causes, key=lambda c: (_WEIGHT[c.kind], c.time_s))

    def _bury(self) -> None:
        code = 1
        try:
            time.sleep(BETTER_CAUSE_S)
            cause = self.choose()
            if cause.kind == "signal" and cause.method in signal.Signals.__members__:
                code = 128 + signal.Signals[cause.method]
            text = cause.render()
            self._on_end()
            self._hub.send_now(Kind.ABORT, pickle.dumps(text[:ABORT_BYTES], 5))
            self._hub.cut(self._own_rank)
            self.wait_gone(LAST_ENDS_S)
            _within(FLUSH_S, self._save)
            _within(FLUSH_S, _flush)
            write_error_file(text, full=True)
            say(text)
        except BaseException as error:  # the last thread that can end the job
            say(f"roll-td: the job failed, and telling why failed too: {error!r}")
        finally:
            os._exit(code)
