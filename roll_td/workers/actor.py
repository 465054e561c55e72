"""The roles of a policy that learns, and of the model it is compared with."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from roll_td.algorithms import ratios
from roll_td.algorithms.aggregation import aggregate
from roll_td.algorithms.choosing import call, check_losses
from roll_td.algorithms.kl import divergence
from roll_td.algorithms.masking import keep, token_means
from roll_td.config.base import BaseConfig
from roll_td.config.classes import import_object
from roll_td.metrics import Metric
from roll_td.protocol import DataProto
from roll_td.runtime.dispatch import Dispatch, register
from roll_td.workers.base import ModelWorker


class ReferenceWorker(ModelWorker):
    """Tells how likely its model holds what another one has sampled."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def compute_log_probs(self, data: DataProto, column: str, temperature: float) -> DataProto:
        """Log-probs of input_ids under the model, float32 (B, T), as the column of this name."""

        def columns(micro: DataProto, output: Any) -> dict[str, Tensor]:
            ids = micro["input_ids"]
            return {column: self.strategy.op_compute_log_probs(output, ids, temperature)}

        return self.strategy.forward_step(data.to(self.device), columns).to("cpu")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def count_logits(self) -> int:
        """How many tokens the model tells the log-probs of."""
        return int(self.strategy.model.get_output_embeddings().weight.shape[0])


class ActorWorker(ReferenceWorker):
    """A policy that learns from advantages."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: BaseConfig) -> None:
        """Also find the policy loss that the pipeline's algorithm names."""
        super().initialize(pipeline_config)
        self.algorithm = cast(Any, pipeline_config).algorithm
        self.policy_loss = import_object(self.algorithm.policy_loss.path)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, prefetch=True)
    def train_step(self, data: DataProto) -> DataProto:
        """One optimiser step on a global mini-batch; returns metrics, no rows.

        Columns: input_ids, lengths, response_mask (what counts), advantages, infer_log_probs, what
        the policy loss names, ref_log_probs for a KL in the loss. Without old_log_probs the update
        compares with itself: it is the first one of its rollout. meta_info has `temperature`, of
        the sampling, and `kl_coefficient`. The plan has denominators of `algorithms.aggregation`.
        """
        metrics = self.strategy.train_step(data.to(self.device), self.loss_func)
        return DataProto(meta_info={"metrics": metrics})

    def loss_func(
        self, data: DataProto, output_tensor: Any
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The micro-batch's part of the loss, by the pipeline's algorithm."""
        algorithm, strategy, mask = self.algorithm, self.strategy, data["response_mask"]
        temperature = data.meta_info["temperature"]
        log_probs = strategy.op_compute_log_probs(output_tensor, data["input_ids"], temperature)
        names = data.keys()
        columns = {"old_log_probs": log_probs.detach()} | {name: data[name] for name in names}
        old, engine = columns["old_log_probs"], columns["infer_log_probs"]
        metrics = ratios.gap(old, engine, mask)

        if (threshold := algorithm.off_policy_threshold) is not None:
            advantages = columns["advantages"]
            mask = ratios.off_policy_mask(log_probs, old, advantages, mask, threshold=threshold)
        columns |= {"log_probs": log_probs, "response_mask": mask}
        made = call(self.policy_loss, columns, algorithm.policy_loss.arguments)
        check_losses(self.policy_loss, made, log_probs)
        losses, own = made
        metrics |= own
        if (weights := algorithm.importance_weights) is not None:
            losses = losses * ratios.importance_weights(old, engine, mask, **vars(weights))
        if algorithm.kl is not None and algorithm.kl.place == "loss":
            reference, estimator = columns["ref_log_probs"], algorithm.kl.estimator
            kl = divergence(log_probs, reference, mask, estimator=estimator)
            losses = losses + data.meta_info["kl_coefficient"] * kl
            metrics |= token_means({"kl": kl}, mask)
        if algorithm.entropy_coefficient:
            entropy = keep(strategy.op_compute_entropy(output_tensor, temperature), mask)
            losses = losses - algorithm.entropy_coefficient * entropy
            metrics |= token_means({"entropy": entropy}, mask)

        assert data.plan is not None, "a strategy gives each micro-batch its plan"
        mode, denominators = algorithm.aggregation, data.plan.denominators
        return aggregate(losses, mask, denominators, mode=mode), metrics
