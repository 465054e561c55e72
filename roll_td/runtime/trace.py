"""Writes spans as a JSON array of trace events, which Perfetto and chrome://tracing read.

The format needs no closing bracket, so what a crash leaves behind can still be opened.
"""

import json
import os
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLUSH_SECONDS = 1.0
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


class TraceWriter:
    """One trace file, written as events come; any thread may call.

    Times are given in seconds and written in microseconds since `base_s`. Events are buffered and
    written out when a second has passed since the last time, and on `close`. `args` values that
    JSON does not know are written as text.
    """

    def __init__(self, path: str | os.PathLike[str], base_s: float = 0.0) -> None:
        self._base_s = base_s
        self._lock = threading.Lock()
        self._buffer: list[str] = []
        self._separator = ""
        self._flushed_at = time.monotonic()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._file.flush()

    def process(self, pid: int, name: str) -> None:
        """Name a track group (a rank)."""
        self._add({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})

    def thread(self, pid: int, tid: int, name: str) -> None:
        """Name a track inside a group (a role on that rank)."""
        event = {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        self._add(event)

    def span(
        self,
        name: str,
        category: str,
        pid: int,
        tid: int,
        start_s: float,
        end_s: float,
        colour_key: str,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Work that nests on its track. An end before the start (a clock set back) is length 0."""
        start = self._microseconds(start_s)
        event = self._event("X", name, category, pid, tid, start, colour_key, args)
        self._add({**event, "dur": max(0.0, self._microseconds(end_s) - start)})

    def async_span(
        self,
        name: str,
        category: str,
        pid: int,
        tid: int,
        span_id: int,
        start_s: float,
        end_s: float,
        colour_key: str,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Work that overlaps others on its track (a call of the driver).

        `span_id` tells spans of one category apart.
        """
        start = self._microseconds(start_s)
        end = max(start, self._microseconds(end_s))
        begin = self._event("b", name, category, pid, tid, start, colour_key, args)
        finish = self._event("e", name, category, pid, tid, end, colour_key, None)
        self._add({**begin, "id": span_id}, {**finish, "id": span_id})

    def close(self) -> None:
        """Write what is buffered and end the array; what comes later is dropped."""
        with self._lock:
            if self._file.closed:
                return
            self._buffer.append("\n]\n")
            self._flush()
            self._file.close()

    def _microseconds(self, seconds: float) -> float:
        return round((seconds - self._base_s) * 1e6, 3)

    @staticmethod
    def _event(
        phase: str,
        name: str,
        category: str,
        pid: int,
        tid: int,
        ts: float,
        colour_key: str,
        args: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        return {
            "ph": phase,
            "name": name,
            "cat": category,
            "pid": pid,
            "tid": tid,
            "ts": ts,
            "cname": colour_name(colour_key),
            "args": dict(args or {}),
        }

    def _add(self, *events: dict[str, Any]) -> None:
        texts = [json.dumps(event, default=str) for event in events]
        with self._lock:
            if self._file.closed:
                return
            for text in texts:
                self._buffer.append(self._separator + text)
                self._separator = ",\n"
            if time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
                self._flush()

    def _flush(self) -> None:
        self._file.write("".join(self._buffer))
        self._file.flush()
        self._buffer.clear()
        self._flushed_at = time.monotonic()
