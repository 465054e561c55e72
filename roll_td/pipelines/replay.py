"""Does a recorded step again, stage by stage, and says where the numbers first differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll_td.checkpoint.store import fault_of
from roll_td.config.replay import ReplayConfig, record_path
from roll_td.pipelines.answering import start_roles
from roll_td.pipelines.base import BasePipeline
from roll_td.pipelines.comparing import Compared, compare, comparison_table
from roll_td.pipelines.estimating import Estimator
from roll_td.pipelines.recording import Record
from roll_td.pipelines.rlvr import RLVRPipeline
from roll_td.protocol import DataProto

EXACT, CLOSE, NEAR, ABOUT = 0.0, 1e-6, 1e-4, 1e-3
"""Tolerances: rewards; what is made of them; log-probs of the trainer, which are rounded by how
many ranks cut the work; what the engine told, and means over a mini-batch."""


class ReplayPipeline(BasePipeline):
    """Each stage starts from what was recorded of the one before it, so that a fault shows where it
    is. Log-probs and losses need the weights that the step began with: those of the checkpoint
    step_N of the run for step N, and for step 0 those of the model."""

    def __init__(self, pipeline_config: ReplayConfig) -> None:
        super().__init__(pipeline_config)
        config, of = pipeline_config, pipeline_config.replay
        self.record = Record.load(record_path(of.run_dir, of.step))
        self.temperature = config.actor_infer.generation.temperature or 1.0
        self.estimator = Estimator(config.algorithm, config.actor_infer.generation.max_new_tokens)
        self.told: list[str] = []
        self.checkpoint = Path(of.run_dir) / "checkpoints" / f"step_{of.step}"
        fault = fault_of(self.checkpoint) if of.step else None
        if fault is not None:
            self.told.append(f"no weights, so no log-probs and losses: {self.checkpoint}: {fault}")
        roles = [config.reward, config.reference]
        roles += [None] if fault is not None else [config.actor_train]
        given = [role for role in roles if role is not None]
        clusters = dict(zip([r.name for r in given], start_roles(self, *given), strict=True))
        self.reward, self.reference, actor = (
            None if role is None else clusters[role.name] for role in roles
        )
        if actor is not None:
            self.actor_train = actor
            if of.step:
                actor.load_checkpoint(str(self.checkpoint.absolute() / str(actor.name)))
        self.has_weights = actor is not None

    # what an optimiser step is given
    for_actor: Any = RLVRPipeline.for_actor
    learnt: Any = RLVRPipeline.learnt

    def run(self) -> None:
        """Print what each stage gives."""
        batch, of = self.record.batch, self.pipeline_config.replay
        ids = batch["sample_id"]
        self.names = [f"sample {name}" for name in ids.tolist()]
        self.rows = (
            torch.ones(len(ids), dtype=torch.bool) if of.sample is None else ids == of.sample
        )
        if not self.rows.any():
            raise ValueError(f"sample={of.sample}: step {of.step} has {sorted(ids.tolist())}")
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
        if self.reward is not None:
            again = self.reward.compute_rewards(DataProto(None, batch.non_tensor_batch))
            for name in again.keys():  # noqa: SIM118  rows are what it iterates over
                yield self.compared("rewards", name, again[name], EXACT)

    def advantages(self, batch: DataProto) -> Iterator[Compared]:
        """What is made of the scores."""
        self.estimator.load_state_dict(self.record.estimator)
        batch.update({"response_mask": self.record.sampled_mask})
        self.estimator.shape(batch)
        counts = batch["response_mask"].any(-1)
        yield self.compared("scores", "shaped_scores", batch["shaped_scores"], CLOSE, counts)
        self.estimator.estimate(batch)
        for name in ("response_mask", "token_level_rewards", "advantages", "returns"):
            if name in batch:
                tolerance = EXACT if name == "response_mask" else CLOSE
                yield self.compared("advantages", name, batch[name], tolerance)

    def log_probs_again(self, batch: DataProto) -> Iterator[Compared]:
        """What the trainer says of the tokens, beside what it and the engine said, and what the
        reference says. The engine counts where it had the same weights."""
        tokens, mask = batch.select(["input_ids", "lengths"]), batch["response_mask"]
        again = self.actor_train.compute_log_probs(tokens, "log_probs", self.temperature)
        if "old_log_probs" in batch:
            yield self.compared("log-probs", "old_log_probs", again["log_probs"], NEAR, mask)
        same = mask & (batch["weight_version"] == self.record.step + 1)
        yield self.compared("log-probs", "infer_log_probs", again["log_probs"], ABOUT, same)
        if self.reference is not None:
            again = self.reference.compute_log_probs(tokens, "log_probs", self.temperature)
            yield self.compared("log-probs", "ref_log_probs", again["log_probs"], NEAR, mask)

    def losses(self, batch: DataProto) -> Iterator[Compared]:
        """What the actor tells of each of its optimiser steps."""
        self.estimator.kl_coefficient = self.record.kl_coefficient
        row_of = {name: row for row, name in enumerate(batch["sample_id"].tolist())}
        parts = [batch[[row_of[name] for name in part]] for part in self.record.parts]
        recorded = self.record.metrics
        again = [
            self.actor_train.train_step(self.for_actor(part)).meta_info["metrics"]
            for part in parts[: len(recorded)]
        ]
        names = [f"optimiser step {number}" for number in range(len(recorded))]
        for metric in recorded[0] if recorded else ():
            old, new = (
                torch.tensor([float(one[metric]) for one in every], dtype=torch.float64)
                for every in (recorded, again)
            )
            where = torch.ones(len(old), dtype=torch.bool)
            yield compare("losses", metric, old, new, where, names, ABOUT)

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
