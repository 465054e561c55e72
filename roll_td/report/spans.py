"""What the commands of a run took, from its trace. Times are Unix times in seconds."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from roll_td.runtime.trace import COMMANDS

Interval = tuple[float, float]


class Span(NamedTuple):
    """A command on one rank, from when it was started to its end."""

    stage: str
    """role.method."""
    call: int
    """Number of the call in its start; all ranks' spans of a call have it."""
    rank: int
    begin_s: float
    end_s: float


class Step(NamedTuple):
    """A step of the pipeline, from the metrics of the step before to its own."""

    number: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Start:
    """One start of the run: a file of its trace."""

    began_s: float
    spans: list[Span]
    ranks: dict[int, str]
    """Rank → its name."""

    @property
    def end_s(self) -> float:
        """When the last command ended."""
        return max((span.end_s for span in self.spans), default=self.began_s)


def read_starts(folder: Path) -> list[Start]:
    """The starts of a run, the oldest first; what a crash has torn is left out."""
    files = sorted(folder.glob("*.json"), key=lambda path: float(path.stem))
    return [_read(path) for path in files]


def _read(path: Path) -> Start:
    start = Start(float(path.stem), [], {})
    with path.open(encoding="utf-8", errors="replace") as lines:
        for event in _events(lines):
            if event["ph"] == "M" and event["name"] == "process_name":
                start.ranks[event["pid"]] = event["args"]["name"]
            elif event["ph"] == "X" and event["tid"] == COMMANDS:
                begin = start.began_s + event["ts"] / 1e6
                place = event["args"]["command"], event["pid"]
                start.spans.append(Span(event["name"], *place, begin, begin + event["dur"] / 1e6))
    return start


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The events of a trace file, of which each has a line; its last may be torn."""
    for line in lines:
        try:
            event = json.loads(line.strip().removesuffix(","))
        except json.JSONDecodeError:
            continue
        if isinstance(event, dict):
            yield event


def stages(starts: Iterable[Start]) -> dict[str, list[Interval]]:
    """The calls of each stage, from a call's first begin on any rank to its last end; the stage
    that takes longest comes first."""
    found: dict[str, list[Interval]] = {}
    for start in starts:
        calls: dict[tuple[str, int], Interval] = {}
        for span in start.spans:
            key = span.stage, span.call
            begin, end = calls.get(key, (span.begin_s, span.end_s))
            calls[key] = min(begin, span.begin_s), max(end, span.end_s)
        for (stage, _), interval in calls.items():
            found.setdefault(stage, []).append(interval)
    return dict(sorted(found.items(), key=lambda item: -total(union(item[1]))))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that don't overlap, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """Seconds of intervals."""
    return sum(end - begin for begin, end in intervals)


def in_steps(intervals: Iterable[Interval], steps: Sequence[Step]) -> list[float]:
    """Seconds of the union of `intervals` in each step; steps are in order and don't overlap."""
    begins, seconds = [step.begin_s for step in steps], [0.0] * len(steps)
    for begin, end in union(intervals):
        for i in range(max(bisect_right(begins, begin) - 1, 0), bisect_right(begins, end)):
            inside = min(end, steps[i].end_s) - max(begin, steps[i].begin_s)
            seconds[i] += max(inside, 0.0)
    return seconds


def steps_of(ends: Iterable[tuple[int, float]], starts: Sequence[Start]) -> list[Step]:
    """The steps whose begin is known, from (number, end) of each by time: not the first of a
    start, which comes with reading data and making models."""
    begins, steps = [start.began_s for start in starts], []
    last_end = float("-inf")
    for number, end in ends:
        start = bisect_right(begins, end)
        if start and start == bisect_right(begins, last_end):
            steps.append(Step(number, last_end, end))
        last_end = end
    return steps
