"""From responses to scores: which functions judge a row, and what their failures mean."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from roll_td.config.classes import import_object
from roll_td.config.rewards import RewardArgs, RewardFunction, Rewards, listed, tag_of
from roll_td.config.signatures import check_settings, columns_of
from roll_td.metrics import Mean, Metric, Sum
from roll_td.rewards.pool import Call, Outcome, Pool, run_call

SHOWN_GOLDS = 5
"""Ground truths that a report names."""
SHOWN_CHARACTERS = 200
"""Of each value of a row, in an error."""

Columns = Mapping[str, Sequence[Any]]
"""Name → one object a row; all of one length."""


@dataclass(frozen=True)
class Verdict:
    """What B responses are worth."""

    scores: list[float]
    """(B,) NaN for "no score"."""
    parts: dict[str, list[float]]
    """Label → (B,) what that function said, before its weight; NaN too where it wasn't asked.
    Empty unless some domain has several functions."""
    metrics: dict[str, Metric]
    """For each function: its mean; how often it failed, took too long, and gave no score."""


class Judge:
    """Scores responses as `rewards` says. ValueError for a function that can't be imported, or
    whose settings aren't these."""

    def __init__(self, rewards: Rewards, processes: int, logger: logging.Logger) -> None:
        self._functions = listed(rewards)
        self._logger = logger
        self._logged: set[str] = set()
        flat = [args for functions in self._functions.values() for args in functions]
        # two functions of one name may need different columns
        self._needs = {id(args): _columns(args) for args in flat}
        limited = {args.path.rpartition(".")[0] for args in flat if args.timeout_s is not None}
        self._pool = Pool(processes, sorted(limited)) if limited else None
        for args in {repr((args.name, args.settings)): args for args in flat}.values():
            self._check_start(args)

    def score(self, columns: Columns) -> Verdict:
        """The verdict on all rows; which functions judge a row says its `domain`, if there is one.

        ValueError for a domain without a reward and for a column that a function needs and that
        isn't there; RuntimeError where a function with on_error: fail raises.
        """
        tags, rows = self._tags(columns), _rows(columns)
        asked = [(args, tag, row) for row, tag in enumerate(tags) for args in self._functions[tag]]
        outcomes = self._run(
            [
                (args, args.path, _values(args, self._needs[id(args)], columns, row))
                for args, _, row in asked
            ]
        )
        scores = [0.0] * rows
        several = any(len(functions) > 1 for functions in self._functions.values())
        labels = {args.label for functions in self._functions.values() for args in functions}
        parts = {label: [math.nan] * rows for label in sorted(labels)} if several else {}
        found: dict[str, list[tuple[Outcome, float]]] = {}
        for (args, tag, row), outcome in zip(asked, outcomes, strict=True):
            key = f"reward/{tag}/{args.label}"
            value = self._value(args, key, outcome, columns, row)
            scores[row] += args.weight * value
            if several:
                parts[args.label][row] = value
            found.setdefault(key, []).append((outcome, value))
        return Verdict(scores, parts, _metrics(found))

    def check_golds(self, columns: Columns) -> dict[str, Metric]:
        """What share of the distinct ground truths has no meaning for its reward, and what share of
        the others it does not find equal to itself; for rewards that compare by meaning. Logs the
        first of both. RuntimeError and ValueError as `score`."""
        metrics: dict[str, Metric] = {}
        tags = self._tags(columns)
        for tag in dict.fromkeys(tags):
            for args in self._functions[tag]:
                if isinstance(args.row, RewardFunction) and args.row.gold_check is not None:
                    own = [row for row, its in enumerate(tags) if its == tag]
                    needed = args.row.gold_columns
                    golds = {row: _values(args, needed, columns, row) for row in own}
                    distinct = {repr(gold): row for row, gold in golds.items()}
                    rows = {row: golds[row] for row in sorted(distinct.values())}
                    metrics |= self._check_golds(args, args.row.gold_check, tag, columns, rows)
        return metrics

    def _check_start(self, args: RewardArgs) -> None:
        if isinstance(args.row, RewardFunction) and args.row.start_check is not None:
            told = import_object(args.row.start_check)(**args.arguments)
            if told is not None:
                self._logger.warning("reward %s: %s", args.label, told)

    def _check_golds(
        self,
        args: RewardArgs,
        path: str,
        tag: str,
        columns: Columns,
        rows: dict[int, tuple[Any, ...]],
    ) -> dict[str, Metric]:
        outcomes = self._run([(args, path, gold) for gold in rows.values()])
        golds = [gold[0] if len(gold) == 1 else gold for gold in rows.values()]
        key = f"reward/{tag}/{args.label}"
        values = [
            self._value(args, key, outcome, columns, row)
            for outcome, row in zip(outcomes, rows, strict=True)
        ]
        without = [gold for gold, value in zip(golds, values, strict=True) if math.isnan(value)]
        unequal = [gold for gold, value in zip(golds, values, strict=True) if value == 0]
        for what, bad in (("have no meaning", without), ("do not equal themselves", unequal)):
            if bad:
                share = f"{len(bad) / len(golds):.1%} of {len(golds)} distinct ground truths"
                shown = ", ".join(f"{gold!r:.80}" for gold in bad[:SHOWN_GOLDS])
                self._logger.warning("%s: %s %s: %s", key, share, what, shown)
        known = len(golds) - len(without)
        return {
            f"{key}/golds_without_meaning": Mean(len(without) / len(golds), len(golds)),
            f"{key}/golds_unequal": Mean(len(unequal) / max(known, 1), known),
        }

    def close(self) -> None:
        """End the processes there are."""
        if self._pool is not None:
            self._pool.close()

    def _tags(self, columns: Columns) -> list[str]:
        domains = columns["domain"] if "domain" in columns else [None] * _rows(columns)
        return [tag_of(self._functions, domain) for domain in domains]

    def _run(self, asked: list[tuple[RewardArgs, str, tuple[Any, ...]]]) -> list[Outcome]:
        """Outcomes in order; calls with a time limit run in the pool, all at once, and those that
        only wait on threads."""
        calls = [
            Call(path, arguments, args.arguments, args.timeout_s) for args, path, arguments in asked
        ]
        pooled = [at for at, call in enumerate(calls) if call.timeout_s is not None]
        waiting = [at for at, (args, _, _) in enumerate(asked) if _waits(args)]
        outcomes: dict[int, Outcome] = {}
        if pooled:
            assert self._pool is not None, "a limit makes a pool"
            ran = self._pool.run([calls[at] for at in pooled])
            outcomes |= zip(pooled, ran, strict=True)
        if waiting:
            most = max(asked[at][0].arguments["concurrency"] for at in waiting)
            with ThreadPoolExecutor(most) as threads:
                ran = list(threads.map(run_call, [calls[at] for at in waiting]))
            outcomes |= zip(waiting, ran, strict=True)
        return [outcomes[at] if at in outcomes else run_call(call) for at, call in enumerate(calls)]

    def _value(
        self, args: RewardArgs, key: str, outcome: Outcome, columns: Columns, row: int
    ) -> float:
        """What the outcome means by the function's policies."""
        if outcome.kind == "value":
            return outcome.value
        policy = args.on_error if outcome.kind == "error" else args.on_timeout
        shown = {
            name: columns[name][row]
            for name in ("prompt", *self._needs[id(args)])
            if name in columns
        }
        values = "\n".join(
            f"{name}: {value!r:.{SHOWN_CHARACTERS}}" for name, value in shown.items()
        )
        if policy == "fail":
            fix = "mend it, or set its on_error to skip or zero"
            raise RuntimeError(f"{key}: the function raised; {fix}\n{values}\n{outcome.text}")
        if f"{key} {outcome.kind}" not in self._logged:
            self._logged.add(f"{key} {outcome.kind}")
            said = outcome.text or f"took more than {args.timeout_s} s, or ended its process"
            self._logger.warning(
                "%s: the first %s (%s)\n%s\n%s", key, outcome.kind, policy, values, said
            )
        return math.nan if policy == "skip" else 0.0


