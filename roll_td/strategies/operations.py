"""What a loss may ask of the output of a model; strategies that hold the model itself have it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from roll_td.strategies import packing


class Operations:
    """Reads the opaque output_tensor of forward_step and train_step, a packing.Output."""

    def op_compute_log_probs(
        self, output_tensor: Any, input_ids: Tensor, temperature: float = 1.0
    ) -> Tensor:
        """float32 (b, T): log p(input_ids[t] | input_ids[:t]) at a temperature above 0; 0 at index
        0 and in padding. input_ids: int64 (b, T) of the micro-batch."""
        return packing.log_probs(output_tensor, input_ids, temperature)

    def op_compute_entropy(self, output_tensor: Any, temperature: float = 1.0) -> Tensor:
        """float32 (b, T): entropy in nats of the distribution that predicts position t; 0 at index
        0 and in padding."""
        return packing.entropy(output_tensor, temperature)

    def op_compute_language_loss(self, output_tensor: Any, labels: Tensor) -> Tensor:
        """float32 scalar: sum of -log p over the labels, int64 (b, T), that are not -100."""
        return packing.language_loss(output_tensor, labels)
