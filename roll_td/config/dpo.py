"""Settings of learning from pairs of answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from roll_td.config.base import WorkerConfig
from roll_td.config.data import pair_problems
from roll_td.config.evaluation import EvaluatedConfig
from roll_td.config.functions import PreferenceLossArgs
from roll_td.config.schema import Problem
from roll_td.config.text import ability_problems, fill_in

WORKERS = "roll_td.workers.dpo."


@dataclass
class DPOConfig(EvaluatedConfig):
    """A model learns which of two answers to a prompt is preferred. batch_size counts pairs, and so
    does training.micro_batch_size of actor_train."""

    loss: PreferenceLossArgs = field(default_factory=PreferenceLossArgs)
    """What is learnt from a pair. settings.beta also scales the rewards that are told."""
    over: Literal["sum", "mean"] = "sum"
    """How the log ratios of an answer's tokens, policy less reference, make one number. For ipo sum
    is its paper's, and mean makes β independent of length."""
    actor_train: WorkerConfig = field(default_factory=WorkerConfig)
    """The role that trains; without device_mapping it has device 0."""
    reference: WorkerConfig | None = None
    """The role that has the model as it was at the start; without device_mapping it shares the
    devices of actor_train. None: with model.lora it is actor_train without its adapters, else a
    role that computes as actor_train does."""
    reference_free: bool = False
    """Compare with nothing: a log ratio is then the log-prob of the policy alone."""
    reference_cache: str | None = None
    """A folder: what the reference says of all pairs is computed before the first step and kept in
    a file there, from which any later run with the same model, data and seed takes it. None: it is
    computed step by step."""

    @property
    def has_adapters(self) -> bool:
        """Whether the reference is actor_train without its adapters."""
        return self.model.lora is not None and self.reference is None and not self.reference_free

    def fill_in_roles(self) -> None:
        """Policy, and reference where it is a role."""
        fill_in(self.actor_train, "fsdp2_train", WORKERS + "DPOWorker")
        if self.reference is None and self.model.lora is None and not self.reference_free:
            self.reference = WorkerConfig(training=replace(self.actor_train.training))
        if self.reference is not None:
            fill_in(self.reference, "fsdp2_infer", WORKERS + "AnswerWorker", self.actor_train)
        self.fill_in_evaluation(self.actor_train)

    def problems(self) -> Iterator[Problem]:
        """Of data, roles, and the reference."""
        yield from super().problems()
        yield from (problem.under("data") for problem in pair_problems(self.data))
        yield from ability_problems(self, "actor_train", "trains", "train")
        if self.reference_free and self.reference is not None:
            rule, fix = "is given beside reference_free", "drop one of the two"
            yield Problem("reference", "{…}", rule, fix)
        if self.reference_free and self.reference_cache is not None:
            rule, fix = "has nothing to keep with reference_free", "drop one of the two"
            yield Problem("reference_cache", repr(self.reference_cache), rule, fix)
