"""The page itself: what ran, its last numbers, curves, where the time went."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from roll_td.report.charts import Bar, line_chart, number, stacked_bars, timeline
from roll_td.report.spans import (
    Interval,
    Start,
    Step,
    in_steps,
    read_starts,
    stages,
    steps_of,
    total,
    union,
)
from roll_td.trackers import METRICS, read_metrics

PAGE = "report.html"
LEADING = (
    r"val/(score|accuracy)",
    r"reward/mean",
    r"response/length",
    r"val/pass@\d+",
    r"(.+/)?loss",
    r"(.+/)?kl",
    r"(.+/)?entropy",
)
"""Metrics that say how a run goes, as regular expressions of whole names; the first come first."""
UNITS = {"s": "seconds", "mb": "MB", "gb": "GB", "tokens": "tokens"}
"""How the name of a metric ends → what it is measured in."""
SETTINGS = (
    *("pipeline_cls", "model.path", "model.config.model_type", "data.train", "data.validation"),
    *("batch_size", "max_steps", "seed"),
)
"""Settings that are shown where a config has them; the rest is folded up."""
COLOURS = (
    *("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2"),
    *("#eeca3b", "#9d755d", "#ff9da6"),
)
"""Of the stages that take longest; the others share one."""
REST, IDLE = ("other commands", "#bab0ac"), ("no command running", "#ececec")
TIMELINE_STEPS, TIMELINE_RANKS = 3, 32
"""What the timeline shows at most."""

Series = dict[str, list[tuple[int, float]]]
"""Metric → (step, value) by step."""
Stage = tuple[str, str, list[Interval]]
"""Name, colour, and when its calls ran."""


@dataclass(frozen=True)
class Run:
    """What a run directory tells."""

    folder: Path
    config: dict[str, Any]
    series: Series
    starts: list[Start]
    """Without those before the metrics were begun anew."""
    steps: list[Step]


def write_report(folder: Path) -> Path:
    """Make the page of a run as report.html in its directory, from config.yaml, metrics.jsonl and
    trace/; gives its path. The run may still be going on. One file, which needs no network.

    ValueError for a folder that is no run.
    """
    path = folder / PAGE
    path.write_text(_page(read_run(folder)), encoding="utf-8")
    return path


def read_run(folder: Path) -> Run:
    """What is in a run directory. ValueError for a folder that is no run."""
    config = folder / "config.yaml"
    if not config.is_file():
        rule = "has no config.yaml" if folder.is_dir() else "is not there"
        raise ValueError(f"{folder} {rule}: give the directory of a run, such as runs/tiny")
    path, series = folder / METRICS, Series()
    for (key, step), value in sorted(read_metrics(path).items() if path.exists() else ()):
        series.setdefault(key, []).append((step, value))
    ends = list(_ends(path, max(series, key=lambda key: len(series[key])))) if series else []
    starts = read_starts(folder / "trace")
    first = bisect_right([start.began_s for start in starts], ends[0][1]) if ends else len(starts)
    starts = starts[max(first - 1, 0) :]
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    return Run(folder, settings, series, starts, steps_of(ends, starts))


def _ends(path: Path, key: str) -> Iterator[tuple[int, float]]:
    """(step, when it was logged) of each whole line with a metric that every step has."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if key in record:
                yield record["step"], record["time"]


def _page(run: Run) -> str:
    name = escape(run.folder.resolve().name)
    sections = [_what_ran(run), _numbers(run), *_curves(run), *_times(run), _whole_config(run)]
    head = f'<meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
    body = f"<h1>{name}</h1><p class=quiet>{escape(_course(run))}</p>{''.join(sections)}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _course(run: Run) -> str:
    """How far the run is, and when and how long it ran."""
    done = max((len(points) for points in run.series.values()), default=0)
    wanted = run.config.get("max_steps")
    parts = [f"{done} of {wanted} steps" if wanted else f"{done} steps"]
    if run.starts:
        took = sum(start.end_s - start.began_s for start in run.starts)
        parts.append(f"started {_clock(run.starts[0].began_s)}")
        parts.append(f"last command ended {_clock(run.starts[-1].end_s)}, after {_time(took)}")
    if len(run.starts) > 1:
        parts.append(f"{len(run.starts)} starts")
    return " · ".join(parts)


def _what_ran(run: Run) -> str:
    rows = [(key, _setting(run.config, key)) for key in SETTINGS]
    settings = _table([], [(key, str(value)) for key, value in rows if value is not None])
    roles = [
        (
            name,
            str(role["worker_cls"]).rpartition(".")[2],
            _where(role),
            str(_setting(role, "strategy_args.strategy_name") or ""),
        )
        for name, role in _roles(run.config)
    ]
    return f"<h2>What ran</h2>{settings}" + _table(["role", "worker", "where", "strategy"], roles)


