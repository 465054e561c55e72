"""Advantages and losses by name, and what `settings` of each may hold. No torch here.

A function takes columns of the batch by position and its settings by keyword. One of the user's
own is named by its dotted path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, ClassVar

from roll_td.config.classes import import_object
from roll_td.config.function_settings import (
    AdaptiveSettings,
    CispoSettings,
    DiscountSettings,
    GaeSettings,
    GigpoSettings,
    GrpoSettings,
    JsdSettings,
    KimiSettings,
    NoSettings,
    PpoSettings,
    PreferenceSettings,
    SigmoidSettings,
    SkewSettings,
    TisSettings,
    ToprSettings,
    TurnSettings,
)
from roll_td.config.schema import ConfigError, Problem, read
from roll_td.config.signatures import check_settings


@dataclass(frozen=True)
class Function:
    """A row of a table."""

    path: str
    """Dotted path of the function."""
    settings_cls: type[Any] = NoSettings
    """What its settings are read into; a field for each keyword-only parameter."""
    compares: bool = False
    """Whether it learns nothing from a group of one response."""
    critic: bool = False
    """Whether it needs a critic's values."""
    states: bool = False
    """Whether it needs the states of an environment that turns began in."""
    of_advantage: bool = True
    """Of a policy loss: whether it is a multiple of the advantage, so that nothing is learnt where
    that is 0."""


_ADVANTAGES = "roll_td.algorithms.advantages."
_TURNS = "roll_td.algorithms.turn_advantages."
_LOSSES = "roll_td.algorithms.losses."
_OFF_POLICY = "roll_td.algorithms.off_policy_losses."

ADVANTAGES = {
    "grpo": Function(_ADVANTAGES + "grpo", GrpoSettings, compares=True),
    "rloo": Function(_ADVANTAGES + "rloo", compares=True),
    "reinforce": Function(_ADVANTAGES + "reinforce", DiscountSettings),
    "reinforce++": Function(_ADVANTAGES + "reinforce_pp", DiscountSettings),
    "reinforce++_baseline": Function(_ADVANTAGES + "reinforce_pp_baseline"),
    "turn_reinforce": Function(_TURNS + "turn_reinforce", TurnSettings),
    "gigpo": Function(_TURNS + "gigpo", GigpoSettings, compares=True, states=True),
    "gae": Function(_ADVANTAGES + "gae", GaeSettings, critic=True),
}

POLICY_LOSSES = {
    "ppo": Function(_LOSSES + "ppo", PpoSettings),
    "cispo": Function(_LOSSES + "cispo", CispoSettings),
    "reinforce": Function(_LOSSES + "reinforce"),
    "tis": Function(_OFF_POLICY + "tis", TisSettings),
    "topr": Function(_OFF_POLICY + "topr", ToprSettings),
    "kimi15": Function(_OFF_POLICY + "kimi15", KimiSettings, of_advantage=False),
}

_PREFERENCE = "roll_td.algorithms.preference."
_DISTILLATION = "roll_td.algorithms.distillation."

PREFERENCE_LOSSES = {
    "sigmoid": Function(_PREFERENCE + "sigmoid", SigmoidSettings),
    "hinge": Function(_PREFERENCE + "hinge", PreferenceSettings),
    "ipo": Function(_PREFERENCE + "ipo", PreferenceSettings),
}

DIVERGENCES = {
    "forward_kl": Function(_DISTILLATION + "forward_kl"),
    "reverse_kl": Function(_DISTILLATION + "reverse_kl"),
    "skewed_forward_kl": Function(_DISTILLATION + "skewed_forward_kl", SkewSettings),
    "skewed_reverse_kl": Function(_DISTILLATION + "skewed_reverse_kl", SkewSettings),
    "jsd": Function(_DISTILLATION + "jsd", JsdSettings),
    "adaptive_kl": Function(_DISTILLATION + "adaptive_kl", AdaptiveSettings),
}


