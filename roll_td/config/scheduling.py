"""Settings of how answers are asked for: in one call, or one by one and ahead of training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from roll_td.config.base import WorkerConfig
from roll_td.config.function_settings import require
from roll_td.config.schema import Problem


@dataclass
class SchedulingConfig:
    """How a pipeline gets its answers."""

    async_generation_ratio: float = 0.0
    """Batches that are answered ahead of training: 0, the answers of a step are all by the weights
    that it starts from; 1, while a step trains the next one's are made, by weights up to a step
    older."""
    deterministic: bool | None = None
    """Prompts are dealt out evenly and answered in one call, so that a run repeats bit for bit;
    else each answer goes to the engine with the fewest, and is scored while others are made. None:
    where async_generation_ratio is 0."""
    in_flight_per_engine: int = 64
    """Answers that an engine is asked for at once; a few more than it has at work at once."""
    in_flight: Literal["keep", "abort"] = "keep"
    """What becomes of answers that new weights meet half made. keep: they go on where they are;
    abort: they go to the engine with the fewest. Either goes on with the tokens that it has."""
    max_staleness: int | None = None
    """Steps that the weights of a token may be behind those that learn from it; None: as many as
    async_generation_ratio comes to."""
    stale: Literal["refuse", "correct"] = "refuse"
    """Answers with an older token: refuse, they are made anew; correct, they are learnt from, with
    the weights that algorithm.importance_weights gives them."""
    request_timeout_s: float = 1800.0
    """Seconds after which an engine that has not given an answer counts as failed."""
    on_engine_failure: Literal["fail", "reroute"] = "fail"
    """When an engine fails: fail ends the job; reroute has the others make its answers. A rank that
    dies ends the job in any case."""

    def __post_init__(self) -> None:
        ratio, age = self.async_generation_ratio, self.max_staleness
        require(
            self,
            async_generation_ratio=(0 <= ratio < math.inf, "must be at least 0"),
            in_flight_per_engine=(self.in_flight_per_engine >= 1, "must be at least 1"),
            max_staleness=(age is None or age >= 0, "must be at least 0"),
            request_timeout_s=(self.request_timeout_s > 0, "must be above 0 seconds"),
            deterministic=(
                not (self.deterministic and ratio),
                "needs async_generation_ratio 0: else time says which weights make a token",
            ),
        )

    @property
    def by_requests(self) -> bool:
        """Whether answers are asked for one by one."""
        return bool(self.async_generation_ratio) or self.deterministic is False

    @property
    def oldest(self) -> int:
        """Steps that a token's weights may be behind."""
        given = self.max_staleness
        return math.ceil(self.async_generation_ratio) if given is None else given


def _promises(scheduling: SchedulingConfig, engines: WorkerConfig) -> Iterator[Problem]:
    """What is said of an engine that fails, where all is asked in one call."""
    none = SchedulingConfig()
    for name in ("request_timeout_s", "on_engine_failure"):
        given = getattr(scheduling, name)
        if given != getattr(none, name):
            rule = "says nothing where all is asked in one call, async_generation_ratio being 0"
            fix = "set deterministic: false, which asks one by one"
            args = engines.strategy_args
            if name == "request_timeout_s" and args is not None and args.strategy_name == "vllm":
                fix += ", or strategy_config.request_timeout_s"
            yield Problem(name, repr(given), rule, fix)


def scheduling_problems(
    scheduling: SchedulingConfig,
    engines: WorkerConfig,
    beside: dict[str, WorkerConfig],
    corrects: bool,
) -> Iterator[Problem]:
    """If the role that answers can't do it like this. `beside`: roles that work while it does;
    `corrects`: whether the algorithm has importance weights."""
    if not scheduling.by_requests:
        yield from _promises(scheduling, engines)
        return
    assert engines.strategy_args is not None, "roles have been filled in"
    if not engines.strategy_args.row.serves:
        key, name = "deterministic", engines.strategy_args.strategy_name
        fix = "leave async_generation_ratio and deterministic out"
        yield Problem(key, "false", f"{name} takes no requests while it answers", fix)
    ratio = scheduling.async_generation_ratio
    own = engines.device_mapping
    for name, role in beside.items():
        theirs = role.device_mapping
        shared = set(own if isinstance(own, list) else ()) & set(
            theirs if isinstance(theirs, list) else ()
        )
        if ratio and shared:
            rule = f"{engines.name} and {name} share devices {sorted(shared)}"
            fix = "give each device_mapping its own devices, or set it to 0"
            yield Problem("async_generation_ratio", repr(ratio), rule, fix)
    is_older = scheduling.oldest < ratio
    if scheduling.stale == "correct" and is_older and not corrects:
        rule, fix = "has no importance weights to do it", "set algorithm.importance_weights"
        yield Problem("stale", "correct", rule, fix)
