"""Settings of reinforcement learning with verifiable rewards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from roll_td.config.algorithm import AlgorithmConfig, generation_problems
from roll_td.config.base import BaseConfig, WorkerConfig
from roll_td.config.data import DataConfig, check_files, prompt_problems
from roll_td.config.functions import require
from roll_td.config.model import GenerationConfig, ModelConfig
from roll_td.config.model_update import ModelUpdateConfig
from roll_td.config.rewards import Rewards, RewardWorkerConfig, reward_problems
from roll_td.config.schema import ConfigError, Problem
from roll_td.config.strategies import StrategyArgs

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
class RLVRConfig(BaseConfig):
    """A policy is improved by what its answers to a data set's prompts score."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model: of the policy at the start, and of the reference."""
    data: DataConfig = field(kw_only=True)
    """Prompts. keep names the columns that rewards are told from: ground_truth, domain."""
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

    batch_size: int = 32
    """Prompts of a step."""
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

    def __post_init__(self) -> None:
        self._fill_in_roles()
        problems = list(self._problems())
        try:
            super().__post_init__()
        except ConfigError as error:
            problems = [*error.problems, *problems]
        if problems:
            raise ConfigError(problems)

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

    def file_problems(self) -> list[Problem]:
        """Data, model and tokenizer."""
        data = [problem.under("data") for problem in check_files(self.data)]
        model = [problem.under("model") for problem in self.model.file_problems()]
        return [*super().file_problems(), *data, *model]

    def _fill_in_roles(self) -> None:
        train = self.actor_train
        if train.device_mapping is None and train.world_size is None:
            train.device_mapping, train.world_size = [0], 1
        if self.algorithm.kl is not None:
            self.reference = self.reference or WorkerConfig()
        workers = "roll_td.workers."
        for role, strategy, worker_cls in (
            (train, "fsdp2_train", workers + "actor.ActorWorker"),
            (self.actor_infer, "hf_infer", workers + "generation.GenerationWorker"),
            (self.reference, "fsdp2_infer", workers + "actor.ReferenceWorker"),
        ):
            if role is None:
                continue
            role.worker_cls = role.worker_cls or worker_cls
            role.strategy_args = role.strategy_args or StrategyArgs(strategy)
            if role.device_mapping is None and role.world_size is None:
                role.device_mapping, role.world_size = train.device_mapping, train.world_size

    def _problems(self) -> Iterator[Problem]:
        for key, of in (
            ("data", prompt_problems(self.data)),
            ("algorithm", generation_problems(self.algorithm, self.actor_infer.generation)),
            ("model", self.model.text_problems()),
            ("rewards", reward_problems(self.rewards, {*self.data.keep, *ANSWER_COLUMNS})),
        ):
            yield from (problem.under(key) for problem in of)
        least = {"batch_size": 1, "mini_batches": 1, "ppo_epochs": 1, "max_steps": 1}
        for name, bound in {**least, "max_refills": 0, "eval_steps": 1}.items():
            if (value := getattr(self, name)) is not None and value < bound:
                rule = f"must be a whole number of at least {bound}"
                yield Problem(name, repr(value), rule, "")
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
        yield from self._strategy_problems()

    def _strategy_problems(self) -> Iterator[Problem]:
        for name, ability, verb in (
            ("actor_train", "trains", "train"),
            ("actor_infer", "generates", "generate"),
        ):
            args: StrategyArgs = getattr(self, name).strategy_args
            if not getattr(args.row, ability):
                key = f"{name}.strategy_args.strategy_name"
                yield Problem(key, repr(args.strategy_name), f"is a strategy that can't {verb}", "")
