"""Reinforcement learning with verifiable rewards: a policy learns from what its answers score."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from roll_td.algorithms.aggregation import denominators
from roll_td.config.model import GenerationConfig
from roll_td.config.rewards import check_domains
from roll_td.config.rlvr import RLVRConfig
from roll_td.data.loader import load_data
from roll_td.metrics import Metric, Sum, merge_metrics
from roll_td.models import load_tokenizer
from roll_td.pipelines import outcomes
from roll_td.pipelines.answering import answers, start_roles
from roll_td.pipelines.base import BasePipeline
from roll_td.pipelines.estimating import Estimator
from roll_td.pipelines.training import is_validation_due
from roll_td.protocol import DataProto
from roll_td.runtime.cluster import Cluster
from roll_td.runtime.refs import get

LEARNT_FROM = {"input_ids", "lengths", "response_mask", "infer_log_probs", "ref_log_probs"}
"""Columns of a train_step beside those that the policy loss names, where the batch has them."""


class RLVRPipeline(BasePipeline):
    """Roles: actor_train, actor_infer, reward, and reference with a KL. A step is a rollout of
    batch_size prompts and the updates from it."""

    shown = (
        "reward/mean", "response/length", "actor/loss", "actor/kl", "actor/grad_norm",
        "time/rollout_s", "time/train_s", "val/score", "val/pass@1",
    )  # fmt: skip

    def __init__(self, pipeline_config: RLVRConfig) -> None:
        super().__init__(pipeline_config)
        config = pipeline_config
        tokenizer = load_tokenizer(config.model)
        data = load_data(config.data, tokenizer, "prompts", config.batch_size, config.seed)
        self.train_data, self.validation_data = data.train, data.validation
        if "domain" in data.train.kept:
            check_domains(config.rewards, data.train.kept["domain"])
        self.generation = config.actor_infer.generation
        self.temperature = self.generation.temperature or 1.0
        self.estimator = Estimator(config.algorithm, self.generation.max_new_tokens)
        self.position = 0
        self.metrics: list[dict[str, Metric]] = []
        roles = [config.actor_train, config.actor_infer, config.reward]
        roles += [config.reference] if config.reference else []
        self.actor_train, self.actor_infer, self.reward, *others = start_roles(self, *roles)
        self.reference = others[0] if others else None
        self.reward.check_golds(data.train.kept, blocking=False)  # it logs what it finds
        self.set_model_update_pair(self.actor_train, self.actor_infer, config=config.model_update)
        self.set_checkpoint_clusters(self.actor_train)

    def run(self) -> None:
        """Roll out, estimate, update, step for step; validate and save in between."""
        config = self.pipeline_config
        for step in self.steps(config.max_steps):
            self.update_weights(step)
            if step == 0 and self.validation_data is not None:
                self.log(self.validate())
            batch = self.rollout()
            self.compute_log_probs(batch)
            estimated = self.estimator.estimate(batch)
            self.metrics.append({f"actor/{name}": value for name, value in estimated.items()})
            self.update_policy(batch)
            self.log(self.metrics)
            self.metrics = []
            if self.validation_data is not None and is_validation_due(config, step):
                self.update_weights(step + 1)
                self.log(self.validate(), step + 1)
            self.do_checkpoint(step)
        if config.export_dir is not None:
            with self.on_device(self.actor_train):
                self.actor_train.export(config.export_dir)

    def rollout(self) -> DataProto:
        """Scored answers to batch_size prompts, shaped; with max_refills to as many as it takes to
        have batch_size with signal. The next step goes on after the last prompt that is used."""
        config, found, groups = self.pipeline_config, [], 0
        with self.timing("rollout"):
            for _ in range(1 + config.max_refills):
                prompts = self.train_data.draw(self.position, config.batch_size)
                self.position += config.batch_size
                batch, rewards = self.answers(prompts, self.generation, config.seed)
                self.metrics += [rewards, outcomes.rollout_metrics(batch)]
                signal = self.estimator.shape(batch)
                found.append(batch[signal] if config.max_refills else batch)
                groups += len(set(found[-1]["group_id"].tolist()))
                if groups >= config.batch_size:
                    break
            # without any signal, what was sampled last is trained on: nothing of it counts
            batch = DataProto.concat(found) if groups else batch
            if groups > config.batch_size:
                names = sorted(set(batch["group_id"].tolist()))[: config.batch_size]
                batch = batch[torch.isin(batch["group_id"], torch.tensor(names))]
                self.position = names[-1] + 1
        return batch

    def answers(
        self, prompts: DataProto, generation: GenerationConfig, seed: int
    ) -> tuple[DataProto, dict[str, Metric]]:
        """Answers to prompts that have a group_id, with scores float32 (B · n); and what the
        rewards tell of them."""
        with self.on_device(self.actor_infer):
            return answers(self.actor_infer, self.reward, prompts, generation, seed)

    def compute_log_probs(self, batch: DataProto) -> None:
        """Add old_log_probs where the update can't tell them itself, and ref_log_probs."""
        tokens, temperature = batch.select(["input_ids", "lengths"]), self.temperature
        with self.timing("log_probs"):
            if self.pipeline_config.compares_old:
                with self.on_device(self.actor_train):
                    old = self.actor_train.compute_log_probs(tokens, "old_log_probs", temperature)
                batch.update(old)
            if self.reference is not None:
                with self.on_device(self.reference):
                    of = self.reference.compute_log_probs(tokens, "ref_log_probs", temperature)
                batch.update(of)

    def update_policy(self, batch: DataProto) -> None:
        """Learn from the batch ppo_epochs times, each time in mini_batches optimiser steps."""
        config, estimator = self.pipeline_config, self.estimator
        columns = (LEARNT_FROM | estimator.loss_columns) & set(batch.keys())
        parts = []
        with self.timing("train"), self.on_device(self.actor_train):
            for _ in range(config.ppo_epochs):
                for part in self.mini_batches(batch):
                    counts = denominators(part["response_mask"], divisor=config.algorithm.divisor)
                    matters = estimator.matters(part)
                    # with nothing to learn it is an optimiser step all the same
                    part = part[matters] if matters.any() else part[:1]
                    learnt = part.select(columns)
                    learnt.plan = self.actor_train.plan_for(learnt, counts)
                    learnt.meta_info = {
                        "temperature": self.temperature,
                        "kl_coefficient": estimator.kl_coefficient,
                    }
                    parts.append(self.actor_train.train_step(learnt).meta_info["metrics"])
        merged = merge_metrics(parts)
        if "kl" in merged:
            estimator.adapt(merged["kl"])
        self.metrics.append({f"actor/{name}": value for name, value in merged.items()})

    def mini_batches(self, batch: DataProto) -> Iterator[DataProto]:
        """The batch in mini_batches parts, in an order of the moment if there are several."""
        count = self.pipeline_config.mini_batches
        if count > 1:
            batch = batch.reorder(torch.randperm(len(batch)))
        return (part for part in batch.chunk(count) if len(part))

    def validate(self) -> dict[str, Metric]:
        """What answers to all of the validation data score."""
        assert self.validation_data is not None, "is_validation_due says no"
        config = self.pipeline_config
        prompts = self.validation_data.batch(np.arange(len(self.validation_data)))
        prompts.update({"group_id": torch.arange(len(prompts))})
        # other random numbers than the rollout's, the same each time
        batch, _ = self.answers(prompts, config.validation.generation, config.seed + 1)
        return outcomes.validation_metrics(batch, config.validation)

    def update_weights(self, step: int) -> None:
        """Weights of actor_train to actor_infer, if those of `step` are not there yet."""
        with self.timing("model_update"), self.on_device(self.actor_train, self.actor_infer):
            self.metrics.append(self.model_update(step))

    @contextmanager
    def on_device(self, *clusters: Cluster) -> Iterator[None]:
        """With offload: the models of these roles are on their devices inside, and not after."""
        if self.pipeline_config.offload:
            get([cluster.load_states(blocking=False) for cluster in clusters])
        yield
        if self.pipeline_config.offload:
            get([cluster.offload_states(blocking=False) for cluster in clusters])

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        """Log the seconds inside as time/<stage>_s of the step."""
        began = time.monotonic()
        yield
        self.metrics.append({f"time/{stage}_s": Sum(time.monotonic() - began)})

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream of prompts, and what the estimator keeps."""
        return {"position": self.position, "estimator": self.estimator.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict gave."""
        self.position = state["position"]
        self.estimator.load_state_dict(state["estimator"])
