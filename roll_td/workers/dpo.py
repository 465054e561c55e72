"""The roles of learning from pairs: the policy, and the reference it is compared with."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from roll_td.algorithms.choosing import call
from roll_td.algorithms.preference import log_ratios, pair_metrics
from roll_td.config.base import BaseConfig
from roll_td.config.classes import import_object
from roll_td.metrics import Metric
from roll_td.models.lora import adapters_off
from roll_td.protocol import DataProto
from roll_td.runtime.dispatch import Dispatch, register
from roll_td.workers.base import ModelWorker


class AnswerWorker(ModelWorker):
    """Tells how likely its model holds answers."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: BaseConfig) -> None:
        """Also take from the pipeline's config what an answer's tokens make."""
        super().initialize(pipeline_config)
        self.over: str = cast(Any, pipeline_config).over

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def compute_answers(self, data: DataProto) -> DataProto:
        """Column `answers` float32 (B): of the tokens of each row's labels the log-probs' sum, or
        mean, as `over` says. Columns: input_ids, lengths, labels."""

        def columns(micro: DataProto, output: Any) -> dict[str, Tensor]:
            return {"answers": self.of_answers(micro, output)}

        return self.strategy.forward_step(data.to(self.device), columns).to("cpu")

    def of_answers(self, micro: DataProto, output: Any) -> Tensor:
        """What compute_answers gives of a micro-batch, with a gradient, float32 (b,)."""
        log_probs = self.strategy.op_compute_log_probs(output, micro["input_ids"])
        return log_ratios(log_probs, None, micro["labels"] != -100, over=self.over)


class DPOWorker(AnswerWorker):
    """A policy that learns from pairs."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: BaseConfig) -> None:
        """Also find the loss that the pipeline's config names."""
        super().initialize(pipeline_config)
        self.loss = cast(Any, pipeline_config).loss
        self.pair_loss = import_object(self.loss.path)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def compute_reference(self, data: DataProto) -> DataProto:
        """compute_answers of the model without its adapters. ValueError if it has none."""
        with adapters_off(self.strategy.model):
            return super().compute_answers(data)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, prefetch=True)
    def train_step(self, data: DataProto) -> DataProto:
        """One optimiser step; returns metrics, no rows.

        Columns: input_ids, lengths, labels; is_chosen bool (B) and group_id int64 (B), which the
        two rows of a pair share; `reference` float32 (B), as compute_answers gives, but without
        one. The plan keeps pairs together, and its denominator `pairs` counts them.
        """
        metrics = self.strategy.train_step(data.to(self.device), self.loss_func)
        return DataProto(meta_info={"metrics": metrics})

    def loss_func(self, data: DataProto, output_tensor: Any) -> tuple[Tensor, dict[str, Metric]]:
        """The micro-batch's part of the mean loss of a pair."""
        assert data.plan is not None, "a strategy gives each micro-batch its plan"
        ratios = self.of_answers(data, output_tensor)
        losses, metrics = pair_losses(data, ratios, self.pair_loss, self.loss.arguments)
        return losses.sum() / data.plan.denominators["pairs"], metrics


def pair_losses(
    data: DataProto, answers: Tensor, loss: Any, settings: dict[str, Any]
) -> tuple[Tensor, dict[str, Metric]]:
    """Losses of the P pairs, (P,), and pair_metrics with the `beta` of the settings, 1 if they have
    none. answers: of the policy, (2 P,); data: columns is_chosen and group_id, and `reference`."""
    reference = data["reference"] if "reference" in data else torch.zeros_like(answers)
    ratios = answers - reference
    chosen, rejected = (_of_side(data, ratios, side) for side in (True, False))
    losses = call(loss, {"chosen": chosen, "rejected": rejected}, settings)
    return losses, pair_metrics(chosen, rejected, beta=settings.get("beta", 1.0))


def _of_side(data: DataProto, values: Tensor, side: bool) -> Tensor:
    """The values of the chosen or the rejected rows, in the order of the pairs' group_id."""
    rows = (data["is_chosen"] == side).nonzero().squeeze(1)
    groups, order = data["group_id"][rows].sort()
    pairs = data["group_id"].unique()
    assert groups.equal(pairs), "a plan over pairs keeps both rows of each together"
    return values[rows[order]]
