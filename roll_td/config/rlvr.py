"""Settings of reinforcement learning with verifiable rewards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from roll_td.config.algorithm import AlgorithmConfig, generation_problems
from roll_td.config.base import WorkerConfig, role_sections
from roll_td.config.classes import import_object
from roll_td.config.data import prompt_problems
from roll_td.config.function_settings import require
from roll_td.config.functions import FunctionArgs
from roll_td.config.judges import Judges, fill_in_judges, judge_problems
from roll_td.config.model import GenerationConfig
from roll_td.config.model_update import ModelUpdateConfig
from roll_td.config.rewards import Rewards, RewardWorkerConfig, own_reward_problems, reward_problems
from roll_td.config.scheduling import SchedulingConfig, scheduling_problems
from roll_td.config.schema import Problem
from roll_td.config.signatures import columns_of
from roll_td.config.text import LEAVE, TextConfig, ability_problems, count_problems, fill_in
from roll_td.config.vllm import room_problems, temperature_problems

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
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    """How actor_infer is asked, and how far it runs ahead of training."""

    actor_train: WorkerConfig = field(default_factory=WorkerConfig)
    """The role that trains the policy; without device_mapping it has device 0."""
    actor_infer: WorkerConfig = field(default_factory=WorkerConfig)
    """The role that answers; without device_mapping it shares those of actor_train. Its generation
    says how training data is sampled, num_return_sequences how many answers make a group."""
    reference: WorkerConfig | None = None
    """The role that gives log-probs of the model as it was at the start, for algorithm.kl; without
    device_mapping it shares those of actor_train."""
    critic: WorkerConfig | None = None
    """The role that learns what states are worth, for an advantage that needs it (gae): the body of
    the policy's model as it was at the start, with a head that gives one number, unless it names a
    model of its own. Without device_mapping it shares those of actor_train; on others both learn
    at the same time."""
    reward: RewardWorkerConfig | None = field(default_factory=RewardWorkerConfig)
    """The role that scores, on CPUs; one worker unless world_size is given."""
    judges: Judges = field(default_factory=dict)
    """Roles with models that the reward llm_judge asks, by the name that it has for them; without
    device_mapping they share those of actor_train."""

    mini_batches: int = 1
    """Optimiser steps that the answers of a step are spread over."""
    ppo_epochs: int = 1
    """Times that each answer is learnt from."""
    critic_warmup_steps: int = 0
    """Steps at the start in which the critic alone learns."""
    max_steps: int = field(kw_only=True)
    """Steps: each is a rollout and the updates from it."""
    max_refills: int = 0
    """With scores.drop_without_signal: how often in a step further prompts are drawn, batch_size at
    a time, to have batch_size groups with signal."""
    eval_steps: int | None = None
    """Steps between validations; None: before the first step and after the last."""
    offload: bool = False
    """Where roles share devices: keep of each only what is at work on the device."""
    record_steps: int | None = None
    """Each so many-th step, from the first on, is recorded for `roll-td replay`, with all of its
    batch; None: none."""
    export_dir: str | None = None
    """Folder for the trained model as transformers loads it; None: no export."""

    def optimizer_steps(self, role: str) -> int:
        """Optimiser steps that a role takes in the whole run."""
        is_critic = self.critic is not None and role == self.critic.name
        steps = self.max_steps - (0 if is_critic else self.critic_warmup_steps)
        return steps * self.mini_batches * self.ppo_epochs

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
        row = self.algorithm.advantage.row
        if row is not None and row.critic:
            self.critic = self.critic or WorkerConfig()
        if self.critic is not None:
            fill_in(self.critic, "fsdp2_train", workers + "critic.CriticWorker", train)
        fill_in_judges(self.judges, train)

    def problems(self) -> Iterator[Problem]:
        """Of data, rewards, the algorithm with this generation, and of what lacks its use."""
        yield from super().problems()
        for key, of in (
            ("data", prompt_problems(self.data)),
            ("algorithm", self.algorithm_problems()),
            ("rewards", self.reward_problems()),
        ):
            yield from (problem.under(key) for problem in of)
        yield from judge_problems(self.rewards, self.judges)
        yield from count_problems(
            self, "mini_batches", "ppo_epochs", "max_steps", "eval_steps", "record_steps"
        )
        answers = self.batch_size * self.actor_infer.generation.num_return_sequences
        if self.mini_batches > answers:
            rule, fix = f"is more than the {answers} answers of a step", "take fewer"
            yield Problem("mini_batches", repr(self.mini_batches), rule, fix)
        if self.max_refills < 0:
            yield Problem("max_refills", repr(self.max_refills), "must be at least 0", LEAVE)
        if self.max_refills and not self.algorithm.scores.drop_without_signal:
            rule, fix = "has nothing to do", "set algorithm.scores.drop_without_signal: true"
            yield Problem("max_refills", repr(self.max_refills), rule, fix)
        yield from self._critic_problems()
        if self.reward is None and self.rewards:
            yield Problem("reward", "null", "leaves nobody to compute rewards", LEAVE)
        if self.algorithm.kl is None and self.reference is not None:
            rule, fix = "is given and nothing asks it", "set algorithm.kl, or drop the role"
            yield Problem("reference", "{…}", rule, fix)
        beside = {n: r for n, r in role_sections(vars(self)).items() if r is not self.actor_infer}
        corrects = self.algorithm.importance_weights is not None
        scheduled = scheduling_problems(self.scheduling, self.actor_infer, beside, corrects)
        yield from (problem.under("scheduling") for problem in scheduled)
        wrong = temperature_problems(self.actor_infer.strategy_args, self.validation.generation)
        yield from (problem.under("validation.generation") for problem in wrong)
        room = room_problems(self.actor_infer, self.data.max_length)
        yield from (problem.under("actor_infer") for problem in room)
        if self.offload and self.scheduling.by_requests:
            rule = "would take the model from an engine, which works whenever it is asked"
            yield Problem("offload", "true", rule, "drop it, or leave scheduling out")
        yield from ability_problems(self, "actor_train", "trains", "train")
        yield from ability_problems(self, "actor_infer", "generates", "generate")

    def algorithm_problems(self) -> list[Problem]:
        """What keeps the algorithm from learning from these answers."""
        problems = generation_problems(self.algorithm, self.actor_infer.generation)
        if (row := self.algorithm.advantage.row) is not None and row.states:
            rule = "compares states of an environment, and these answers have none"
            problems.append(Problem("advantage.name", self.algorithm.advantage.name, rule, ""))
        return problems

    def reward_problems(self) -> list[Problem]:
        """What keeps answers from being scored."""
        return reward_problems(self.rewards, {*self.data.keep, *ANSWER_COLUMNS})

    def outside_problems(self) -> list[Problem]:
        """Also of rewards, an advantage and a policy loss of the user's own."""
        found = own_reward_problems(self.rewards, {*self.data.keep, *ANSWER_COLUMNS})
        problems = [*super().outside_problems(), *(problem.under("rewards") for problem in found)]
        return [*problems, *self._column_problems()]

    def _column_problems(self) -> Iterator[Problem]:
        """Of functions of the user's own that take what no role of this config computes."""
        roles = {
            "ref_log_probs": ("algorithm.kl", self.reference),
            "values": ("algorithm.advantage.name: gae, or critic", self.critic),
        }
        lacking = {column: setting for column, (setting, role) in roles.items() if role is None}
        for key in ("advantage", "policy_loss"):
            args: FunctionArgs = getattr(self.algorithm, key)
            if args.row is not None or args.own_problems():
                continue
            needed = columns_of(import_object(args.path))
            for column in [column for column in lacking if column in needed]:
                rule, fix = f"needs {column}, which no role computes", f"set {lacking[column]}"
                yield Problem(f"algorithm.{key}.name", repr(args.name), rule, fix)

    def _critic_problems(self) -> Iterator[Problem]:
        row, name = self.algorithm.advantage.row, self.algorithm.advantage.name
        warmup = self.critic_warmup_steps
        if warmup and not 0 < warmup < self.max_steps:
            rule = f"must be at least 0 and below max_steps={self.max_steps}"
            yield Problem("critic_warmup_steps", repr(warmup), rule, LEAVE)
        if self.critic is not None:
            yield from ability_problems(self, "critic", "trains", "train")
            if row is not None and not row.critic:
                rule, fix = f"is given and advantage {name} does not ask it", "drop it, or take gae"
                yield Problem("critic", "{…}", rule, fix)
            return
        rule, fix = f"has nothing to do: advantage {name} has no critic", "take gae, or drop it"
        clip = self.algorithm.value_clip
        for key, value in ("critic_warmup_steps", warmup), ("algorithm.value_clip", clip):
            if value:
                yield Problem(key, repr(value), rule, fix)
