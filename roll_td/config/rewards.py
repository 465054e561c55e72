"""Rewards by domain: which functions say what a response is worth. No torch here.

A reward function is given one response: `f(response, ground_truth, …, *, setting, …) -> float |
None`. Its positional parameters have names of columns of the batch that hold an object a row, and
get that row's; keyword-only ones are settings. None or NaN is "no score".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from roll_td.config.base import WorkerConfig
from roll_td.config.classes import import_object
from roll_td.config.function_settings import require
from roll_td.config.functions import Function, FunctionArgs, functions_in
from roll_td.config.reward_settings import (
    REPLY,
    ChoiceSettings,
    CodeSettings,
    ExactMatchSettings,
    FormatSettings,
    InstructionSettings,
    JudgeSettings,
    MathRuleSettings,
)
from roll_td.config.schema import ConfigError, Problem
from roll_td.config.signatures import columns_of

DEFAULT = "default"
"""The tag whose rewards judge the rows of all domains that have none, and rows without domain."""


@dataclass(frozen=True, kw_only=True)
class RewardFunction(Function):
    """A row of the table."""

    columns: tuple[str, ...] = ()
    """Names of its positional parameters; empty: its settings name them."""
    timeout_s: float | None = None
    """Seconds it may take for a response, where the config says nothing; None: no limit."""
    waits: bool = False
    """Whether it does nothing but wait for an answer: then its setting `concurrency` says how many
    calls run on threads at the same time."""
    gold_check: str | None = None
    """Dotted path of a function of `gold_columns` and the same settings: 1 if that ground truth
    equals itself by this reward, 0 if not, None if it has no meaning."""
    gold_columns: tuple[str, ...] = ("ground_truth",)
    """Names of its positional parameters."""
    start_check: str | None = None
    """Dotted path of a function of the same settings, called where rewards are to run before the
    first: what is to be told in the log, or None. It raises for what is missing there."""


_REWARDS = "roll_td.rewards."

REWARDS = {
    "math_rule": RewardFunction(
        path=_REWARDS + "math_rule.math_rule",
        settings_cls=MathRuleSettings,
        columns=("response", "ground_truth"),
        timeout_s=5.0,
        gold_check=_REWARDS + "math_rule.gold_equals_itself",
    ),
    "exact_match": RewardFunction(
        path=_REWARDS + "texts.exact_match",
        settings_cls=ExactMatchSettings,
        columns=("response", "ground_truth"),
    ),
    "format": RewardFunction(
        path=_REWARDS + "texts.format_match", settings_cls=FormatSettings, columns=("response",)
    ),
    "code": RewardFunction(
        path=_REWARDS + "unit_tests.code",
        settings_cls=CodeSettings,
        columns=("response", "ground_truth"),
        timeout_s=60.0,
        gold_check=_REWARDS + "unit_tests.have_meaning",
        start_check=_REWARDS + "unit_tests.check_sandbox",
    ),
    "instruction": RewardFunction(
        path=_REWARDS + "instruction.instruction",
        settings_cls=InstructionSettings,
        columns=("response", "instruction_id_list", "kwargs"),
        timeout_s=10.0,
        gold_check=_REWARDS + "instruction.constraints_have_meaning",
        gold_columns=("instruction_id_list", "kwargs"),
    ),
    "multiple_choice": RewardFunction(
        path=_REWARDS + "choice.multiple_choice",
        settings_cls=ChoiceSettings,
        columns=("response", "ground_truth"),
        gold_check=_REWARDS + "choice.letter_exists",
    ),
    "multiple_choice_options": RewardFunction(
        path=_REWARDS + "choice.multiple_choice_options",
        columns=("response", "ground_truth", "options"),
        gold_check=_REWARDS + "choice.option_exists",
        gold_columns=("ground_truth", "options"),
    ),
    "llm_judge": RewardFunction(
        path=_REWARDS + "llm_judge.llm_judge",
        settings_cls=JudgeSettings,
        waits=True,
        start_check=_REWARDS + "llm_judge.check_key",
    ),
}


@dataclass
class RewardArgs(FunctionArgs):
    """A reward function, and what its failures mean."""

    weight: float = 1.0
    """Its score counts this many times; the scores of a domain's functions are added."""
    on_error: Literal["fail", "skip", "zero"] = "fail"
    """What an exception in it does: end the job, leave the response without a score, score it 0.
    Counted; the first is logged."""
    timeout_s: float | None = None
    """Seconds it may take for a response, in a process of its own that is then ended. None: 5 for
    math_rule; no limit for the others, which then run in the rank itself."""
    on_timeout: Literal["zero", "skip"] = "zero"
    """What a response gets that takes longer, or takes the process down: 0, or no score. With skip
    a wrong answer that can't be checked costs nothing, which a policy may learn. Counted."""
    table: ClassVar[Mapping[str, Function]] = REWARDS

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.row, RewardFunction) and self.timeout_s is None:
            self.timeout_s = self.row.timeout_s
        limited = self.timeout_s is None or 0 < self.timeout_s < math.inf
        require(
            self,
            weight=(math.isfinite(self.weight), "must be a finite number"),
            timeout_s=(limited, "must be a finite number above 0"),
        )

    @property
    def columns(self) -> tuple[str, ...] | None:
        """What it is given of a row; None for a function of the user's own, which says itself."""
        if not isinstance(self.row, RewardFunction):
            return None
        own: tuple[str, ...] = getattr(self.settings_read, "columns", ())
        return self.row.columns or own

    @property
    def label(self) -> str:
        """What metrics and columns call it: the last part of its name."""
        return self.name.rpartition(".")[2]


