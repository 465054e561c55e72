"""Settings of an RL algorithm: what happens to scores, advantages and losses. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from roll_td.config.function_settings import Level, require
from roll_td.config.functions import AdvantageArgs, PolicyLossArgs
from roll_td.config.model import GenerationConfig
from roll_td.config.schema import Problem
from roll_td.config.weighting import DifficultyWeightConfig, LengthWeightConfig

Statistic = Literal["none", "group", "batch", "running"]
"""Over which scores: the responses to one prompt, those of the step, all so far."""


@dataclass
class OverlongConfig:
    """A penalty that grows over the last tokens a response may have."""

    buffer_tokens: int
    """It grows over this many."""
    penalty: float = 1.0
    """What it reaches at the longest response."""

    def __post_init__(self) -> None:
        require(
            self,
            buffer_tokens=(self.buffer_tokens >= 1, "must be at least 1"),
            penalty=(self.penalty >= 0, "must be at least 0"),
        )


@dataclass
class ScoresConfig:
    """What happens to scores, in this order, before advantages are made of them."""

    length_weight: LengthWeightConfig | None = None
    """Weight of right answers by their length beside others of the group; None: none."""
    overlong: OverlongConfig | None = None
    """Penalty of long responses; None: none."""
    clip_low: float | None = None
    """Scores below become this; None: no bound."""
    clip_high: float | None = None
    """Scores above become this; None: no bound."""
    mask_truncated: bool = False
    """Leave out responses that were cut off at the longest length, of losses and statistics."""
    drop_without_signal: bool = False
    """Leave out groups whose scores are all equal; a KL or entropy term then misses them too."""
    mean: Statistic = "none"
    """Of what the mean is that is subtracted."""
    std: Statistic = "none"
    """Of what the standard deviation is that scores are divided by."""
    ddof: Literal[1, 0] = 1
    """1: the sample's deviation, 0: the population's."""

    def __post_init__(self) -> None:
        low, high = self.clip_low, self.clip_high
        ordered = low is None or high is None or low <= high
        require(self, clip_low=(ordered, f"must be at most clip_high={high}"))


@dataclass
class KlConfig:
    """Keeps the policy near the reference."""

    coefficient: float
    """Weight of the divergence, the first one if it adapts; 0.04 in GRPO's paper."""
    place: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken off each token's reward."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How it is told from sampled tokens; k1 in a loss has no effect on average."""
    target: float | None = None
    """Mean per token towards which the coefficient adapts; None: it is fixed."""
    gain: float = 0.1
    """How fast it adapts: at most 0.2 times this a step."""

    def __post_init__(self) -> None:
        require(
            self,
            coefficient=(self.coefficient >= 0, "must be at least 0"),
            target=(self.target is None or self.target > 0, "must be above 0"),
            gain=(0 < self.gain <= 1, "must be above 0 and at most 1"),
        )


@dataclass
class WeightsConfig:
    """Weights of the policy loss: trainer's over engine's probability of what was sampled."""

    cap: float = 2.0
    """Weights are at most this."""
    level: Level = "token"
    """Of what the ratio is."""

    def __post_init__(self) -> None:
        require(self, cap=(self.cap > 0, "must be above 0"))


@dataclass
class FilterConfig:
    """Leaves out tokens by that same ratio."""

    low: float
    """They count if it is at least this, …"""
    high: float
    """… and at most this."""
    level: Level = "token"
    """Of what the ratio is."""

    def __post_init__(self) -> None:
        low, high = self.low, self.high
        require(self, low=(0 <= low < high, f"must be at least 0 and below high={high}"))


