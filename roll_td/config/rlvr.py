"""Settings of reinforcement learning with verifiable rewards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from roll_td.config.algorithm import AlgorithmConfig, generation_problems
from roll_td.config.base import WorkerConfig
from roll_td.config.data import prompt_problems
from roll_td.config.functions import require
from roll_td.config.model import GenerationConfig
from roll_td.config.model_update import ModelUpdateConfig
from roll_td.config.rewards import Rewards, RewardWorkerConfig, reward_problems
from roll_td.config.schema import Problem
from roll_td.config.text import LEAVE, TextConfig, ability_problems, count_problems, fill_in

ANSWER_COLUMNS = ("response", "finish_reason")
"""What a reward may look at beside the columns that the data keeps."""


@dataclass
class ValidationConfig:
    """Answers to the validation data, and what counts as right."""

    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(temperature=0.0))
    """How they are sampled; several for each prompt for pass@k."""
    pass_at: list[int] = field(default_factory=lambda: [1])
    """The k of pass@k that are told."""
    pass_score: float = 1.0
    """The score from which on an answer is right."""

    def __post_init__(self) -> None:
        samples = self.generation.num_return_sequences
        fits = all(1 <= k <= samples for k in self.pass_at)
        rule = f"must lie in 1 to generation.num_return_sequences={samples}"
        require(self, pass_at=(fits, rule))


@dataclass
class RLVRConfig(TextConfig):
    """A policy is improved by what its answers to a data set's prompts score. `model` is that of
    the policy at the start, and of the reference; `data.keep` names the columns that rewards are
    told from; a step has batch_size prompts."""

    rewards: Rewards = field(default_factory=dict)
    """What an answer scores, by the column domain of its row; default: for all others."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """From scores to the loss of the policy."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """How the policy is tried on the validation data."""
    model_update: ModelUpdateConfig = field(default_factory=ModelUpdateConfig)
    """How weights go from actor_train to actor_infer."""

    actor_train: WorkerConfig = field(default_factory=WorkerConfig)
    """The role that trains the policy; without device_mapping it has device 0."""
    actor_infer: WorkerConfig = field(default_factory=WorkerConfig)
    """The role that answers; without device_mapping it shares those of actor_train. Its generation
    says how training data is sampled, num_return_sequences how many answers make a group."""
    reference: WorkerConfig | None = None
    """The role that gives log-probs of the model as it was at the start, for algorithm.kl; without
    device_mapping it shares those of actor_train."""
    reward: RewardWorkerConfig = field(default_factory=RewardWorkerConfig)
    """The role that scores, on CPUs; one worker unless world_size is given."""

    mini_batches: int = 1
    """Optimiser steps that the answers of a step are spread over."""
    ppo_epochs: int = 1
    """Times that each answer is learnt from."""
    max_steps: int = field(kw_only=True)
    """Steps: each is a rollout and the updates from it."""
    max_refills: int = 0
    """With scores.drop_without_signal: how often in a step further prompts are drawn, batch_size at
    a time, to have batch_size groups with signal."""
    eval_steps: int | None = None
    """Steps between validations; None: before the first step and after the last."""
    offload: bool = False
    """Where roles share devices: keep of each only what is at work on the device."""
    export_dir: str | None = None
    """Folder for the trained model as transformers loads it; None: no export."""

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.max_steps * self.mini_batches * self.ppo_epochs

    @property
    def compares_old(self) -> bool:
        """Whether old log-probs must be computed: where they are wanted before the update, or it is
        one of several. A single one compares with the log-probs that it computes itself."""
        kl, bounds = self.algorithm.kl, self.algorithm.importance_filter
        several = self.mini_batches * self.ppo_epochs > 1
        return several or bounds is not None or (kl is not None and kl.place == "reward")

    def fill_in_roles(self) -> None:
        """All of them stand beside actor_train."""
        train, workers = self.actor_train, "roll_td.workers."
        fill_in(train, "fsdp2_train", workers + "actor.ActorWorker")
        fill_in(self.actor_infer, "hf_infer", workers + "generation.GenerationWorker", train)
        if self.algorithm.kl is not None:
            self.reference = self.reference or WorkerConfig()
        if self.reference is not None:
            fill_in(self.reference, "fsdp2_infer", workers + "actor.ReferenceWorker", train)

    def problems(self) -> Iterator[Problem]:
        """Of data, rewards, the algorithm with this generation, and of what lacks its use."""
        yield from super().problems()
        columns = {*self.data.keep, *ANSWER_COLUMNS}
        for key, of in (
            ("data", prompt_problems(self.data)),
            ("algorithm", generation_problems(self.algorithm, self.actor_infer.generation)),
            ("rewards", reward_problems(self.rewards, columns)),
        ):
            yield from (problem.under(key) for problem in of)
        yield from count_problems(self, "mini_batches", "ppo_epochs", "max_steps", "eval_steps")
        if self.max_refills < 0:
            yield Problem("max_refills", repr(self.max_refills), "must be at least 0", LEAVE)
        if self.max_refills and not self.algorithm.scores.drop_without_signal:
            rule, fix = "has nothing to do", "set algorithm.scores.drop_without_signal: true"
            yield Problem("max_refills", repr(self.max_refills), rule, fix)
        row = self.algorithm.advantage.row
        if row is not None and row.critic:
            rule = "needs a critic's values, which this pipeline has none of"
            yield Problem("algorithm.advantage.name", self.algorithm.advantage.name, rule, "")
        if self.algorithm.kl is None and self.reference is not None:
            rule, fix = "is given and nothing asks it", "set algorithm.kl, or drop the role"
            yield Problem("reference", "{…}", rule, fix)
        yield from ability_problems(self, "actor_train", "trains", "train")
        yield from ability_problems(self, "actor_infer", "generates", "generate")
