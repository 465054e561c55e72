"""On-policy distillation: a student answers, and learns from what teachers think of each token."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from roll_td.algorithms.advantages import distillation
from roll_td.algorithms.masking import token_means
from roll_td.config.onpolicy_distill import OnPolicyDistillConfig
from roll_td.config.rewards import tag_of
from roll_td.metrics import Metric, Sum, under
from roll_td.models import load_tokenizer
from roll_td.pipelines import outcomes
from roll_td.pipelines.distill import common_vocabulary
from roll_td.pipelines.rlvr import RLVRPipeline
from roll_td.protocol import DataProto


class OnPolicyDistillPipeline(RLVRPipeline):
    """Roles: those of RLVR, reward only with rewards; and teachers. A step is one of RLVR, in which
    what teachers say of the answers adds to their advantages."""

    shown = (
        "teacher/reverse_kl", "reward/mean", "response/length", "actor/loss", "actor/grad_norm",
        "time/rollout_s", "time/train_s", "val/teacher/reverse_kl", "val/score",
    )  # fmt: skip

    def __init__(self, pipeline_config: OnPolicyDistillConfig) -> None:
        student = load_tokenizer(pipeline_config.model)
        for role in pipeline_config.teachers.values():
            assert role.model is not None, "the config refuses that"
            common_vocabulary(student, load_tokenizer(role.model))
        super().__init__(pipeline_config)
        self.teachers = {tag: self.roles[f"teachers.{tag}"] for tag in pipeline_config.teachers}
        check_widths(
            self.actor_train.count_logits(),
            {tag: teacher.count_logits() for tag, teacher in self.teachers.items()},
        )

    def check_data(self, kept: DataProto) -> None:
        """Also if it has no teacher."""
        super().check_data(kept)
        if self.pipeline_config.teacher_key in kept:
            self.pipeline_config.check_teachers(kept[self.pipeline_config.teacher_key])

    def ask(self, batch: DataProto) -> None:
        """Also teacher_log_probs float32 (B, T)."""
        asked = []
        for tag, rows in self.rows_of(batch).items():
            tokens = batch.select(["input_ids", "lengths", "response_mask"])[rows]
            calls = self.log_probs(self.teachers[tag], tokens, "teacher_log_probs")
            asked.append((rows, calls))
        super().ask(batch)
        found = torch.zeros(batch["input_ids"].shape)
        with self.timing("teachers"):
            for rows, refs in asked:
                found[rows] = refs.get()["teacher_log_probs"]
        batch.update({"teacher_log_probs": found})

    def estimate(self, batch: DataProto) -> None:
        """Also add what teachers think to the advantages."""
        self.metrics.append(under("teacher", self.judge(batch)))
        super().estimate(batch)
        add_teachers(batch, self.pipeline_config)

    def judge(self, batch: DataProto) -> dict[str, Metric]:
        """Take rows of which a teacher has said NaN, or that a token can't be, out of
        response_mask; how far the student is from its teachers in the others, by teacher too if
        there are several."""
        teacher, mask = batch["teacher_log_probs"], batch["response_mask"]
        answered = (teacher.isfinite() | ~mask).all(-1)
        mask = mask & answered[:, None]
        batch.update({"response_mask": mask})
        apart = {"reverse_kl": batch["old_log_probs"] - teacher}
        metrics = token_means(apart, mask) | {"without_answer": Sum(int((~answered).sum()))}
        if len(self.teachers) > 1:
            for tag, rows in self.rows_of(batch).items():
                own = token_means({"reverse_kl": apart["reverse_kl"][rows]}, mask[rows])
                metrics |= under(tag, own)
        return metrics

    def rows_of(self, batch: DataProto) -> dict[str, list[int]]:
        """The rows that each teacher judges, of those that have any."""
        return rows_of_teachers(batch, self.pipeline_config)

    def validate(self) -> dict[str, Metric]:
        """How far answers to all of the validation data are from the teachers', and their scores
        if there are rewards."""
        batch = self.validation_answers()
        self.ask(batch)
        scored = outcomes.validation_metrics(batch, self.pipeline_config.validation)
        return scored | under("val/teacher", self.judge(batch))


def add_teachers(batch: DataProto, config: OnPolicyDistillConfig) -> None:
    """Add to advantages what teachers say of each token."""
    names = "old_log_probs", "teacher_log_probs", "response_mask"
    made = distillation(*(batch[name] for name in names), gamma=config.teacher_gamma)
    added = config.teacher_coefficient * made["advantages"]
    batch.update({"advantages": batch["advantages"] + added})


def rows_of_teachers(batch: DataProto, config: OnPolicyDistillConfig) -> dict[str, list[int]]:
    """The rows that each teacher judges, by its tag, of those that have any."""
    has_key = config.teacher_key in batch
    values = batch[config.teacher_key] if has_key else [None] * len(batch)
    found: dict[str, list[int]] = {}
    for row, value in enumerate(values):
        found.setdefault(tag_of(config.teachers, value), []).append(row)
    return found


def check_widths(student: int, teachers: Mapping[str, int]) -> None:
    """ValueError for a teacher that has fewer logits than the student. What the student sampled
    beyond them nobody would object to, so it would learn to."""
    for tag, width in teachers.items():
        if width < student:
            raise ValueError(
                f"the student has logits for {student} tokens and teacher {tag} for {width}: it "
                "has no opinion of the others; take a student with a vocab_size of at most that"
            )