Rewards = dict[str, RewardArgs | list[RewardArgs]]
"""Value of the column `domain` → the reward, or several that are added. See DEFAULT."""


@dataclass
class RewardWorkerConfig(WorkerConfig):
    """The role that computes rewards; without world_size it has one worker."""

    processes: int = 2
    """Processes of each worker, for rewards with a time limit."""

    def __post_init__(self) -> None:
        if self.device_mapping is None and self.world_size is None:
            self.world_size = 1
        self.worker_cls = self.worker_cls or "roll_td.workers.reward.RewardWorker"
        super().__post_init__()
        require(self, processes=(self.processes >= 1, "must be at least 1"))


def listed(rewards: Rewards) -> dict[str, list[RewardArgs]]:
    """The functions of each domain."""
    return {
        tag: functions if isinstance(functions, list) else [functions]
        for tag, functions in rewards.items()
    }


def tag_of(rewards: Mapping[str, object], domain: object) -> str:
    """The key of `rewards` that judges a domain's rows.

    ValueError for a domain that has none, where there is no DEFAULT either.
    """
    if isinstance(domain, str) and domain in rewards:
        return domain
    if DEFAULT in rewards:
        return DEFAULT
    there = f"there are {', '.join(rewards) or 'none'}"
    fix = f"add it to rewards, or a reward {DEFAULT} for all others"
    raise ValueError(f"domain={domain!r} has no reward: {there}; {fix}")


def check_domains(rewards: Rewards, domains: Iterable[object]) -> None:
    """Raise ConfigError, each domain once, if some of a data set's have no reward."""
    problems = []
    for domain in dict.fromkeys(domains):
        try:
            tag_of(rewards, domain)
        except ValueError as error:
            problems.append(Problem("rewards", "", str(error), ""))
    if problems:
        raise ConfigError(problems)


def reward_problems(rewards: Rewards, columns: Collection[str]) -> list[Problem]:
    """What keeps a run from having rewards, as far as can be told without importing a function of
    the user's own; keys as in Rewards. `columns`: those that a row has when it is judged."""
    if not rewards:
        fix = f"name one: rewards: {{{DEFAULT}: {{name: exact_match}}}}"
        return [Problem("", "", "is empty: nothing says what a response is worth", fix)]
    problems, columns = [], {*columns, REPLY}
    if "domain" not in columns and (tags := [tag for tag in rewards if tag != DEFAULT]):
        rule = "is the reward of a domain, and rows have no column domain"
        fix = f"keep one (data.keep: {{domain: …}}), or call the reward {DEFAULT}"
        problems += [Problem(tag, "", rule, fix) for tag in tags]
    for tag, functions in listed(rewards).items():
        problems += [problem.under(tag) for problem in _problems_of(functions, columns)]
    return problems


def own_reward_problems(rewards: Rewards, columns: Collection[str]) -> list[Problem]:
    """Of functions of the user's own, which are imported where they can be, that they are given
    columns a row does not have; arguments as of reward_problems."""
    problems = []
    for key, args in functions_in(rewards):
        if args.row is None and not args.own_problems():
            needed = columns_of(import_object(args.path))
            problems += [p.under(key) for p in _missing(args, needed, {*columns, REPLY})]
    return problems


def _missing(
    args: FunctionArgs, needed: Iterable[str], columns: Collection[str]
) -> Iterator[Problem]:
    if missing := [name for name in needed if name not in columns]:
        rule = f"{args.name} needs columns that rows don't have: {', '.join(missing)}"
        fix = f"keep them: data.keep: {{{missing[0]}: …}}"
        yield Problem("", "", rule, fix)


def _problems_of(functions: list[RewardArgs], columns: Collection[str]) -> list[Problem]:
    if not functions:
        fix = "name a function, or leave the domain out"
        return [Problem("", "", "is empty: nothing says what a response is worth", fix)]
    problems = []
    labels = [function.label for function in functions]
    for label in dict.fromkeys(label for label in labels if labels.count(label) > 1):
        rule, fix = "is there twice: its columns would have one name", "use each function once"
        problems.append(Problem("name", repr(label), rule, fix))
    for function in functions:
        problems += _missing(function, function.columns or (), columns)
    return problems
