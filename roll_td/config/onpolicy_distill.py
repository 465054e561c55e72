"""Settings of on-policy distillation: a student answers, and learns from what teachers think."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from roll_td.config.base import WorkerConfig
from roll_td.config.rewards import DEFAULT
from roll_td.config.rlvr import RLVRConfig
from roll_td.config.schema import ConfigError, Problem
from roll_td.config.text import LEAVE, fill_in


@dataclass
class OnPolicyDistillConfig(RLVRConfig):
    """RLVR in which teachers judge each token of an answer; the model is the student's. The
    advantage of a token is teacher_coefficient · (log-prob by the teacher - log-prob by the student
    that sampled it), both at the sampling temperature, added to what `algorithm` makes of rewards.
    On average that follows the gradient of the reverse KL."""

    teachers: dict[str, WorkerConfig] = field(default_factory=dict)
    """The roles with the teachers, each with a model of its own, by the column `teacher_key` of the
    rows they judge; default: all others. Without device_mapping they share those of actor_train; on
    devices of their own they work at the same time."""
    teacher_key: str = "domain"
    """The column of data.keep that says whose a row is."""
    teacher_coefficient: float = 1.0
    """Weight of what teachers say, beside rewards."""
    teacher_gamma: float = 0.0
    """0: a token answers for itself alone; above: also for those after it, discounted by this."""

    @property
    def compares_old(self) -> bool:
        """Yes: with what the student thought."""
        return True

    def fill_in_roles(self) -> None:
        """Also teachers, named after their rows; nobody scores where there are no rewards."""
        super().fill_in_roles()
        if not self.rewards:
            self.reward = None
        for tag, role in self.teachers.items():
            role.name = role.name or f"teacher_{tag}"
            worker_cls = "roll_td.workers.actor.ReferenceWorker"
            fill_in(role, "fsdp2_infer", worker_cls, self.actor_train)

    def problems(self) -> Iterator[Problem]:
        """Also of teachers, and of what needs rewards where there are none."""
        yield from super().problems()
        if not self.teachers:
            fix = f"name one: teachers: {{{DEFAULT}: {{model: {{path: …}}}}}}"
            yield Problem("teachers", "", "is empty: nobody says what a token is worth", fix)
        for tag, role in self.teachers.items():
            if role.model is None:
                key = f"teachers.{tag}.model"
                rule, fix = "is missing: it would be the student itself", f"set {key}.path"
                yield Problem(key, "", rule, fix)
        tags = [tag for tag in self.teachers if tag != DEFAULT]
        if tags and self.teacher_key not in self.data.keep:
            rule = f"is not kept, and says which rows {', '.join(tags)} judge"
            fix = f"keep it (data.keep: {{{self.teacher_key}: …}}), or call the teacher {DEFAULT}"
            yield Problem("teacher_key", repr(self.teacher_key), rule, fix)
        if not self.teacher_coefficient > 0:
            fix = "without teachers it would be RLVRPipeline"
            given = repr(self.teacher_coefficient)
            yield Problem("teacher_coefficient", given, "must be above 0", fix)
        if not 0 <= self.teacher_gamma <= 1:
            yield Problem("teacher_gamma", repr(self.teacher_gamma), "must lie in 0 to 1", LEAVE)
        wanting = {
            "critic": self.critic is not None,
            "algorithm.scores.drop_without_signal": self.algorithm.scores.drop_without_signal,
        }
        for key, wants in wanting.items():
            if wants and not self.rewards:
                yield Problem(
                    key, "", "needs rewards, and there are none", "set rewards, or drop it"
                )

    def algorithm_problems(self) -> list[Problem]:
        """Without rewards one answer to a prompt is enough, whatever compares several."""
        problems, row = super().algorithm_problems(), self.algorithm.advantage.row
        if self.rewards or row is None or not row.compares or row.states:
            return problems
        return [problem for problem in problems if problem.key != "advantage.name"]

    def reward_problems(self) -> list[Problem]:
        """None of them where there are no rewards."""
        return super().reward_problems() if self.rewards else []

    def check_teachers(self, values: Iterable[object]) -> None:
        """ConfigError, each value once, if some of the column teacher_key have no teacher."""
        missing = [v for v in dict.fromkeys(values) if v not in self.teachers]
        if missing and DEFAULT not in self.teachers:
            there = f"there are {', '.join(self.teachers)}"
            fix = f"add it, or a teacher {DEFAULT} for all others"
            rules = [f"{self.teacher_key}={value!r} has no teacher: {there}" for value in missing]
            raise ConfigError([Problem("teachers", "", rule, fix) for rule in rules])
