"""The role of supervised fine-tuning."""

from __future__ import annotations

from typing import Any

import torch

from roll_td.protocol import DataProto
from roll_td.runtime.dispatch import Dispatch, register
from roll_td.workers.base import ModelWorker


class SFTWorker(ModelWorker):
    """Learns the labels of its rows."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, prefetch=True)
    def train_step(self, data: DataProto) -> DataProto:
        """One optimiser step on input_ids, lengths and labels; returns metrics, no rows."""
        metrics = self.strategy.train_step(data.to(self.device), self.loss_func)
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, prefetch=True)
    def val_step(self, data: DataProto) -> DataProto:
        """Of each row the loss summed over its labels, `loss` float32 (B), and how many these
        are, `tokens` int64 (B). Nothing is learnt."""
        return self.strategy.forward_step(data.to(self.device), self.row_losses).to("cpu")

    def loss_func(
        self, data: DataProto, output_tensor: Any
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The micro-batch's part of the mean cross-entropy over all labels of the step."""
        assert data.plan is not None, "a strategy gives each micro-batch its plan"
        loss = self.strategy.op_compute_language_loss(output_tensor, data["labels"])
        tokens = data.plan.denominators["tokens"]
        return loss / max(tokens, 1.0), {}  # where nothing is to be learnt, the loss is 0, not NaN

    def row_losses(self, data: DataProto, output_tensor: Any) -> dict[str, torch.Tensor]:
        """Columns of val_step for the rows of a micro-batch."""
        log_probs = self.strategy.op_compute_log_probs(output_tensor, data["input_ids"])
        wanted = data["labels"] != -100
        loss = -torch.where(wanted, log_probs, 0.0).sum(-1)
        return {"loss": loss, "tokens": wanted.sum(-1)}
