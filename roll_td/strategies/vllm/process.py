"""The engine's process as its worker sees it: it is started, asked, and never left behind.

Requests go in by a socket and may come from any thread; each is answered by its number, in
whatever order. A guard ends the process when this one ends (`__main__.guard`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

SHARED = "/dev/shm/"
FOLDER = "roll-td-engine-"
"""How the name of an engine's folder begins."""
OF_THE_JOB = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""Environment variables that place a process in the job; the engine is a job of its own."""
END_S = 10.0
"""Seconds that an engine has to end by itself."""


class EngineProcess:
    """A process that serves an engine."""

    def __init__(self, owner: str, env: Mapping[str, str]) -> None:
        """Start it; it imports vLLM while the caller does something else. `owner` names the worker
        in errors."""
        self.owner = owner
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._count = 0
        self._heard_s = time.monotonic()
        """When it has said something last."""
        self._end: str | None = None
        self._pipe, theirs = Pipe()
        self.folder = Path(tempfile.mkdtemp(prefix=FOLDER))
        """For files of the engine; it goes when the engine ends."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(OF_THE_JOB)}
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", __package__),
                *(str(theirs.fileno()), str(os.getpid()), str(self.folder)),
            ],
            env=own | dict(env) | {"TMPDIR": str(self.folder)},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C is for the ranks; and its children end with it
        )
        theirs.close()
        threading.Thread(target=self._read, name="roll-td engine", daemon=True).start()

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """What a method of engine.Engine returns. ValueError if it raises one, TimeoutError after
        timeout_s; RuntimeError for any other error in it, or if the process has ended."""
        return self.done(method, self.submit(method, [arguments])[0], timeout_s)

    def done(self, method: str, future: Future[Any], timeout_s: float) -> Any:
        """What `call` returns and raises, of a method that was submitted."""
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"{self.owner}: the engine has not done {method} within {timeout_s:g} s, the "
                "role's timeout_s"
            ) from None

    def submit(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[Future[Any]]:
        """Have the engine begin several calls of a method at once; a Future of each. They raise
        what `call` does."""
        futures: list[Future[Any]] = [Future() for _ in calls]
        with self._lock:
            if self._end is not None:
                raise RuntimeError(self._end)
            numbers = range(self._count, self._count + len(calls))
            self._count += len(calls)
            self._waiting |= dict(zip(numbers, futures, strict=True))
        # _read must be able to go on meanwhile, or both sides could wait to be read from
        with self._sending, contextlib.suppress(OSError):  # it has ended: _read tells all that wait
            self._pipe.send((method, list(zip(numbers, calls, strict=True))))
        return futures

    def wait(self, future: Future[Any], timeout_s: float) -> Any:
        """The result of what was submitted. TimeoutError if the process is silent for timeout_s,
        to everybody; it is killed then."""
        began_s, left_s = time.monotonic(), timeout_s
        while True:
            try:
                return future.result(left_s)
            except TimeoutError:
                left_s = max(began_s, self._heard_s) + timeout_s - time.monotonic()
                if left_s <= 0:
                    self.kill()
                    raise TimeoutError(
                        f"{self.owner}: the engine has given no answer for {timeout_s:g} s, "
                        "strategy_config.request_timeout_s, and was killed"
                    ) from None

    def kill(self) -> None:
        """End the process, even if it hangs; who waits for it is told."""
        self.process.kill()

    def close(self) -> None:
        """End the process."""
        with self._sending, contextlib.suppress(OSError):
            self._pipe.send(None)
        self._reap()

    def _reap(self) -> int:
        """Its exit status, negative for a signal."""
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        # nothing is left of them, unless a signal has ended it
        end_group(self.process.pid)
        remove_folder(self.folder)
        return self.process.wait()

    def _read(self) -> None:
        """Give answers to those who wait; at the end tell them of it."""
        try:
            while True:
                number, error, value = self._pipe.recv()
                self._heard_s = time.monotonic()
                with self._lock:
                    future = self._waiting.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    kind = ValueError if error == "ValueError" else RuntimeError
                    future.set_exception(kind(f"{self.owner}: {value}"))
        except (EOFError, OSError):
            code = self._reap()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            with self._lock:
                self._end = f"{self.owner}: the engine's process has ended with {how}"
                waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                future.set_exception(RuntimeError(self._end))


def remove_folder(folder: str | Path) -> None:
    """Remove an engine's folder, by its name: once it is gone, who asks for the place of temporary
    files is told another, and that is everybody's."""
    assert Path(folder).name.startswith(FOLDER), folder
    shutil.rmtree(folder, ignore_errors=True)


def end_group(group: int, memory: Iterable[Path] = ()) -> None:
    """Kill the processes of a process group, this one aside, and remove the shared memory that they
    have, and this: what they would remove themselves when they end in order."""
    members = _members(group)
    # before the end of those who tell of it: two may be at this
    for file in {*memory, *shared_memory(group)}:
        file.unlink(missing_ok=True)
    for pid in members:
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def shared_memory(group: int) -> set[Path]:
    """The shared memory with a name that the processes of a process group have. By its inode: a
    semaphore has had another name when it was mapped by who has made it."""
    inodes: set[int] = set()
    for pid in _members(group):
        with contextlib.suppress(OSError):  # it has ended
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            inodes |= {int(line.split()[4]) for line in maps if SHARED in line}
    return {Path(entry.path) for entry in os.scandir(SHARED) if entry.inode() in inodes}


def _members(group: int) -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _group(entry) == group]


def _group(entry: Path) -> int | None:
    """The process group of a process in /proc."""
    try:
        # the second field is the program's name, in brackets, and may have any character
        return int((entry / "stat").read_text().rpartition(")")[2].split()[2])
    except OSError:
        return None  # it has ended
