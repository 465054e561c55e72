"""Settings of training whose model also answers prompts now and then, to see what it scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from roll_td.config.base import WorkerConfig
from roll_td.config.data import DataConfig, MixedConfig, check_files, prompt_problems
from roll_td.config.judges import Judges, fill_in_judges, judge_problems
from roll_td.config.model import GenerationConfig
from roll_td.config.model_update import ModelUpdateConfig
from roll_td.config.rewards import Rewards, RewardWorkerConfig, own_reward_problems, reward_problems
from roll_td.config.rlvr import ANSWER_COLUMNS, ValidationConfig
from roll_td.config.schema import Problem
from roll_td.config.text import TrainedTextConfig, ability_problems, fill_in
from roll_td.config.vllm import room_problems


@dataclass
class EvaluatedConfig(TrainedTextConfig):
    """With `prompts` the model answers them before the first step and at each validation, and the
    answers are scored. A subclass calls fill_in_evaluation."""

    prompts: DataConfig | None = None
    """What is answered: all rows of its `train`, in their order; keep names the columns that
    rewards look at. None: nothing is, and none of the roles below is there."""
    rewards: Rewards = field(default_factory=dict)
    """What an answer scores, by the column domain of its row; default: for all others."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """How prompts are answered, and what counts as right."""
    actor_infer: WorkerConfig | None = None
    """The role that answers, by the newest weights; without device_mapping it shares those of the
    role that trains."""
    reward: RewardWorkerConfig | None = None
    """The role that scores, on CPUs; one worker unless world_size is given."""
    judges: Judges = field(default_factory=dict)
    """Roles with models that the reward llm_judge asks, by the name that it has for them; without
    device_mapping they share those of the role that trains."""
    model_update: ModelUpdateConfig = field(default_factory=ModelUpdateConfig)
    """How weights go to actor_infer."""

    def fill_in_evaluation(self, train: WorkerConfig) -> None:
        """The roles that answer and score, beside the one that trains; none without prompts."""
        if self.prompts is None:
            return
        self.actor_infer = self.actor_infer or WorkerConfig()
        if self.actor_infer.generation == GenerationConfig():
            self.actor_infer.generation = self.validation.generation
        self.reward = self.reward or RewardWorkerConfig()
        worker_cls = "roll_td.workers.generation.GenerationWorker"
        fill_in(self.actor_infer, "hf_infer", worker_cls, train)
        fill_in_judges(self.judges, train)

    def problems(self) -> Iterator[Problem]:
        """Also of prompts and rewards."""
        yield from super().problems()
        if self.prompts is None:
            given = {name: getattr(self, name) for name in OF_PROMPTS}
            for name in [name for name, value in given.items() if value]:
                rule, fix = "has nothing to do without prompts", "set prompts, or drop it"
                yield Problem(name, "{…}", rule, fix)
            return
        for problem in [*prompt_problems(self.prompts), *all_answered_problems(self.prompts)]:
            yield problem.under("prompts")
        columns = {*self.prompts.keep, *ANSWER_COLUMNS}
        yield from (p.under("rewards") for p in reward_problems(self.rewards, columns))
        yield from judge_problems(self.rewards, self.judges)
        yield from ability_problems(self, "actor_infer", "generates", "generate")
        assert self.actor_infer is not None, "roles have been filled in"
        room = room_problems(self.actor_infer, self.prompts.max_length, "prompts.max_length")
        yield from (problem.under("actor_infer") for problem in room)
        if self.actor_infer.generation != self.validation.generation:
            rule, fix = "says it beside validation.generation, which counts", "set that one alone"
            yield Problem("actor_infer.generation", "{…}", rule, fix)

    def outside_problems(self) -> list[Problem]:
        """Also of prompts, and rewards of the user's own."""
        if self.prompts is None:
            return super().outside_problems()
        columns = {*self.prompts.keep, *ANSWER_COLUMNS}
        found = [p.under("prompts") for p in check_files(self.prompts)]
        found += [p.under("rewards") for p in own_reward_problems(self.rewards, columns)]
        return [*super().outside_problems(), *found]


OF_PROMPTS = ("rewards", "actor_infer", "reward", "judges")
"""Settings that say nothing without prompts."""


def all_answered_problems(data: DataConfig) -> Iterator[Problem]:
    """What says nothing where each row of `train` is answered once."""
    fix = "name the files to answer as train"
    if data.validation is not None:
        yield Problem("validation", repr(data.validation), "is not answered here", fix)
    if data.validation_split:
        rule = "would hold rows back from the only thing that is done"
        yield Problem("validation_split", repr(data.validation_split), rule, "leave it out")
    if isinstance(data.train, list) and any(isinstance(d, MixedConfig) for d in data.train):
        rule = "has weights, and each prompt is answered once"
        yield Problem("train", "[…]", rule, "give a list of paths")
