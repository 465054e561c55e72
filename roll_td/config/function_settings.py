"""Settings of advantages and losses by name. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll_td.config.schema import ConfigError, Problem

Level = Literal["token", "segment", "segment-mean", "sequence-mean", "sequence"]
"""What a ratio of probabilities is taken of: a token, a turn as a whole, the geometric mean over a
turn or over the response, or the response as a whole."""
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
class TurnSettings:
    """Rewards to come, by turn."""

    gamma: float = 1.0
    """Discount for each turn."""
    baseline: Literal["rows", "turns", "none"] = "rows"
    """What is subtracted: the mean over the group, each response weighing the same, or each turn of
    it; none: nothing."""

    def __post_init__(self) -> None:
        require(self, gamma=(0 <= self.gamma <= 1, "must lie in 0 to 1"))


@dataclass
class GigpoSettings:
    """Advantages relative to the group, and to turns that began in the same state."""

    gamma: float = 0.95
    """Discount for each turn, where turns are compared; 0.95 in its paper."""
    turn_weight: float = 1.0
    """How much the turn's advantage counts beside that of the response; 1 in its paper."""
    scale: Literal["group", "none"] = "group"
    """Whether advantages are divided by the standard deviation of what they are compared with."""
    ddof: Literal[1, 0] = 1
    """1: the sample's deviation, 0: the population's."""

    def __post_init__(self) -> None:
        require(
            self,
            gamma=(0 <= self.gamma <= 1, "must lie in 0 to 1"),
            turn_weight=(self.turn_weight >= 0, "must be at least 0"),
        )


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
class TisSettings:
    """Ratios as weights, cut above."""

    cap: float = 2.0
    """Weights are at most this."""
    ratio_level: Level = "token"
    """Of what the ratio is."""

    def __post_init__(self) -> None:
        require(self, cap=(self.cap > 0, "must be above 0"))


@dataclass
class ToprSettings:
    """Ratios as weights, cut for good and bad tokens in different ways; the defaults are its
    paper's."""

    good_low: float = 1.0
    """Where the advantage is not below 0, weights are at least this, …"""
    good_high: float = 1.0
    """… and at most this."""
    bad_low: float = 0.0
    """Where it is below 0, weights are at least this, …"""
    bad_high: float = 1.0
    """… and at most this."""
    ratio_level: Level = "sequence"
    """Of what the ratio is."""

    def __post_init__(self) -> None:
        good, bad = (self.good_low, self.good_high), (self.bad_low, self.bad_high)
        require(
            self,
            good_low=(0 <= good[0] <= good[1], f"must lie in 0 to good_high={good[1]}"),
            bad_low=(0 <= bad[0] <= bad[1], f"must lie in 0 to bad_high={bad[1]}"),
        )


@dataclass
class KimiSettings:
    """A policy that stays near the one that sampled."""

    tau: float
    """Weight of the squared log ratio, which is halved; its paper names no value."""
    level: Literal["sequence", "token"] = "sequence"
    """Of what the ratio is: the response as a whole, as in the paper, or a token."""

    def __post_init__(self) -> None:
        require(self, tau=(self.tau >= 0, "must be at least 0"))


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
