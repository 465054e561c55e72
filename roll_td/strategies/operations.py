"""What a loss may ask of the output of a model; strategies that hold the model itself have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from roll_td.algorithms.functional import Head
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

    def op_compute_values(self, output_tensor: Any) -> Tensor:
        """float32 (b, T): V(input_ids[:t]) of a model with a head of one number (see
        models.value_head); 0 at index 0 and in padding."""
        return packing.values(output_tensor)

    def op_compute_language_loss(self, output_tensor: Any, labels: Tensor) -> Tensor:
        """float32 scalar: sum of -log p over the labels, int64 (b, T), that are not -100."""
        return packing.language_loss(output_tensor, labels)

    def op_map_logits(
        self, output_tensor: Any, wanted: Tensor, function: Callable[[Tensor, slice], Tensor]
    ) -> Tensor:
        """(n, …): what `function`, of logits float32 (m, V) and which of the n these m are, makes
        of the logits that predict the n tokens at wanted, bool (b, T), row after row; a few tokens
        at a time. wanted is False at index 0 and in padding."""
        return packing.map_logits(output_tensor, wanted, function)

    def op_compute_states(self, output_tensor: Any, wanted: Tensor) -> Tensor:
        """(n, H): the hidden states that those logits are made of, by functional.logits."""
        return packing.states_before(output_tensor, wanted)

    def op_keep_head(self, output_tensor: Any) -> Head:
        """What makes logits of them, as it is now: a copy, without a gradient."""
        head: Head = output_tensor.head
        bias = None if head.bias is None else head.bias.detach().clone()
        return Head(head.weight.detach().clone(), bias, head.softcap)
