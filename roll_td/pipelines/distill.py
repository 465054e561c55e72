"""Distillation: a student learns what a teacher thinks of each token of a data set."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from roll_td.config.distill import DistillConfig
from roll_td.metrics import Mean, Metric, Sum
from roll_td.models import load_tokenizer
from roll_td.pipelines.training import TextTraining
from roll_td.plan import StepPlan, local
from roll_td.protocol import DataProto
from roll_td.runtime.cluster import Cluster
from roll_td.runtime.together import call_together, homes, make_groups
from roll_td.runtime.transport import Group
from roll_td.workers.distill import Move, counted


class DistillPipeline(TextTraining):
    """Roles: student, teacher. A step is one optimiser step on batch_size rows, which the teacher
    has looked at before: what it says goes from its ranks to the student's."""

    purpose = "answers"
    shown = (
        "loss", "divergence", "cross_entropy", "grad_norm", "val/divergence",
        "val/score", "val/pass@1",
    )  # fmt: skip

    def __init__(self, pipeline_config: DistillConfig) -> None:
        super().__init__(pipeline_config)
        config = pipeline_config
        assert config.teacher.model is not None, "the config refuses that"
        tokens = common_vocabulary(self.tokenizer, load_tokenizer(config.teacher.model))
        (self.teacher,) = self.start(config.student, config.teacher)
        for cluster in (self.trained, self.teacher):
            cluster.set_vocabulary(tokens)
        timeout_s = max(config.student.timeout_s, config.teacher.timeout_s)
        self.group = Group(homes([self.teacher, self.trained]), timeout_s)
        make_groups([self.group])

    def train_step(self, step: int, batch: DataProto) -> dict[str, Metric]:
        """One optimiser step of the student."""
        came = self.ask_teacher(batch)
        metrics: dict[str, Metric] = self.trained.train_step(batch).meta_info["metrics"]
        return metrics | came

    def look(self, step: int, batch: DataProto) -> dict[str, torch.Tensor]:
        """Of each row, summed over its tokens that count, divergence and cross-entropy, and how
        many these are."""
        self.ask_teacher(batch)
        rows = self.trained.val_step(batch)
        return {name: rows[name] for name in ("divergence", "cross_entropy", "tokens")}

    def validate(self) -> dict[str, Metric]:
        """Means of all tokens of the validation data that count."""
        assert self.validation_data is not None, "is_validation_due says no"
        sums = dict.fromkeys(("divergence", "cross_entropy", "tokens"), 0.0)
        for batch in self.validation_data.batches(self.pipeline_config.batch_size):
            self.ask_teacher(batch)
            rows = self.trained.val_step(batch)
            for name in sums:
                sums[name] += rows[name].double().sum().item()
        tokens = sums.pop("tokens")
        return {f"val/{name}": Mean(total / tokens, tokens) for name, total in sums.items()}

    def ask_teacher(self, batch: DataProto) -> dict[str, Metric]:
        """Have the student's ranks get what the teacher says of a batch, and the batch its plan
        and a column `row`, the numbers of its rows."""
        config = self.pipeline_config
        counts = counted(batch, config.learn_from).sum(-1)
        batch.update({"row": torch.arange(len(batch))})
        batch.plan = self.trained.plan_for(batch, {"tokens": float(counts.sum())})
        seen = batch.select(["input_ids", "lengths", "labels", "row"])
        moves: list[Move] = []
        if config.top_k is None:
            seen.plan = batch.plan
        else:
            seen.plan = self.teacher.plan_for(seen, {})
            moves = moves_between(self.teacher, seen.plan, self.trained, batch.plan)
        self.teacher.look(seen)
        nbytes = call_together(
            [self.teacher, self.trained],
            "roll_td.workers.distill.hand_over",
            teacher=self.teacher.name,
            student=self.trained.name,
            moves=moves,
            counts=dict(enumerate(counts.tolist())),
            group=self.group,
        )
        return {"teacher_mb": Sum(sum(nbytes) / 1e6)}


def moves_between(
    teacher: Cluster, seen: StepPlan, student: Cluster, learnt: StepPlan
) -> list[Move]:
    """What goes where, if the teacher's rows are cut by one plan and the student's by another."""
    givers, takers = homes([teacher]), homes([student])
    source: dict[int, int] = {}
    for worker, rank in enumerate(givers):
        info = teacher.rank_info(worker)
        if info.is_collecting:
            source |= dict.fromkeys(chain.from_iterable(seen.real(info.dp_rank)), rank)
    moves = []
    for worker, rank in enumerate(takers):
        rows_from: dict[int, list[int]] = {}
        for row in local(learnt, student.rank_info(worker).dp_rank).rows:
            rows_from.setdefault(source[row], []).append(row)
        moves += [Move(giver, rank, tuple(rows)) for giver, rows in rows_from.items()]
    return moves


def common_vocabulary(student: Any, teacher: Any) -> int:
    """How many entries of the logits of both are tokens. ValueError unless their tokenizers have
    the same tokens with the same numbers."""
    own, other = student.get_vocab(), teacher.get_vocab()
    if own != other:
        wrong = sorted(own.keys() ^ other.keys() | {t for t in own if own[t] != other.get(t)})
        shown = ", ".join(
            f"{token!r} ({own.get(token, 'none')}, {other.get(token, 'none')})"
            for token in wrong[:4]
        )
        raise ValueError(
            f"{len(wrong)} tokens differ between the tokenizers of student ({len(own)} tokens) and "
            f"teacher ({len(other)}): {shown}; distributions over other tokens can't be compared, "
            "so take a teacher with the student's tokenizer"
        )
    return int(max(own.values())) + 1