@dataclass
class FunctionArgs:
    """A function and its settings."""

    name: str
    """A name of the table, or the dotted path of a function of your own."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Its own settings."""
    table: ClassVar[Mapping[str, Function]] = {}

    def __post_init__(self) -> None:
        row = self.row
        if row is None and "." not in self.name:
            near = get_close_matches(self.name, self.table, 1)
            fix = f"did you mean {near[0]}?" if near else "or give a dotted path of your own"
            rule = f"is none of {', '.join(self.table)}"
            raise ConfigError([Problem("name", repr(self.name), rule, fix)])
        problems = read(row.settings_cls, self.settings).problems if row else []
        if problems:
            raise ConfigError([problem.under("settings") for problem in problems])

    @property
    def row(self) -> Function | None:
        """Its row of the table; None for a function of the user's own."""
        return self.table.get(self.name)

    @property
    def path(self) -> str:
        """Dotted path of the function."""
        return self.row.path if self.row else self.name

    @property
    def arguments(self) -> dict[str, Any]:
        """Its keyword arguments: the settings, and the defaults of those left out."""
        return self.settings if self.row is None else vars(self.settings_read)

    def own_problems(self) -> list[Problem]:
        """What is wrong with a function of the user's own, which is imported: that there is none,
        or that it does not take its settings."""
        if self.row is not None:
            return []
        try:
            function = import_object(self.name)
            if not callable(function):
                raise ValueError(f"is a {type(function).__name__}; name a function")
        except ValueError as error:
            return [_problem("name", repr(self.name), error)]
        try:
            check_settings(function, self.settings)
        except ValueError as error:
            return [_problem("settings", "", error)]
        return []

    @cached_property
    def settings_read(self) -> Any:
        """For a name of the table: its settings as an object of the row's class. Made once, as a
        reward asks for each response."""
        assert self.row is not None, "a function of the user's own has no class of settings"
        return read(self.row.settings_cls, self.settings).value


def _problem(key: str, shown: str, error: ValueError) -> Problem:
    rule, _, fix = str(error).rpartition("; ")
    return Problem(key, shown, rule or fix, fix if rule else "")


def functions_in(value: object, key: str = "") -> Iterator[tuple[str, FunctionArgs]]:
    """The functions that a config names, by dotted key."""
    if isinstance(value, FunctionArgs):
        yield key, value
        return
    parts: Iterable[tuple[object, object]] = ()
    if isinstance(value, list):
        parts = enumerate(value)
    elif isinstance(value, Mapping):
        parts = value.items()
    elif is_dataclass(value):
        parts = ((f.name, getattr(value, f.name)) for f in fields(value))
    for name, part in parts:
        yield from functions_in(part, f"{key}.{name}" if key else str(name))


@dataclass
class AdvantageArgs(FunctionArgs):
    """How advantages are made."""

    name: str = "grpo"
    """A name of ADVANTAGES, or the dotted path of a function of your own."""
    table: ClassVar[Mapping[str, Function]] = ADVANTAGES


@dataclass
class PolicyLossArgs(FunctionArgs):
    """What the policy minimises."""

    name: str = "ppo"
    """A name of POLICY_LOSSES, or the dotted path of a function of your own."""
    table: ClassVar[Mapping[str, Function]] = POLICY_LOSSES


@dataclass
class PreferenceLossArgs(FunctionArgs):
    """What is learnt from a pair."""

    name: str = "sigmoid"
    """A name of PREFERENCE_LOSSES, or the dotted path of a function of your own."""
    table: ClassVar[Mapping[str, Function]] = PREFERENCE_LOSSES


@dataclass
class DivergenceArgs(FunctionArgs):
    """How a student is told from its teacher."""

    name: str = "forward_kl"
    """A name of DIVERGENCES, or the dotted path of a function of your own."""
    table: ClassVar[Mapping[str, Function]] = DIVERGENCES
