"""Settings of answering a data set and scoring the answers, without training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from roll_td.config.base import WorkerConfig, role_sections
from roll_td.config.data import prompt_problems
from roll_td.config.evaluation import all_answered_problems
from roll_td.config.judges import Judges, fill_in_judges, judge_problems
from roll_td.config.rewards import Rewards, RewardWorkerConfig, own_reward_problems, reward_problems
from roll_td.config.rlvr import ANSWER_COLUMNS, ValidationConfig
from roll_td.config.scheduling import SchedulingConfig, scheduling_problems
from roll_td.config.schema import ConfigError, Problem
from roll_td.config.text import TextConfig, ability_problems, fill_in
from roll_td.config.vllm import room_problems


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
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    """Whether each batch is answered in one call, the default, or, with async_generation_ratio,
    engines that are done with it go on with the next ones."""
    reward: RewardWorkerConfig = field(default_factory=RewardWorkerConfig)
    """The role that scores, on CPUs; one worker unless world_size is given."""
    judges: Judges = field(default_factory=dict)
    """Roles with models that the reward llm_judge asks, by the name that it has for them; without
    device_mapping they share those of actor_infer."""
    save_steps: int | None = 1
    """Steps, of batch_size prompts each, that are lost at most when the run is stopped."""
    keep_checkpoints: int | None = 1
    """How many of this run's checkpoints stay; each has the place in the file of answers."""

    @property
    def passes(self) -> ValidationConfig:
        """What counts as right."""
        return ValidationConfig(self.actor_infer.generation, self.pass_at, self.pass_score)

    def outside_problems(self) -> list[Problem]:
        """Also of rewards of the user's own."""
        found = own_reward_problems(self.rewards, {*self.data.keep, *ANSWER_COLUMNS})
        return [*super().outside_problems(), *(problem.under("rewards") for problem in found)]

    def fill_in_roles(self) -> None:
        """The role that answers, and those that judge."""
        fill_in(self.actor_infer, "hf_infer", "roll_td.workers.generation.GenerationWorker")
        fill_in_judges(self.judges, self.actor_infer)

    def problems(self) -> Iterator[Problem]:
        """Of data, rewards, pass@k, and of settings that say nothing here."""
        yield from super().problems()
        yield from (problem.under("data") for problem in prompt_problems(self.data))
        yield from (problem.under("data") for problem in all_answered_problems(self.data))
        columns = {*self.data.keep, *ANSWER_COLUMNS}
        yield from (p.under("rewards") for p in reward_problems(self.rewards, columns))
        yield from judge_problems(self.rewards, self.judges)
        yield from ability_problems(self, "actor_infer", "generates", "generate")
        beside = {n: r for n, r in role_sections(vars(self)).items() if r is not self.actor_infer}
        scheduled = scheduling_problems(self.scheduling, self.actor_infer, beside, corrects=False)
        yield from (problem.under("scheduling") for problem in scheduled)
        room = room_problems(self.actor_infer, self.data.max_length)
        yield from (problem.under("actor_infer") for problem in room)
        try:
            _ = self.passes
        except ConfigError as error:
            yield from error.problems