def _setting(config: Mapping[str, Any], key: str) -> Any:
    """The setting under a dotted key; None where the config has none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _roles(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Sections of the config that are roles, those of a dict of roles too."""
    for key, value in config.items():
        if isinstance(value, Mapping) and "worker_cls" in value:
            yield str(value["name"] or key), value
        elif isinstance(value, Mapping):
            yield from _roles(value)


def _where(role: Mapping[str, Any]) -> str:
    if role["device_mapping"] is None:
        return f"CPU workers: {role['world_size']}"
    return "devices " + ", ".join(map(str, role["device_mapping"]))


def _numbers(run: Run) -> str:
    """The leading metrics as a table; of a run without any, all."""
    head = ["metric", "first", "last", "lowest", "highest"]
    rows = []
    for key in _leading(run.series) or run.series:
        points = run.series[key]
        values = [value for _, value in points if value == value]
        ends = [f"{number(value)} (step {step})" for step, value in (points[0], points[-1])]
        lowest, highest = (number(m(values)) if values else "-" for m in (min, max))
        rows.append((key, *ends, lowest, highest))
    return f"<h2>Numbers</h2>{_table(head, rows)}" if rows else ""


def _leading(series: Series) -> list[str]:
    """The metrics that say how the run goes, in order."""
    return [k for pattern in LEADING for k in series if re.fullmatch(pattern, k)]


def _curves(run: Run) -> Iterator[str]:
    """The leading metrics, then the others, of which those with the same prefix lie together;
    those that never change are named at the end."""
    if not run.series:
        yield "<h2>How it went</h2><p>The run has logged no metrics yet.</p>"
        return
    steps = [step for points in run.series.values() for step, _ in points]
    span = min(steps), max(steps)
    leading = _leading(run.series)
    others = sorted(run.series.keys() - set(leading), key=lambda key: ("/" in key, key))
    flat = [key for key in others if len({value for _, value in run.series[key]}) == 1]
    moving = [key for key in others if key not in flat]
    for heading, keys in (("How it went", leading), ("Further metrics", moving)):
        if keys:
            charts = "".join(_curve(key, run.series[key], span) for key in keys)
            yield f"<h2>{heading}</h2><div class=charts>{charts}</div>"
    if flat:
        values = ", ".join(f"{key} {number(run.series[key][0][1])}" for key in flat)
        yield f"<p class=quiet>The same in all steps: {escape(values)}.</p>"


def _curve(key: str, points: Sequence[tuple[int, float]], span: tuple[int, int]) -> str:
    lost = sum(value != value for _, value in points)
    warning = f" <b class=bad>{lost} of {len(points)} not finite</b>" if lost else ""
    chart = line_chart(points, span, _unit(key))
    return f"<figure><figcaption><b>{escape(key)}</b>{warning}</figcaption>{chart}</figure>"


def _unit(key: str) -> str:
    """What a metric is measured in, as its name tells."""
    thing, per_second, _ = key.rpartition("/")[2].partition("_per_s")
    unit = "tokens" if "length" in thing else UNITS.get(thing.rpartition("_")[2], "")
    return f"{unit or thing} per second" if per_second else unit


def _times(run: Run) -> Iterator[str]:
    """Where the time went: a table of the stages, bars for each step, a timeline of some."""
    starts = [start for start in run.starts if start.spans]
    if not starts:
        yield "<h2>Time</h2><p>The run has no trace of a command yet.</p>"
        return
    found = stages(starts)
    kinds = [(*kind, found[kind[0]]) for kind in zip(found, COLOURS, strict=False)]
    rest = [call for calls in list(found.values())[len(COLOURS) :] for call in calls]
    kinds += [(*REST, rest)] if rest else []
    yield "<h2>Time per stage</h2>"
    yield _shares(kinds, sum(start.end_s - start.began_s for start in starts))
    if run.steps:
        yield _per_step(kinds, run.steps)
        yield _timeline(run, {name: colour for name, colour, _ in kinds})
    trace = '<a href="https://ui.perfetto.dev">Perfetto</a> shows the whole of trace/.'
    yield f"<p class=quiet>{trace}</p>"


def _shares(kinds: Sequence[Stage], wall_s: float) -> str:
    """A row per stage."""
    rows = []
    for name, colour, calls in kinds:
        typical = _time(median(end - begin for begin, end in calls))
        row = _share(name, colour, total(union(calls)), wall_s)
        rows.append((*row, str(len(calls)), typical))
    busy = union(call for _, _, calls in kinds for call in calls)
    rows.append((*_share(*IDLE, wall_s - total(busy), wall_s), "", ""))
    head = ["stage", "share of the run", "", "time", "calls", "median call"]
    note = (
        "From the start to the last command's end. A call lasts from its first beginning on any "
        "rank to its last end; stages on different ranks may overlap. No command runs while data "
        "is read at the start, and while the driver itself works."
    )
    return _table(head, rows, raw=True) + f"<p class=quiet>{note}</p>"


