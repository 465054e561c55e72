"""Roles of the job that judge: models that the reward llm_judge asks. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roll_td.config.base import WorkerConfig
from roll_td.config.function_settings import require
from roll_td.config.reward_settings import JudgeSettings
from roll_td.config.rewards import RewardArgs, Rewards, listed
from roll_td.config.schema import Problem
from roll_td.config.text import fill_in
from roll_td.config.vllm import room_problems


@dataclass
class JudgeConfig(WorkerConfig):
    """A role that is asked what answers are worth. Its model has its own tokenizer, and its chat
    template if it has one; without a model it is that of the pipeline as it was at the start."""

    max_length: int = 4096
    """Most tokens of a question. One with more is not asked: an error of the reward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, max_length=(self.max_length >= 1, "must be at least 1"))


Judges = dict[str, JudgeConfig]
"""By the name that rewards have in settings.role."""


def fill_in_judges(judges: Judges, beside: WorkerConfig) -> None:
    """What their sections leave out: devices are those of the role `beside`."""
    for key, role in judges.items():
        role.name = role.name or f"judge_{key}"
        fill_in(role, "hf_infer", "roll_td.workers.generation.GenerationWorker", beside)


def asking(rewards: Rewards) -> dict[str, tuple[RewardArgs, JudgeSettings]]:
    """The rewards that ask a role, by domain; no domain has two of one name."""
    found = {}
    for tag, functions in listed(rewards).items():
        for args in functions:
            settings = args.settings_read if args.row is not None else None
            if isinstance(settings, JudgeSettings) and settings.role is not None:
                found[tag] = args, settings
    return found


def judge_problems(rewards: Rewards, judges: Mapping[str, JudgeConfig]) -> Iterator[Problem]:
    """If a role is asked that is not there, or nobody asks one that is, or it can't answer; with
    the whole keys."""
    asked = {tag: str(settings.role) for tag, (_, settings) in asking(rewards).items()}
    for tag, role in asked.items():
        if role not in judges:
            there = f"there are {', '.join(judges)}" if judges else "there are none"
            fix = f"add it: judges: {{{role}: {{model: {{path: …}}}}}}"
            key = f"rewards.{tag}.settings.role"
            yield Problem(key, repr(role), f"is none of judges: {there}", fix)
    for name, config in judges.items():
        key = f"judges.{name}"
        if name not in asked.values():
            fix = f"name it in a reward llm_judge (settings.role: {name}), or drop it"
            yield Problem(key, "{…}", "is given and no reward asks it", fix)
        assert config.strategy_args is not None, "roles have been filled in"
        if not config.strategy_args.row.generates:
            value = repr(config.strategy_args.strategy_name)
            strategy = f"{key}.strategy_args.strategy_name"
            yield Problem(strategy, value, "is a strategy that can't generate", "")
        limit = f"{key}.max_length"
        yield from (p.under(key) for p in room_problems(config, config.max_length, limit))
        if (samples := config.generation.num_return_sequences) != 1:
            fix = "leave it out; attempts of the reward says how often a question is asked"
            where = f"{key}.generation.num_return_sequences"
            yield Problem(where, repr(samples), "must be 1: a judge says one thing", fix)
