"""Does a recorded step again, stage by stage, and says where the numbers first differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll_td.checkpoint.store import fault_of
from roll_td.config.base import role_sections
from roll_td.config.replay import OnPolicyReplayConfig, ReplayConfig, record_path
from roll_td.pipelines.answering import start_roles
from roll_td.pipelines.base import BasePipeline
from roll_td.pipelines.comparing import Compared, compare, comparison_table
from roll_td.pipelines.estimating import Estimator
from roll_td.pipelines.onpolicy_distill import add_teachers, rows_of_teachers
from roll_td.pipelines.recording import Record
from roll_td.pipelines.rlvr import RLVRPipeline
from roll_td.protocol import DataProto
from roll_td.runtime.cluster import Cluster

EXACT, CLOSE, NEAR, ABOUT = 0.0, 1e-6, 1e-4, 1e-3
"""Tolerances: rewards; what is made of them; log-probs of the trainer, which are rounded by how
many ranks cut the work; what the engine told, and means over a mini-batch."""


LEARNERS = ("actor_train", "critic")
"""Roles that need the checkpoint."""


class ReplayPipeline(BasePipeline):
    """Each stage starts from what was recorded of the one before it, so that a fault shows where it
    is. Log-probs and losses need the weights that the step began with: those of the checkpoint
    step_N of the run for step N, and for step 0 those of the model."""

    def __init__(self, pipeline_config: ReplayConfig) -> None:
        super().__init__(pipeline_config)
        config, of = pipeline_config, pipeline_config.replay
        self.record = Record.load(record_path(of.run_dir, of.step))
        if of.sample is not None:
            self.record.check_sample(of.sample)
        self.temperature = config.actor_infer.generation.temperature or 1.0
        self.estimator = Estimator(config.algorithm, config.actor_infer.generation.max_new_tokens)
        self.told: list[str] = []
        self.checkpoint = Path(of.run_dir) / "checkpoints" / f"step_{of.step}"
        fault = fault_of(self.checkpoint) if of.step else None
        if fault is not None:
            self.told.append(f"no weights, so no log-probs and losses: {self.checkpoint}: {fault}")
        self.has_weights = fault is None
        learners = LEARNERS if self.has_weights else ()
        sections = role_sections(vars(config))
        roles = {key: role for key, role in sections.items() if key in (*self.asked, *learners)}
        self.roles = dict(zip(roles, start_roles(self, *roles.values()), strict=True))
        for learner in [self.roles[key] for key in learners if key in roles and of.step]:
            learner.load_checkpoint(str(self.checkpoint.absolute() / str(learner.name)))

    @property
    def asked(self) -> tuple[str, ...]:
        """Roles that are what they were in the run."""
        return "reward", "reference"

    # what an optimiser step is given
    for_actor: Any = RLVRPipeline.for_actor
    for_critic: Any = RLVRPipeline.for_critic
    learnt: Any = RLVRPipeline.learnt

    def run(self) -> None:
        """Print what each stage gives."""
        batch, of = self.record.batch, self.pipeline_config.replay
        ids = batch["sample_id"]
        self.names = [f"sample {name}" for name in ids.tolist()]
        self.rows = (
            torch.ones(len(ids), dtype=torch.bool) if of.sample is None else ids == of.sample
        )
        stages = [self.rewards, self.advantages]
        stages += [self.log_probs_again] if self.has_weights else []
        found = [one for stage in stages for one in stage(self.record.batch)]
        if self.has_weights and of.sample is None:
            found += self.losses(self.record.batch)
        print(comparison_table(found, self.told), flush=True)
        if of.sample is not None:
            for name in ("prompt", "ground_truth", "response", "finish_reason"):
                if name in batch:
                    print(f"{name}: {batch[name][self.rows.tolist().index(True)]!r}", flush=True)

    def rewards(self, batch: DataProto) -> Iterator[Compared]:
        """Scores of the texts."""
        if "reward" in self.roles:
            again = self.roles["reward"].compute_rewards(DataProto(None, batch.non_tensor_batch))
            for name in again.keys():  # noqa: SIM118  rows are what it iterates over
                yield self.compared("rewards", name, again[name], EXACT)

    def advantages(self, batch: DataProto) -> Iterator[Compared]:
        """What is made of the scores."""
        self.estimator.load_state_dict(self.record.estimator)
        batch.update({"response_mask": self.record.sampled_mask})
        self.estimator.shape(batch)
        counts = batch["response_mask"].any(-1)
        yield self.compared("scores", "shaped_scores", batch["shaped_scores"], CLOSE, counts)
        self.estimate(batch)
        for name in ("response_mask", "token_level_rewards", "advantages", "returns"):
            if name in batch:
                tolerance = EXACT if name == "response_mask" else CLOSE
                yield self.compared("advantages", name, batch[name], tolerance)

    def estimate(self, batch: DataProto) -> None:
        """Add advantages, as the pipeline does."""
        self.estimator.estimate(batch)

    def log_probs_again(self, batch: DataProto) -> Iterator[Compared]:
        """What the trainer says of the tokens, beside what it and the engine said, and what
        reference and critic say. The engine counts where it had the same weights."""
        tokens, mask = batch.select(["input_ids", "lengths"]), batch["response_mask"]
        again = self.log_probs(self.actor_train, tokens)
        if "old_log_probs" in batch:
            yield self.compared("log-probs", "old_log_probs", again, NEAR, mask)
        same = mask & (batch["weight_version"] == self.record.step + 1)
        yield self.compared("log-probs", "infer_log_probs", again, ABOUT, same)
        if "reference" in self.roles:
            again = self.log_probs(self.roles["reference"], tokens)
            yield self.compared("log-probs", "ref_log_probs", again, NEAR, mask)
        if "critic" in self.roles:
            again = self.roles["critic"].compute_values(tokens)["values"]
            yield self.compared("log-probs", "values", again, NEAR, mask)

    def log_probs(self, cluster: Cluster, tokens: DataProto) -> Tensor:
        """Log-probs of tokens at the sampling temperature, float32 (B, T)."""
        found: Tensor = cluster.compute_log_probs(tokens, "log_probs", self.temperature)[
            "log_probs"
        ]
        return found

    @property
    def actor_train(self) -> Cluster:
        """The role, where there are weights for it."""
        return self.roles["actor_train"]

    @property
    def critic(self) -> Cluster:
        """The role, where the run has it and there are weights for it."""
        return self.roles["critic"]

    def losses(self, batch: DataProto) -> Iterator[Compared]:
        """What actor and critic tell of each of their optimiser steps."""
        self.estimator.kl_coefficient = self.record.kl_coefficient
        row_of = {name: row for row, name in enumerate(batch["sample_id"].tolist())}
        parts = [batch[[row_of[name] for name in part]] for part in self.record.parts]
        names = [f"optimiser step {number}" for number in range(len(parts))]
        where = torch.ones(len(parts), dtype=torch.bool)
        for learner, recorded in self.record.metrics.items():
            cluster, given = {
                "actor": ("actor_train", self.for_actor),
                "critic": ("critic", self.for_critic),
            }[learner]
            train = self.roles[cluster].train_step
            again = [train(given(part)).meta_info["metrics"] for part in parts]
            for metric in recorded[0]:
                old, new = (
                    torch.tensor([float(one[metric]) for one in every], dtype=torch.float64)
                    for every in (recorded, again)
                )
                yield compare("losses", f"{learner}/{metric}", old, new, where, names, ABOUT)

    def compared(
        self,
        stage: str,
        name: str,
        again: Tensor,
        tolerance: float,
        where: Tensor | None = None,
    ) -> Compared:
        """A column that was computed again beside the recorded one, in the rows looked at."""
        recorded: Tensor = self.record.columns[name]
        rows = self.rows if recorded.ndim == 1 else self.rows[:, None].expand(recorded.shape)
        where = rows if where is None else rows & where
        return compare(stage, name, recorded, again, where, self.names, tolerance)


class OnPolicyReplayPipeline(ReplayPipeline):
    """The same of on-policy distillation, with what its teachers say."""

    def __init__(self, pipeline_config: OnPolicyReplayConfig) -> None:
        super().__init__(pipeline_config)

    @property
    def asked(self) -> tuple[str, ...]:
        """Also teachers."""
        return *super().asked, *(f"teachers.{tag}" for tag in self.pipeline_config.teachers)

    def estimate(self, batch: DataProto) -> None:
        """Also what teachers say."""
        super().estimate(batch)
        add_teachers(batch, self.pipeline_config)

    def log_probs_again(self, batch: DataProto) -> Iterator[Compared]:
        """Also those of teachers."""
        yield from super().log_probs_again(batch)
        tokens = batch.select(["input_ids", "lengths"])
        again = torch.zeros(batch["input_ids"].shape)
        for tag, rows in rows_of_teachers(batch, self.pipeline_config).items():
            again[rows] = self.log_probs(self.roles[f"teachers.{tag}"], tokens[rows])
        yield self.compared("log-probs", "teacher_log_probs", again, NEAR, batch["response_mask"])
