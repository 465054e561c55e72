"""Does a recorded step of reinforcement learning again, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from roll_td.config.base import role_sections
from roll_td.config.replay import OnPolicyReplayConfig, ReplayConfig
from roll_td.pipelines.answering import start_roles
from roll_td.pipelines.comparing import Compared
from roll_td.pipelines.estimating import Estimator
from roll_td.pipelines.onpolicy_distill import add_teachers, rows_of_teachers
from roll_td.pipelines.recording import RolloutRecord
from roll_td.pipelines.replaying import ABOUT, CLOSE, EXACT, NEAR, Replaying
from roll_td.pipelines.rlvr import RLVRPipeline
from roll_td.protocol import DataProto
from roll_td.runtime.cluster import Cluster

LEARNERS = ("actor_train", "critic")
"""Roles that need the checkpoint."""


class ReplayPipeline(Replaying):
    """From rewards to losses; log-probs and losses need the weights that the step began with."""

    record: RolloutRecord

    def __init__(self, pipeline_config: ReplayConfig) -> None:
        super().__init__(pipeline_config)
        config = pipeline_config
        self.open(RolloutRecord, "log-probs and losses")
        self.temperature = config.actor_infer.generation.temperature or 1.0
        self.estimator = Estimator(config.algorithm, config.actor_infer.generation.max_new_tokens)
        learners = LEARNERS if self.has_weights else ()
        sections = role_sections(vars(config))
        roles = {key: role for key, role in sections.items() if key in (*self.asked, *learners)}
        self.roles = dict(zip(roles, start_roles(self, *roles.values()), strict=True))
        for learner in [self.roles[key] for key in learners if key in roles]:
            self.load(learner)

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
        stages = [self.rewards, self.advantages]
        stages += [self.log_probs_again] if self.has_weights else []
        stages += [self.losses] if self.has_weights and self.sample is None else []
        self.show([one for stage in stages for one in stage(self.record.batch)])
        batch = self.record.batch
        if self.sample is not None:
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
        learners = {
            "actor": ("actor_train", self.for_actor),
            "critic": ("critic", self.for_critic),
        }
        for learner, recorded in self.record.metrics.items():
            role, given = learners[learner]
            train = self.roles[role].train_step
            again = [train(given(part)).meta_info["metrics"] for part in parts]
            yield from self.steps_compared(f"{learner}/", recorded, again)


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
