"""`hf_infer`: a model of transformers on each worker, which generates and gives log-probs alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll_td import models
from roll_td.config.model import GenerationConfig
from roll_td.protocol import DataProto
from roll_td.strategies import packing, sampling, states
from roll_td.strategies.base import ForwardFunc, InferenceStrategy, ModelProvider
from roll_td.strategies.batches import by_micro_batch, with_responses
from roll_td.strategies.engine import CoreEngine
from roll_td.strategies.exchange import VERSION, HoldsWeights
from roll_td.strategies.generation import Sample, Sampler, Stop, as_sampled
from roll_td.strategies.hf_engine import HfCore
from roll_td.strategies.operations import Operations
from roll_td.strategies.parts import Part

STATES = {"model", "optimizer", "gradients"}
"""What can be named; this strategy has a model alone."""


class HfInfer(HoldsWeights, Operations, InferenceStrategy):
    """A whole model on each worker; the workers have nothing to do with each other."""

    def initialize(self, model_provider: ModelProvider) -> None:
        """Make the model, without LoRA: weights come merged.

        ValueError if it lies on the meta device, or if training.packing is set and it does not keep
        packed rows apart.
        """
        config = replace(self.context.model, lora=None)
        self.model: Any = model_provider(config, self.context.seed)
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise ValueError("the model provider left weights on the meta device; load them")
        self.model.requires_grad_(False).eval()
        self._wants_rows = self.context.config.training.packing and packing.keep_rows_apart(
            self.model
        )
        states.place(self.model, self.context.device)
        self._offloaded: states.Offloaded | None = None
        self.engine: CoreEngine | None = None

    def forward_step(self, batch: DataProto, forward_func: ForwardFunc) -> DataProto:
        """The columns that forward_func returns for each micro-batch, rows in their order; no
        gradients. Micro-batches are those of batch.plan, else of training.micro_batch_size rows.
        ValueError if the model is offloaded."""
        self._require_model()
        self._attend(packing.ROW_BY_ROW)

        def columns(micro: DataProto) -> Mapping[str, Tensor]:
            return forward_func(micro, self._forward(micro))

        size = self.context.config.training.micro_batch_size
        with torch.no_grad():
            return by_micro_batch(batch, size, self.context.device, columns)

    def generate(self, batch: DataProto, generation: GenerationConfig, seed: int) -> DataProto:
        """Responses to prompts: B · n rows, n = generation.num_return_sequences for each in turn.

        batch: right-padded prompts, input_ids int64 (B, T) and lengths int64 (B). Returns its
        columns repeated, and of prompt and response: input_ids, lengths, response_mask,
        infer_log_probs (of the distribution sampled from, temperature 0 counts as 1 there),
        weight_version and finish_reason: stop, or length for max_new_tokens and for the model's
        last position.

        Response j of a row draws from random numbers of its own, made of seed and, with a column
        sample_id, sample_id · n + j, else row · n + j: what else is in the batch does not reach it.
        A response ends with the end tokens of the model's configs, and of the tokenizer that
        model.tokenizer names; with stop_token_ids; with the token that completes a stop string.

        ValueError for an empty prompt, if the model is offloaded, or if a layer of it keeps
        anything but keys and values.
        """
        self._ready()
        lengths, n = batch["lengths"].tolist(), generation.num_return_sequences
        if 0 in lengths:
            raise ValueError(f"prompt {lengths.index(0)} is empty; give it a token to start from")
        rows = batch["input_ids"].cpu()
        prompts = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        ids = batch["sample_id"].tolist() if "sample_id" in batch else range(len(prompts))
        last = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        samples = [
            Sample(
                prompt=row,
                prompt_tokens=length,
                most_tokens=min([generation.max_new_tokens, *([last - length] if last else [])]),
                random=sampling.generator(seed, sample_id * n + j),
            )
            for row, (length, sample_id) in enumerate(zip(lengths, ids, strict=True))
            for j in range(n)
        ]
        settings: Any = self.settings
        with torch.inference_mode():
            stop = self._stop(generation)
            Sampler(self.model, generation, stop, settings.batch_size, prompts, samples).run()
        return with_responses(batch, samples, self.weight_version)

    def open_engine(self, generation: GenerationConfig, seed: int) -> CoreEngine:
        """An engine that gives to a sample_id the tokens that `generate` gives, with log-probs that
        differ by float rounding at most: the batch is another. It rests while weights come and
        while the model is offloaded, else these raise RuntimeError. ValueError as `generate`."""
        settings: Any = self.settings
        place, stop = self.context.rank_info.rank, self._stop(generation)
        core = HfCore(
            self.model,
            generation,
            stop,
            settings.batch_size,
            seed,
            version=lambda: self.weight_version,
            begin=self._ready,
        )
        self._ready()
        owner = f"role {self.context.role}, worker {place}"
        self.engine = CoreEngine(core, owner, self.context.device)
        return self.engine

    def update_parameter_in_bucket(self, parts: Iterable[Part]) -> None:
        """As HoldsWeights has it."""
        self._require_rest("new weights come")
        super().update_parameter_in_bucket(parts)

    def process_weights_after_loading(self, version: int) -> None:
        """As HoldsWeights has it; keys and values that the engine has of the old weights go."""
        if self.engine is not None:
            self.engine.forget()
        super().process_weights_after_loading(version)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight once, with the name that Hugging Face has for it, in one order."""
        self._require_model()
        return models.full_weights(self.model)

    def save_checkpoint(self, folder: Path) -> None:
        """Write the weights and their version into a folder; all workers of the role together, as
        they have the same. What was offloaded is so after."""
        with self._resident():
            states.save(folder, self._checkpoint(), self.context.groups["world"])

    def load_checkpoint(self, folder: Path) -> None:
        """Read what save_checkpoint wrote. Raises ValueError if it is of another model."""
        with self._resident():
            tensors = self._checkpoint()
            states.load(folder, tensors, self.context.groups["world"])
            if self.engine is not None:
                self.engine.forget()
            self.weight_version = int(tensors[VERSION])

    def offload_states(self, include: Iterable[str] = ("model",)) -> None:
        """Move the model to host memory until load_states. ValueError for an unknown state."""
        if _has_model(include) and self._offloaded is None:
            self._require_rest("offload_states")
            self._offloaded = states.Offloaded(self.model.parameters())

    def load_states(self, include: Iterable[str] = ("model",)) -> None:
        """Move the model back, bit-equal. ValueError for an unknown state."""
        if _has_model(include) and self._offloaded is not None:
            self._offloaded.load()
            self._offloaded = None

    def _checkpoint(self) -> dict[str, Tensor]:
        tensors = {f"model.{name}": tensor.detach() for name, tensor in states.named(self.model)}
        return tensors | {VERSION: torch.tensor(self.weight_version)}

    @contextmanager
    def _resident(self) -> Iterator[None]:
        was_away = self._offloaded is not None
        self.load_states()
        try:
            yield
        finally:
            if was_away:
                self.offload_states()

    def _forward(self, micro: DataProto) -> packing.Output:
        layout, inputs = packing.arrange(
            micro, packs=self.context.config.training.packing, wants_rows=self._wants_rows
        )
        body, head = models.body_and_head(self.model)
        hidden = body(**inputs, use_cache=False).last_hidden_state
        return packing.Output(packing.line_states(hidden, layout), head(), layout)

    def _ready(self) -> None:
        """For `generate` and the engine."""
        self._require_model()
        self._attend(self.context.model.attn_implementation)

    def _require_rest(self, what: str) -> None:
        if self.engine is not None:
            self.engine.require_rest(what)

    def _attend(self, implementation: str) -> None:
        """Packed rows have an attention of their own, which knows no cache."""
        if self._wants_rows:
            self.model.set_attn_implementation(implementation)

    def _stop(self, generation: GenerationConfig) -> Stop:
        config = self.context.model
        tokenizer: Any = None
        if config.tokenizer or generation.stop:
            tokenizer = models.load_tokenizer(config)
        sources = [self.model.generation_config, self.model.config.get_text_config()]
        ends = [source.eos_token_id for source in sources]
        ends += [tokenizer.eos_token_id] if config.tokenizer else []
        tokens = {*generation.stop_token_ids}
        for end in ends:
            tokens.update(end if isinstance(end, list) else [] if end is None else [end])
        return Stop(tokens, generation.stop, as_sampled(tokenizer))

    def _require_model(self) -> None:
        if self._offloaded is not None:
            role = self.context.role
            raise ValueError(f"role {role}: the model is offloaded; call load_states() first")


def _has_model(include: Iterable[str]) -> bool:
    names = {include} if isinstance(include, str) else set(include)
    if unknown := sorted(names - STATES):
        raise ValueError(f"no state {', '.join(unknown)}; there are {', '.join(sorted(STATES))}")
    return "model" in names
