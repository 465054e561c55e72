"""The role that learns what states are worth."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from roll_td.algorithms import losses
from roll_td.algorithms.aggregation import aggregate
from roll_td.config.base import BaseConfig
from roll_td.metrics import Metric
from roll_td.models.value_head import load_value_model
from roll_td.protocol import DataProto
from roll_td.runtime.dispatch import Dispatch, register
from roll_td.strategies.base import ModelProvider
from roll_td.workers.base import ModelWorker


class CriticWorker(ModelWorker):
    """Expects of each state the rewards to come."""

    model_provider: ModelProvider = staticmethod(load_value_model)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: BaseConfig) -> None:
        """Also take the bound of its moves from the pipeline's algorithm."""
        super().initialize(pipeline_config)
        self.value_clip: float | None = cast(Any, pipeline_config).algorithm.value_clip

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def compute_values(self, data: DataProto) -> DataProto:
        """Column `values` float32 (B, T): at index t that of the state before token t, which is
        input_ids[:t]; 0 at index 0 and in padding. Columns: input_ids, lengths."""

        def columns(micro: DataProto, output: Any) -> dict[str, Tensor]:
            return {"values": self.strategy.op_compute_values(output)}

        return self.strategy.forward_step(data.to(self.device), columns).to("cpu")

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, prefetch=True)
    def train_step(self, data: DataProto) -> DataProto:
        """One optimiser step on a global mini-batch; returns metrics, no rows.

        Columns: input_ids, lengths, response_mask (what counts), values as compute_values gave them
        after the rollout, returns. The plan's denominator `tokens` counts what counts.
        """
        metrics = self.strategy.train_step(data.to(self.device), self.loss_func)
        return DataProto(meta_info={"metrics": metrics})

    def loss_func(self, data: DataProto, output_tensor: Any) -> tuple[Tensor, dict[str, Metric]]:
        """The micro-batch's part of the mean loss of a token."""
        assert data.plan is not None, "a strategy gives each micro-batch its plan"
        predicted, mask = self.strategy.op_compute_values(output_tensor), data["response_mask"]
        of_tokens, metrics = losses.value(
            predicted, data["values"], data["returns"], mask, clip=self.value_clip
        )
        return aggregate(of_tokens, mask, data.plan.denominators, mode="token-mean"), metrics