def _waits(args: RewardArgs) -> bool:
    return args.timeout_s is None and isinstance(args.row, RewardFunction) and args.row.waits


def _columns(args: RewardArgs) -> tuple[str, ...]:
    if args.columns is not None:
        return args.columns
    function = import_object(args.path)
    check_settings(function, args.settings)
    return columns_of(function)


def _values(args: RewardArgs, needed: Sequence[str], columns: Columns, row: int) -> tuple[Any, ...]:
    if missing := [name for name in needed if name not in columns]:
        there = f"there are {', '.join(sorted(columns))}"
        fix = "keep them (data.keep), or change its positional parameters"
        raise ValueError(f"reward {args.name} needs columns {missing}; {there}; {fix}")
    return tuple(columns[name][row] for name in needed)


def _rows(columns: Columns) -> int:
    return len(next(iter(columns.values()), ()))


def _metrics(found: Mapping[str, Sequence[tuple[Outcome, float]]]) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    for key, pairs in found.items():
        values = [value for _, value in pairs if not math.isnan(value)]
        kinds = [outcome.kind for outcome, _ in pairs]
        metrics[key] = Mean(math.fsum(values) / max(len(values), 1), len(values))
        metrics[f"{key}/errors"] = Sum(kinds.count("error"))
        metrics[f"{key}/timeouts"] = Sum(kinds.count("timeout"))
        silent = [
            outcome for outcome, value in pairs if outcome.kind == "value" and math.isnan(value)
        ]
        metrics[f"{key}/no_score"] = Sum(len(silent))
    return metrics
