"""`mock_infer`: deterministic answers without a model, for tests and dry runs of any pipeline."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll_td.config.model import GenerationConfig
from roll_td.config.strategies import MockConfig
from roll_td.protocol import DataProto
from roll_td.strategies import states
from roll_td.strategies.base import (
    ForwardFunc,
    InferenceStrategy,
    ModelProvider,
    StrategyContext,
)
from roll_td.strategies.batches import by_micro_batch, with_responses
from roll_td.strategies.engine import CoreEngine
from roll_td.strategies.exchange import VERSION
from roll_td.strategies.mock_engine import MockCore, log_probs, respond
from roll_td.strategies.parts import Part


@dataclass(frozen=True)
class MockOutput:
    """The output_tensor of a MockInfer."""

    input_ids: Tensor
    """int64 (b, T)."""
    lengths: Tensor
    """int64 (b,)."""


class MockInfer(InferenceStrategy):
    """Log-probs are a function of a token and the one before it; responses, of seed and sample."""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._config: MockConfig = self.settings or MockConfig()
        self._calls = 0
        self.weight_version = 0
        self.engine: CoreEngine | None = None

    def initialize(self, model_provider: ModelProvider) -> None:
        """Make no model."""

    def forward_step(self, batch: DataProto, forward_func: ForwardFunc) -> DataProto:
        """The columns that forward_func returns for each micro-batch, rows in their order.
        Micro-batches are those of batch.plan, else of training.micro_batch_size rows. RuntimeError
        in the call that is to fail."""
        self._begin()

        def columns(micro: DataProto) -> Mapping[str, Tensor]:
            return forward_func(micro, MockOutput(micro["input_ids"], micro["lengths"]))

        size = self.context.config.training.micro_batch_size
        return by_micro_batch(batch, size, self.context.device, columns)

    def op_compute_log_probs(
        self, output_tensor: Any, input_ids: Tensor, temperature: float = 1.0
    ) -> Tensor:
        """float32 (b, T), in (-4, 0) at any temperature; 0 at index 0 and in padding."""
        return log_probs(input_ids) * _predicted(output_tensor)

    def op_compute_entropy(self, output_tensor: Any, temperature: float = 1.0) -> Tensor:
        """float32 (b, T): that of vocab_size equally likely tokens; 0 at index 0 and in padding."""
        return _predicted(output_tensor) * math.log(self._config.vocab_size)

    def op_compute_language_loss(self, output_tensor: Any, labels: Tensor) -> Tensor:
        """float32 scalar: sum of -log p over the labels, int64 (b, T), that are not -100."""
        wanted = (labels != -100) & (_predicted(output_tensor) > 0)
        return -log_probs(output_tensor.input_ids, labels)[wanted].sum()

    def generate(self, batch: DataProto, generation: GenerationConfig, seed: int) -> DataProto:
        """Responses to prompts, rows and columns as HfInfer.generate has them.

        Tokens and lengths are what the config allows, from random numbers made of seed and sample;
        infer_log_probs are those that op_compute_log_probs gives. finish_reason is length for a
        response of max_new_tokens, else stop. RuntimeError in the call that is to fail.
        """
        self._begin()
        n = generation.num_return_sequences
        ids = batch["sample_id"].tolist() if "sample_id" in batch else range(len(batch))
        last = (batch["lengths"] - 1).clamp(min=0)[:, None]
        prompt_ends = batch["input_ids"].gather(1, last).flatten().tolist()
        responses = []
        for sample_id, prompt_end in zip(ids, prompt_ends, strict=True):
            responses += [
                respond(self._config, generation, seed, sample_id * n + j, prompt_end)
                for j in range(n)
            ]
        return with_responses(batch, responses, self.weight_version)

    def open_engine(self, generation: GenerationConfig, seed: int) -> CoreEngine:
        """An engine that gives the same responses, `slots` of them at a time, each after as many
        times token_s as it has tokens. One of the workers may fail, as the config says."""
        place, config = self.context.rank_info, self._config
        fault = config.fault if place.rank == config.fault_worker else None
        core = MockCore(config, generation, seed, lambda: self.weight_version, fault)
        owner = f"role {self.context.role}, worker {place.rank}"
        self.engine = CoreEngine(core, owner, self.context.device)
        return self.engine

    def setup_model_update(self) -> None:
        """None: it takes weights of any names and shapes."""

    def update_parameter_in_bucket(self, parts: Iterable[Part]) -> None:
        """Keep none of them."""

    def process_weights_after_loading(self, version: int) -> None:
        """Remember the number of the update."""
        if self.engine is not None:
            self.engine.forget()
        self.weight_version = version

    def save_checkpoint(self, folder: Path) -> None:
        """Write the version of the weights that there would be."""
        tensors = {VERSION: torch.tensor(self.weight_version)}
        states.save(folder, tensors, self.context.groups["world"])

    def load_checkpoint(self, folder: Path) -> None:
        """Read what save_checkpoint wrote."""
        tensors = {VERSION: torch.tensor(self.weight_version)}
        states.load(folder, tensors, self.context.groups["world"])
        self.weight_version = int(tensors[VERSION])

    def offload_states(self, include: Iterable[str] = ("model",)) -> None:
        """There is nothing to move."""

    def load_states(self, include: Iterable[str] = ("model",)) -> None:
        """There is nothing to move."""

    def _begin(self) -> None:
        """What comes before each answer: the fault, or the latency."""
        call, self._calls = self._calls, self._calls + 1
        if call == self._config.fail_on_call:
            raise RuntimeError(f"mock_infer: call {call} fails, as fail_on_call says")
        time.sleep(self._config.latency_s)


def _predicted(output: MockOutput) -> Tensor:
    """float32 (b, T): 1 where there is a token with one before it."""
    at = torch.arange(output.input_ids.shape[1], device=output.lengths.device)
    return ((at > 0) & (at < output.lengths[:, None])).float()
