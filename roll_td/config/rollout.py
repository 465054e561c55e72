"""Settings of answering a data set and scoring the answers, without training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from roll_td.config.base import WorkerConfig
from roll_td.config.data import MixedConfig, prompt_problems
from roll_td.config.rewards import Rewards, RewardWorkerConfig, reward_problems
from roll_td.config.rlvr import ANSWER_COLUMNS, ValidationConfig
from roll_td.config.schema import ConfigError, Problem
from roll_td.config.text import TextConfig, ability_problems, fill_in


@dataclass
class RolloutConfig(TextConfig):
    """A model answers each prompt of data.train once, in the order of the files."""

    rewards: Rewards = field(default_factory=dict)
    """What an answer scores, by the column domain of its row; default: for all others."""
    pass_at: list[int] = field(default_factory=lambda: [1])
    """The k of pass@k that are told."""
    pass_score: float = 1.0
    """The score from which on an answer is right."""
    actor_infer: WorkerConfig = field(default_factory=WorkerConfig)
    """The role that answers; without device_mapping it has device 0. Its generation says how
    answers are sampled, and how many to a prompt."""
    reward: RewardWorkerConfig = field(default_factory=RewardWorkerConfig)
    """The role that scores, on CPUs; one worker unless world_size is given."""
    save_steps: int | None = 1
    """Steps, of batch_size prompts each, that are lost at most when the run is stopped."""
    keep_checkpoints: int | None = 1
    """How many of this run's checkpoints stay; each has the place in the file of answers."""

    @property
    def passes(self) -> ValidationConfig:
        """What counts as right."""
        return ValidationConfig(self.actor_infer.generation, self.pass_at, self.pass_score)

    def fill_in_roles(self) -> None:
        """The role that answers."""
        fill_in(self.actor_infer, "hf_infer", "roll_td.workers.generation.GenerationWorker")

    def problems(self) -> Iterator[Problem]:
        """Of data, rewards, pass@k, and of settings that say nothing here."""
        yield from super().problems()
        yield from (problem.under("data") for problem in prompt_problems(self.data))
        yield from (problem.under("data") for problem in self._data_problems())
        columns = {*self.data.keep, *ANSWER_COLUMNS}
        yield from (p.under("rewards") for p in reward_problems(self.rewards, columns))
        yield from ability_problems(self, "actor_infer", "generates", "generate")
        try:
            _ = self.passes
        except ConfigError as error:
            yield from error.problems

    def _data_problems(self) -> Iterator[Problem]:
        data, fix = self.data, "name the files to answer as train"
        if data.validation is not None:
            yield Problem("validation", repr(data.validation), "is not answered here", fix)
        if data.validation_split:
            rule = "would hold rows back from the only thing that is done"
            yield Problem("validation_split", repr(data.validation_split), rule, "leave it out")
        if isinstance(data.train, list) and any(isinstance(d, MixedConfig) for d in data.train):
            rule = "has weights, and each prompt is answered once"
            yield Problem("train", "[…]", rule, "give a list of paths")
