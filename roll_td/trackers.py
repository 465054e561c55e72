"""Where metrics go. The step is always the caller's, whatever a tracker counts by itself."""

import json
import logging
import math
import operator
import os
import shutil
import sys
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from roll_td.config.trackers import TensorBoardConfig, TrackersConfig, WandbConfig
from roll_td.metrics import as_metric

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
RESERVED = frozenset({"step", "time"})


class Tracker(Protocol):
    """Takes the metrics of a step, in any order of steps, a step more than once too."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values (name -> number) under the step given."""

    def position(self) -> Any:
        """Write out what is buffered. Gives, as plain data, what a later start needs to go on
        from here: what is logged after it is then undone."""

    def close(self) -> None:
        """Write out what is buffered and let go of the resource."""


@dataclass(frozen=True)
class Start:
    """Where the trackers of a run begin."""

    run_dir: Path
    """The run's directory."""
    name: str
    """The run's name."""
    config: Mapping[str, Any]
    """The run's settings as plain data, without secrets."""
    step: int = 0
    """Steps that are done."""
    positions: Mapping[str, Any] | None = None
    """Positions by tracker from the checkpoint that is resumed; None: the run starts anew."""


def open_trackers(settings: TrackersConfig, start: Start) -> dict[str, Tracker]:
    """The trackers of a run by name. ValueError, naming the package, where one is missing.

    A start anew puts metrics that are there already aside, as metrics-TIME.jsonl.
    """
    path, positions = start.run_dir / METRICS, start.positions
    if positions is None and path.exists():
        path.rename(path.with_name(f"metrics-{time.time_ns()}.jsonl"))
    trackers: dict[str, Tracker] = {
        "jsonl": JsonlTracker(path, None if positions is None else positions["jsonl"]),
        "terminal": TerminalTracker(sys.stderr),
    }
    for name, cls in OPTIONAL.items():
        if (own := getattr(settings, name)) is not None:
            trackers[name] = cls(own, start)
    return trackers


class JsonlTracker:
    """Appends one JSON object a call to a file: `{"step": 3, "time": 1700000000.0, "loss": 0.5}`.

    Every line is flushed. A number that JSON does not have (NaN, ±inf) is written as null. Opened
    at a position, the file loses what was logged after it. A last line torn by a crash is
    terminated on opening, so that it costs only itself.
    """

    def __init__(self, path: str | os.PathLike[str], position: int | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if position is not None:
            _cut(path, position)
        torn = _has_torn_end(path)
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append one line. ValueError for a metric named step or time; TypeError for no number,
        or a step that is not a whole one."""
        if taken := sorted(RESERVED & values.keys()):
            raise ValueError(
                f"metrics named {taken}: step and time are the line's own fields; "
                "add a prefix, such as train/step"
            )
        numbers = {key: _json_number(number) for key, number in _floats(values).items()}
        record = {"step": operator.index(step), "time": time.time(), **numbers}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            error.filename = self._file.name  # a full disk does not say which
            raise

    def position(self) -> int:
        """Bytes of the file, all of them on the disk."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


class TerminalTracker:
    """A progress line on `stream`: redrawn in place on a terminal, else one line a call."""

    def __init__(
        self, stream: TextIO, total_steps: int | None = None, only: Collection[str] | None = None
    ) -> None:
        """only: names of what is shown; None: all."""
        self._stream, self._only = stream, only
        self._total = "" if total_steps is None else f"/{total_steps}"
        self._redraw = stream.isatty()
        self._drawn = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Show step and values. TypeError, naming the key, for a value that is no number."""
        numbers = [
            f"{key} {number:.4g}"
            for key, number in _floats(values).items()
            if self._only is None or key in self._only
        ]
        line = "  ".join([f"step {step}{self._total}", *numbers])
        if self._redraw:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r{line[:width]}\x1b[K")
            self._drawn = True
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def position(self) -> None:
        """What was shown can't be undone."""

    def close(self) -> None:
        """Leave the last drawn line standing; the stream stays open, it is the caller's."""
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = False


class TensorBoardTracker:
    """Event files. On resuming, TensorBoard hides what earlier ones have of steps from then on."""

    def __init__(self, settings: TensorBoardConfig, start: Start) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise _missing("tensorboard") from error
        folder = start.run_dir / settings.folder
        self._writer = SummaryWriter(str(folder), purge_step=start.step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add each value under `step`. TypeError, naming the key, for a value that is no number."""
        for key, number in _floats(values).items():
            self._writer.add_scalar(key, number, operator.index(step))

    def position(self) -> None:
        """The step of the checkpoint says enough."""
        self._writer.flush()

    def close(self) -> None:
        """Write out and close the event file."""
        self._writer.close()


class WandbTracker:
    """A run of wandb whose n-th row is the n-th line of metrics.jsonl; `global_step` is its x axis.

    wandb drops rows that come out of its own order, so it gets line numbers to count by. Resumed,
    it goes on under the same id: rows that wandb has already are not sent again, rows that it
    lacks are read from metrics.jsonl. Offline, each start so leaves files with the whole run.
    """

    def __init__(self, settings: WandbConfig, start: Start) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise _missing("wandb") from error
        self._wandb, positions = wandb, start.positions or {}
        self._id: str = positions.get("wandb") or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or start.name,
            id=self._id,
            mode=settings.mode,
            tags=settings.tags,
            dir=start.run_dir,
            config=dict(start.config),
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("*", step_metric="global_step")
        self._row, self._rows_there = 0, self._run.step
        with (start.run_dir / METRICS).open(encoding="utf-8") as lines:
            for step, numbers in _records(lines):
                self.log(numbers, step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a row. TypeError, naming the key, for a value that is no number."""
        row = {**_floats(values), "global_step": operator.index(step)}
        if self._row >= self._rows_there:
            self._run.log(row, self._row, commit=True)
        self._row += 1

    def position(self) -> str:
        """The run's id."""
        return self._id

    def close(self) -> None:
        """Wait until wandb has everything."""
        self._run.finish()
        self._wandb.teardown()


OPTIONAL: dict[str, Any] = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}
"""Fields of TrackersConfig → what is made of (its settings, Start)."""


def read_metrics(path: str | os.PathLike[str]) -> dict[tuple[str, int], float]:
    """Read a JsonlTracker's file as (key, step) -> the value logged last; null is NaN.

    A line torn by a crash is skipped.
    """
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        return {
            (key, step): value
            for step, numbers in _records(lines)
            for key, value in numbers.items()
        }


def _records(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and metrics of each line that is whole."""
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        numbers = {key: value for key, value in record.items() if key not in RESERVED}
        yield record["step"], {k: math.nan if v is None else v for k, v in numbers.items()}


def _floats(values: Mapping[str, float]) -> dict[str, float]:
    """`values` as plain floats. TypeError, naming the key, for what is no number."""
    return {key: float(as_metric(key, value)) for key, value in values.items()}


def _missing(extra: str) -> ValueError:
    return ValueError(f"trackers.{extra} needs: pip install 'roll-td[{extra}]'")


def _cut(path: Path, position: int) -> None:
    """Shorten a file to `position` bytes."""
    size = path.stat().st_size if path.exists() else 0
    if size < position:
        logger.warning(
            "%s has %d bytes where the checkpoint knows of %d: metrics are lost",
            path, size, position,
        )  # fmt: skip
    elif size > position:
        os.truncate(path, position)


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _has_torn_end(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
