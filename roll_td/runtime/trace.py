"""Writes spans as a JSON array of trace events, which Perfetto and chrome://tracing read.

The format needs no closing bracket, so what a crash leaves behind can still be opened.
"""

import json
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

FLUSH_S = 1.0
CALLS, COMMANDS = 0, 1
"""Track numbers: of the driver's calls on its rank, of the commands on each rank."""
COLOURS = (
    "thread_state_running",
    "thread_state_runnable",
    "thread_state_iowait",
    "thread_state_uninterruptible",
    "background_memory_dump",
    "light_memory_dump",
    "detailed_memory_dump",
    "generic_work",
    "rail_response",
    "rail_animation",
    "rail_idle",
    "rail_load",
    "startup",
    "olive",
)


def colour_name(key: str) -> str:
    """A colour name of the trace viewer for a role: the same in every process and every run."""
    return COLOURS[zlib.crc32(key.encode()) % len(COLOURS)]


Run = tuple[int, tuple[float, ...]]
"""Of one worker of a call: its global rank, and when the command came, when it was started, when
its data were there and when it ended, in seconds."""


class TraceWriter:
    """One trace file, written as events come; any thread may call.

    Times are given in seconds and written in microseconds since `base_s`. Events are written
    every second and on `close` by a thread of its own: whoever waits for a call should not wait
    for its trace. A file that can't be written raises OSError in the next call. `args` values
    that JSON does not know are written as text.
    """

    def __init__(self, path: str | os.PathLike[str], base_s: float = 0.0) -> None:
        self._base_s = base_s
        self._lock = threading.Lock()
        self._events: list[Callable[[], list[dict[str, Any]]]] = []
        self._separator = ""
        self._error: OSError | None = None
        self._closing = threading.Event()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # unbuffered: what could not be written must not be tried again when the object dies
        self._file = path.open("wb", buffering=0)
        self._put("[\n")
        self._thread = threading.Thread(target=self._write, name="roll-td trace", daemon=True)
        self._thread.start()

    def process(self, pid: int, name: str) -> None:
        """Name a track group (a rank)."""
        event = {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        self._add(lambda: [event])

    def thread(self, pid: int, tid: int, name: str) -> None:
        """Name a track inside a group (a role on that rank)."""
        event = {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        self._add(lambda: [event])

    def call(
        self,
        name: str,
        role: str,
        number: int,
        driver_rank: int,
        posted_s: float,
        end_s: float,
        runs: Sequence[Run],
    ) -> None:
        """A call of the driver, and what each worker did for it."""
        self._add(lambda: self._call(name, role, number, driver_rank, posted_s, end_s, runs))

    def close(self) -> None:
        """Write what there is and end the array; what comes later is dropped."""
        self._closing.set()
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _call(
        self,
        name: str,
        role: str,
        number: int,
        driver_rank: int,
        posted_s: float,
        end_s: float,
        runs: Sequence[Run],
    ) -> list[dict[str, Any]]:
        """The call overlaps others on its track, so it is a pair told apart by its number."""
        shared = {"name": name, "cat": role, "cname": colour_name(role)}
        call = {**shared, "pid": driver_rank, "tid": CALLS, "id": number}
        start = self._microseconds(posted_s)
        events: list[dict[str, Any]] = [
            {**call, "ph": "b", "ts": start},
            {**call, "ph": "e", "ts": max(start, self._microseconds(end_s))},
        ]
        for rank, (received, started, here, ended) in runs:
            start = self._microseconds(started)
            args = {"command": number, "queued_s": started - received, "data_s": here - started}
            # an end before the start (a clock set back) is length 0
            length = max(0.0, self._microseconds(ended) - start)
            span = {"ph": "X", "pid": rank, "tid": COMMANDS, "ts": start, "dur": length}
            events.append({**shared, **span, "args": args})
        return events

    def _microseconds(self, seconds: float) -> float:
        return round((seconds - self._base_s) * 1e6, 3)

    def _add(self, make: Callable[[], list[dict[str, Any]]]) -> None:
        self._raise()
        with self._lock:
            self._events.append(make)

    def _write(self) -> None:
        try:
            while not self._closing.wait(FLUSH_S):
                self._flush()
            self._flush()
            self._put("\n]\n")
        except OSError as error:
            error.filename = self._file.name  # a full disk does not say which
            self._error = error
        self._file.close()

    def _flush(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        texts = []
        for event in chain.from_iterable(make() for make in events):
            texts.append(self._separator + json.dumps(event, default=str))
            self._separator = ",\n"
        self._put("".join(texts))

    def _put(self, text: str) -> None:
        left = memoryview(text.encode())
        while left:
            left = left[self._file.write(left) :]
