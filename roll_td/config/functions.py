"""Advantages and losses by name, and what `settings` of each may hold. No torch here.

A function takes columns of the batch by position and its settings by keyword. One of the user's
own is named by its dotted path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, ClassVar, Literal

from roll_td.config.schema import ConfigError, Problem, read

Level = Literal["token", "segment-mean", "sequence-mean", "sequence"]
"""What a ratio of probabilities is taken of: a token, the geometric mean over a turn or over the
response, or the response as a whole."""
LEAVE = "leave it out for the default"


def require(owner: object, **rules: tuple[bool, str]) -> None:
    """Raise ConfigError for the fields of `owner` whose (holds, rule) doesn't hold."""
    broken = [
        Problem(name, repr(getattr(owner, name)), rule, LEAVE)
        for name, (holds, rule) in rules.items()
        if not holds
    ]
    if broken:
        raise ConfigError(broken)


@dataclass
class NoSettings:
    """Nothing to set."""


@dataclass
class GrpoSettings:
    """Advantages relative to the group."""

    scale: Literal["group", "batch", "none"] = "group"
    """Over what the standard deviation is taken that advantages are divided by; none: they
    aren't."""
    ddof: Literal[1, 0] = 1
    """1: the sample's deviation, 0: the population's."""


@dataclass
class DiscountSettings:
    """Rewards to come."""

    gamma: float = 1.0
    """Discount for each token."""

    def __post_init__(self) -> None:
        require(self, gamma=(0 <= self.gamma <= 1, "must lie in 0 to 1"))


@dataclass
class GaeSettings:
    """Generalised advantages, with a critic."""

    gamma: float = 1.0
    """Discount for each token of the policy."""
    lam: float = 0.95
    """λ: 1 trusts the rewards (more variance), 0 the critic (more bias)."""

    def __post_init__(self) -> None:
        require(
            self,
            gamma=(0 <= self.gamma <= 1, "must lie in 0 to 1"),
            lam=(0 <= self.lam <= 1, "must lie in 0 to 1"),
        )


@dataclass
class PpoSettings:
    """Ratios held near 1."""

    clip_low: float = 0.2
    """Ratios count down to 1 - this."""
    clip_high: float = 0.2
    """Ratios count up to 1 + this; 0.28 in DAPO."""
    dual_clip: float | None = None
    """Where the advantage is below 0, the loss is at most this times -advantage; above 1, 3 in its
    paper. None: no such bound."""
    ratio_level: Level = "token"
    """Of what the ratio is; sequence-mean is GSPO, to go with aggregation seq-mean-token-mean and
    clips of some 1e-4."""

    def __post_init__(self) -> None:
        require(
            self,
            clip_low=(0 <= self.clip_low <= 1, "must lie in 0 to 1"),
            clip_high=(self.clip_high >= 0, "must be at least 0"),
            dual_clip=(self.dual_clip is None or self.dual_clip > 1, "must be above 1"),
        )


@dataclass
class CispoSettings:
    """Ratios as weights, cut."""

    clip_high: float
    """Weights are at most 1 + this; the paper tunes it and names no value."""
    clip_low: float | None = None
    """Weights are at least 1 - this; None: no bound, as in the paper."""
    ratio_level: Level = "token"
    """Of what the ratio is."""

    def __post_init__(self) -> None:
        require(
            self,
            clip_high=(self.clip_high >= 0, "must be at least 0"),
            clip_low=(self.clip_low is None or 0 <= self.clip_low <= 1, "must lie in 0 to 1"),
        )


@dataclass
class PreferenceSettings:
    """What β is: how much a log ratio weighs, or how near the reference IPO stays."""

    beta: float = 0.1
    """0.1 in DPO's paper."""

    def __post_init__(self) -> None:
        require(self, beta=(self.beta > 0, "must be above 0"))


@dataclass
class SigmoidSettings(PreferenceSettings):
    """DPO."""

    label_smoothing: float = 0.0
    """Probability that a pair is the wrong way round; below 0.5. Above 0: conservative DPO."""

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = 0 <= self.label_smoothing < 0.5
        require(self, label_smoothing=(holds, "must be at least 0 and below 0.5"))


@dataclass
class SkewSettings:
    """A divergence from a mixture."""

    skew: float = 0.1
    """Share of the first distribution in it; 0.1 in DistiLLM's paper."""

    def __post_init__(self) -> None:
        require(self, skew=(0 <= self.skew < 1, "must be at least 0 and below 1"))


@dataclass
class JsdSettings:
    """Generalised Jensen-Shannon divergence."""

    beta: float = 0.5
    """Share of the teacher in the mixture."""

    def __post_init__(self) -> None:
        require(self, beta=(0 < self.beta < 1, "must be above 0 and below 1"))


@dataclass
class AdaptiveSettings:
    """Adaptive KL."""

    head: float = 0.5
    """Probability of the teacher's likeliest entries, which forward KL is for; 0.5 in its paper."""

    def __post_init__(self) -> None:
        require(self, head=(0 < self.head < 1, "must be above 0 and below 1"))


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


_ADVANTAGES = "roll_td.algorithms.advantages."
_LOSSES = "roll_td.algorithms.losses."

ADVANTAGES = {
    "grpo": Function(_ADVANTAGES + "grpo", GrpoSettings, compares=True),
    "rloo": Function(_ADVANTAGES + "rloo", compares=True),
    "reinforce": Function(_ADVANTAGES + "reinforce", DiscountSettings),
    "reinforce++": Function(_ADVANTAGES + "reinforce_pp", DiscountSettings),
    "reinforce++_baseline": Function(_ADVANTAGES + "reinforce_pp_baseline"),
    "gae": Function(_ADVANTAGES + "gae", GaeSettings, critic=True),
}

POLICY_LOSSES = {
    "ppo": Function(_LOSSES + "ppo", PpoSettings),
    "cispo": Function(_LOSSES + "cispo", CispoSettings),
    "reinforce": Function(_LOSSES + "reinforce"),
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
        if self.row is None:
            return self.settings
        return vars(read(self.row.settings_cls, self.settings).value)


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
