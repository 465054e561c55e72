"""Settings of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from roll_td.config.base import WorkerConfig
from roll_td.config.data import answer_problems
from roll_td.config.evaluation import EvaluatedConfig
from roll_td.config.schema import Problem
from roll_td.config.text import ability_problems, fill_in


@dataclass
class SFTConfig(EvaluatedConfig):
    """A language model learns the answers of a data set."""

    actor_train: WorkerConfig = field(default_factory=WorkerConfig)
    """The role that trains; without device_mapping and world_size it has device 0."""

    def fill_in_roles(self) -> None:
        """Give actor_train what its section leaves out."""
        fill_in(self.actor_train, "fsdp2_train", "roll_td.workers.sft.SFTWorker")
        self.fill_in_evaluation(self.actor_train)

    def problems(self) -> Iterator[Problem]:
        """Also of data without answers, and of a role that can't train."""
        yield from (problem.under("data") for problem in answer_problems(self.data))
        yield from super().problems()
        yield from ability_problems(self, "actor_train", "trains", "train")
