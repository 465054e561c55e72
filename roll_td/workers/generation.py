"""The role that answers prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch

from roll_td.columns import object_column
from roll_td.config.base import BaseConfig
from roll_td.config.model import GenerationConfig
from roll_td.models import load_tokenizer
from roll_td.protocol import DataProto
from roll_td.runtime.dispatch import Dispatch, register, register_request
from roll_td.strategies.engine import Answer, Engine, Failure
from roll_td.workers.base import ModelWorker


class GenerationWorker(ModelWorker):
    """Samples answers and gives them as tokens and as text."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: BaseConfig) -> None:
        """Also load the tokenizer."""
        super().initialize(pipeline_config)
        model = self.worker_config.model or cast(Any, pipeline_config).model
        self.tokenizer: Any = load_tokenizer(model)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, prefetch=True)
    def generate(self, data: DataProto, generation: GenerationConfig, seed: int) -> DataProto:
        """n answers to each prompt, n = generation.num_return_sequences: B · n rows. They end with
        the tokenizer's end token too, whatever the model's config says.

        data: input_ids, lengths, and sample_id int64 (B), which with the seed says all random
        numbers. Returned are the columns that the strategy's generate gives, with a sample_id for
        each answer, and `response`: its text as it was sampled, special tokens included, without
        the end token.
        """
        answers = self.strategy.generate(data, self._ended_by_tokenizer(generation), seed)
        n = generation.num_return_sequences
        ids = answers["sample_id"] * n + torch.arange(len(answers)) % n
        rows = zip(answers["input_ids"], answers["response_mask"], strict=True)
        tokens = [row[mask].tolist() for row, mask in rows]
        texts = object_column("response", self._texts(tokens, answers["finish_reason"]))
        answers.update({"sample_id": ids, "response": texts})
        return answers.to("cpu")

    # --- an engine that takes prompts while it generates ---------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_engine(self, generation: GenerationConfig, seed: int) -> None:
        """Have the strategy's engine wait for requests; its answers are those that `generate` gives
        to the same sample_id."""
        self.engine: Engine = self.strategy.open_engine(self._ended_by_tokenizer(generation), seed)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pause_engine(self, abort: bool = False) -> None:
        """Return when it rests; `abort` gives up all that is in flight. TimeoutError as
        Engine.pause has it, after the role's timeout_s."""
        self.engine.pause(abort, self.worker_config.timeout_s)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def resume_engine(self) -> None:
        """Have it go on."""
        self.engine.resume()

    @register_request
    def submit(self, answers: list[Answer]) -> None:
        """Begin these answers, or go on with them."""
        self.engine.submit(answers)

    @register_request
    def abort(self, sample_ids: list[int]) -> None:
        """Give these up."""
        self.engine.abort(sample_ids)

    @register_request
    def ended(self) -> Iterator[list[Answer] | Failure]:
        """Answers as they end or are given up, those that have ended with their text, until
        close_engine; or the engine's failure."""
        for item in self.engine.ended():
            if not isinstance(item, Failure):
                texts = self._texts([a.tokens for a in item], [a.finish_reason for a in item])
                for answer, text in zip(item, texts, strict=True):
                    answer.prompt, answer.text = [], text
            yield item

    @register_request
    def close_engine(self) -> None:
        """End it, wherever it is."""
        self.engine.close()

    def _ended_by_tokenizer(self, generation: GenerationConfig) -> GenerationConfig:
        ends = {*generation.stop_token_ids, self.tokenizer.eos_token_id} - {None}
        return replace(generation, stop_token_ids=sorted(ends))

    def _texts(self, tokens: Iterable[list[int]], reasons: Iterable[str]) -> list[str]:
        special = set(self.tokenizer.all_special_ids)
        shown = [
            own[:-1] if reason == "stop" and own[-1] in special else own
            for own, reason in zip(tokens, reasons, strict=True)
        ]
        # a special token that was sampled inside an answer is not hidden from its reward
        texts: list[str] = self.tokenizer.batch_decode(
            shown, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return texts
