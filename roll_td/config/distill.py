"""Settings of distillation: a student learns the distributions of its teacher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from roll_td.config.base import WorkerConfig
from roll_td.config.data import answer_problems
from roll_td.config.evaluation import EvaluatedConfig
from roll_td.config.functions import DivergenceArgs
from roll_td.config.schema import Problem
from roll_td.config.text import ability_problems, count_problems, fill_in

WORKERS = "roll_td.workers.distill."


@dataclass
class DistillConfig(EvaluatedConfig):
    """The model is the student's; teacher.model is its teacher's. Both have the same tokens."""

    divergence: DivergenceArgs = field(default_factory=DivergenceArgs)
    """What is minimised of each token, teacher to student."""
    temperature: float = 1.0
    """Of both distributions; the divergence counts temperature² times, so that its gradient keeps
    its size."""
    top_k: int | None = None
    """How many of a token's likeliest entries, by the teacher, are compared. None: the whole
    vocabulary, for which teacher and student need the same devices in the same order."""
    renormalise: bool = True
    """With top_k: compare distributions over those entries. False: their probabilities as they are;
    a divergence may be negative then."""
    learn_from: Literal["answers", "text"] = "answers"
    """The tokens that count: of answers, or all."""
    cross_entropy_share: float = 0.0
    """Share of the loss that is the cross-entropy of the data's own tokens."""
    student: WorkerConfig = field(default_factory=WorkerConfig)
    """The role that is trained; without device_mapping it has device 0."""
    teacher: WorkerConfig = field(default_factory=WorkerConfig)
    """The role with the teacher, whose model it names; without device_mapping it shares the devices
    of student."""

    def fill_in_roles(self) -> None:
        """Student and teacher."""
        fill_in(self.student, "fsdp2_train", WORKERS + "StudentWorker")
        fill_in(self.teacher, "fsdp2_infer", WORKERS + "TeacherWorker", self.student)
        self.fill_in_evaluation(self.student)

    def problems(self) -> Iterator[Problem]:
        """Of data, roles, and what can be compared."""
        yield from super().problems()
        yield from (problem.under("data") for problem in answer_problems(self.data))
        yield from ability_problems(self, "student", "trains", "train")
        yield from count_problems(self, "top_k")
        if not self.temperature > 0:
            yield Problem("temperature", repr(self.temperature), "must be above 0", "")
        if not 0 <= self.cross_entropy_share < 1:
            rule, fix = "must be at least 0 and below 1", "at 1 a teacher has nothing to say"
            given = repr(self.cross_entropy_share)
            yield Problem("cross_entropy_share", given, rule, fix)
        if self.teacher.model is None:
            fix = "set teacher.model.path"
            yield Problem("teacher.model", "", "is missing: it would be the student itself", fix)
        if self.top_k is None:
            yield from self._sharing_problems()

    def _sharing_problems(self) -> Iterator[Problem]:
        fix = "set top_k, 64 for example, or leave it out to share those of student"
        devices = self.teacher.device_mapping
        if (devices, self.teacher.world_size) != (
            self.student.device_mapping,
            self.student.world_size,
        ):
            rule = "are not those of student, and the whole vocabulary does not travel"
            yield Problem("teacher.device_mapping", repr(devices), rule, fix)
        args = self.teacher.strategy_args
        if args is not None and args.strategy_name != "fsdp2_infer":
            key, rule = "teacher.strategy_args.strategy_name", "can't step together with student"
            yield Problem(key, repr(args.strategy_name), rule, "set top_k, or use fsdp2_infer")