def _share(name: str, colour: str, seconds: float, wall_s: float) -> tuple[str, str, str, str]:
    """The cells of a share: name, bar, per cent, time."""
    share = seconds / wall_s
    chip = f'<span class=chip style="background:{colour}"></span>'
    bar = f'<div class=bar style="width:{share * 300:.0f}px;background:{colour}"></div>'
    return chip + escape(name), bar, f"{share:.1%}", _time(seconds)


def _per_step(kinds: Sequence[Stage], steps: Sequence[Step]) -> str:
    """Seconds of each step by stage."""
    busy = in_steps((call for _, _, calls in kinds for call in calls), steps)
    idle = [step.end_s - step.begin_s - taken for step, taken in zip(steps, busy, strict=True)]
    columns = zip(*(in_steps(calls, steps) for _, _, calls in kinds), idle, strict=True)
    bars = [(step.number, column) for step, column in zip(steps, columns, strict=True)]
    took = median(step.end_s - step.begin_s for step in steps)
    note = (
        f"A step takes {_time(took)} (median). It begins when the one before it has logged its "
        "metrics, so what follows that, such as validation or a checkpoint, counts to the next. "
        "The first step of a start is left out."
    )
    chart = stacked_bars(bars, [*(kind[:2] for kind in kinds), IDLE], "seconds")
    return f"<h3>Seconds of each step</h3><p class=quiet>{note}</p><figure>{chart}</figure>"


def _timeline(run: Run, colours: Mapping[str, str]) -> str:
    """What each rank did in some steps from the middle of the newest start."""
    start = run.starts[-1]
    steps = [step for step in run.steps if step.begin_s >= start.began_s] or run.steps
    first = max((len(steps) - TIMELINE_STEPS) // 2, 0)
    steps = steps[first : first + TIMELINE_STEPS]
    begin, end = steps[0].begin_s, steps[-1].end_s
    rows: dict[int, list[Bar]] = {}
    for s in (span for one in run.starts for span in one.spans):
        if s.begin_s < end and s.end_s > begin:
            title = f"{s.stage}, rank {s.rank}: {_time(s.end_s - s.begin_s)}"
            edges = max(s.begin_s, begin) - begin, min(s.end_s, end) - begin
            rows.setdefault(s.rank, []).append(Bar(*edges, colours.get(s.stage, REST[1]), title))
    shown = sorted(rows)[:TIMELINE_RANKS]
    marks = [(step.begin_s - begin, f"step {step.number}") for step in steps]
    labelled = [(start.ranks.get(rank, f"rank {rank}"), rows[rank]) for rank in shown]
    left_out = f" Of {len(rows)} ranks the first {len(shown)}." if len(rows) > len(shown) else ""
    note = f"From the middle of the run, colours as above.{left_out}"
    chart = timeline(labelled, marks, end - begin, "seconds")
    return (
        f"<h3>Timeline of the ranks: steps {steps[0].number} to {steps[-1].number}</h3>"
        f"<p class=quiet>{note}</p><figure>{chart}</figure>"
    )


def _whole_config(run: Run) -> str:
    text = escape(yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True))
    return f"<h2>Settings</h2><details><summary>all of them</summary><pre>{text}</pre></details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], raw: bool = False) -> str:
    """A table; `raw`: its cells are HTML already."""
    if not rows:
        return ""
    cells = [["".join(f"<td>{c if raw else escape(c)}</td>" for c in row)] for row in rows]
    top = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if head else ""
    return f"<table>{top}{''.join(f'<tr>{row}</tr>' for (row,) in cells)}</table>"


def _time(seconds: float) -> str:
    """For people: 2 h 5 min, 3 min 20 s, 4.2 s, 12 ms."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1040px; margin: 2em auto;
       padding: 0 1em; }
h1 { margin-bottom: 0; } h2 { margin: 1.8em 0 0.6em; border-bottom: 1px solid #ddd; }
h3 { margin: 1.4em 0 0; font-size: 1em; } table { border-collapse: collapse; margin: 0.6em 0; }
td, th { padding: 2px 18px 2px 0; text-align: left; font-variant-numeric: tabular-nums; }
th { font-weight: 600; color: #666; } .quiet { color: #666; margin: 0.3em 0; } .bad { color: #b00; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 14px; }
figure { margin: 0; } svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11px; fill: #555; } .grid { stroke: #e8e8e8; } .axis { stroke: #888; }
.line { fill: none; stroke: #4c78a8; stroke-width: 1.6; stroke-linejoin: round; }
.band { fill: #4c78a8; opacity: 0.2; } .dot { fill: #4c78a8; } .hover { fill: transparent; }
.hover:hover { fill: #4c78a8; } .mark { stroke: #888; stroke-dasharray: 3 3; }
.bar { height: 12px; min-width: 1px; }
.chip { display: inline-block; width: 11px; height: 11px; margin-right: 7px; }
pre { font-size: 12px; line-height: 1.35; }
"""