@dataclass
class AlgorithmConfig:
    """From scores to the loss of the policy."""

    scores: ScoresConfig = field(default_factory=ScoresConfig)
    """What happens to scores first."""
    advantage: AdvantageArgs = field(default_factory=AdvantageArgs)
    """How advantages are made of them."""
    whiten_advantages: bool = False
    """Bring advantages to mean 0 and deviation 1 over all tokens of the step."""
    difficulty_weight: DifficultyWeightConfig | None = None
    """Weigh advantages, last of all, by how many answers of the group are right; None: don't."""
    policy_loss: PolicyLossArgs = field(default_factory=PolicyLossArgs)
    """What the policy minimises."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"] = (
        "token-mean"
    )
    """How losses of tokens become one: every token the same, every response the same, responses by
    their length, or that over `divisor`."""
    divisor: float | None = None
    """For aggregation constant: tokens of a response, the longest for example."""
    kl: KlConfig | None = None
    """Divergence from the reference; None: none, and no reference is needed."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy, which is added to what is maximised."""
    importance_weights: WeightsConfig | None = None
    """Correct the loss for the gap between engine and trainer; None: don't."""
    importance_filter: FilterConfig | None = None
    """Leave out tokens by that gap; None: don't."""
    off_policy_threshold: float | None = None
    """Leave out bad responses that the policy has moved away from by more than this, old less new
    log-prob in the mean; None: don't."""
    value_clip: float | None = None
    """How far the critic may move from its values at rollout before its loss no longer falls;
    None: no bound."""

    def __post_init__(self) -> None:
        threshold, clip = self.off_policy_threshold, self.value_clip
        constant = self.aggregation == "constant"
        wanted = "must be above 0 with aggregation constant, and left out with the others"
        fits = (self.divisor is not None and self.divisor > 0) if constant else self.divisor is None
        require(
            self,
            divisor=(fits, wanted),
            entropy_coefficient=(self.entropy_coefficient >= 0, "must be at least 0"),
            off_policy_threshold=(threshold is None or threshold > 0, "must be above 0"),
            value_clip=(clip is None or clip > 0, "must be above 0"),
        )


def generation_problems(config: AlgorithmConfig, generation: GenerationConfig) -> list[Problem]:
    """What keeps the algorithm from learning from responses generated like this, keys as in
    AlgorithmConfig."""
    return [
        *_support_problems(config, generation),
        *_group_problems(config, generation),
        *_overlong_problems(config.scores, generation),
    ]


def _support_problems(config: AlgorithmConfig, generation: GenerationConfig) -> list[Problem]:
    if generation.top_p == 1 and generation.top_k == 0:
        return []
    given = f"top_p={generation.top_p} and top_k={generation.top_k}"
    rule = f"needs the engine's log-probs over all tokens, with {given} they are over those kept"
    fix = "generate with top_p: 1 and top_k: 0, or drop it"
    names = ("importance_weights", "importance_filter")
    return [Problem(name, "{…}", rule, fix) for name in names if getattr(config, name) is not None]


def _group_problems(config: AlgorithmConfig, generation: GenerationConfig) -> list[Problem]:
    if generation.num_return_sequences > 1 and generation.temperature > 0:
        return []
    row = config.advantage.row
    wants_others = {
        "advantage.name": (config.advantage.name, row is not None and row.compares),
        "scores.mean": (config.scores.mean, config.scores.mean == "group"),
        "scores.drop_without_signal": (True, config.scores.drop_without_signal),
        "scores.length_weight": ({}, config.scores.length_weight is not None),
        "difficulty_weight": ({}, config.difficulty_weight is not None),
    }
    given, fix = "num_return_sequences=1", "generate at least 2"
    if generation.num_return_sequences > 1:
        given, fix = "with temperature=0 all are the same", "sample with temperature: 1"
    rule = f"compares the responses to one prompt, and {given}: nothing is learnt"
    return [
        Problem(key, repr(value), rule, fix)
        for key, (value, wants) in wants_others.items()
        if wants
    ]


def _overlong_problems(scores: ScoresConfig, generation: GenerationConfig) -> list[Problem]:
    overlong, most = scores.overlong, generation.max_new_tokens
    if overlong is None or overlong.buffer_tokens <= most:
        return []
    rule = f"is more than max_new_tokens={most}"
    key, given = "scores.overlong.buffer_tokens", str(overlong.buffer_tokens)
    return [Problem(key, given, rule, "use a part of it")]
