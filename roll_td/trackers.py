"""Where metrics go. The step is always the caller's: no tracker has a counter of its own."""

import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TextIO

from roll_td.metrics import as_metric

RESERVED = frozenset({"step", "time"})


class Tracker(Protocol):
    """Takes the metrics of a step, in any order of steps, a step more than once too."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values (name -> number) under the step given."""

    def close(self) -> None:
        """Write out what is buffered and let go of the resource."""


class JsonlTracker:
    """Appends one JSON object a call to a file: `{"step": 3, "time": 1700000000.0, "loss": 0.5}`.

    Every line is flushed. A number that JSON does not have (NaN, ±inf) is written as null. A last
    line torn by a crash is terminated on opening, so that it costs only itself.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _has_torn_end(path)
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append one line. ValueError for a metric named step or time; TypeError for no number."""
        if taken := sorted(RESERVED & values.keys()):
            raise ValueError(
                f"metrics named {taken}: step and time are the line's own fields; "
                "add a prefix, such as train/step"
            )
        numbers = {key: _json_number(float(as_metric(key, v))) for key, v in values.items()}
        record = {"step": step, "time": time.time(), **numbers}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


class TerminalTracker:
    """A progress line on `stream`: redrawn in place on a terminal, else one line a call."""

    def __init__(self, stream: TextIO, total_steps: int | None = None) -> None:
        self._stream = stream
        self._total = "" if total_steps is None else f"/{total_steps}"
        self._redraw = stream.isatty()
        self._drawn = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Show step and values. TypeError, naming the key, for a value that is no number."""
        numbers = [f"{key} {float(as_metric(key, value)):.4g}" for key, value in values.items()]
        line = "  ".join([f"step {step}{self._total}", *numbers])
        if self._redraw:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r{line[:width]}\x1b[K")
            self._drawn = True
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the last drawn line standing; the stream stays open, it is the caller's."""
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = False


def read_metrics(path: str | os.PathLike[str]) -> dict[tuple[str, int], float]:
    """Read a JsonlTracker's file as (key, step) -> the value logged last; null is NaN.

    A line torn by a crash is skipped.
    """
    latest: dict[tuple[str, int], float] = {}
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            for key in record.keys() - RESERVED:
                value = record[key]
                latest[key, record["step"]] = math.nan if value is None else value
    return latest


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _has_torn_end(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
