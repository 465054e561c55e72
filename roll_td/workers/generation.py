"""The role that answers prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from roll_td.columns import object_column
from roll_td.config.base import BaseConfig
from roll_td.config.model import GenerationConfig
from roll_td.models import load_tokenizer
from roll_td.protocol import DataProto
from roll_td.runtime.dispatch import Dispatch, register
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
        ends = {*generation.stop_token_ids, self.tokenizer.eos_token_id} - {None}
        generation = replace(generation, stop_token_ids=sorted(ends))
        answers = self.strategy.generate(data, generation, seed)
        n = generation.num_return_sequences
        ids = answers["sample_id"] * n + torch.arange(len(answers)) % n
        texts = object_column("response", self._texts(answers))
        answers.update({"sample_id": ids, "response": texts})
        return answers.to("cpu")

    def _texts(self, answers: DataProto) -> list[str]:
        special = set(self.tokenizer.all_special_ids)
        tokens = []
        for row, mask, reason in zip(
            answers["input_ids"], answers["response_mask"], answers["finish_reason"], strict=True
        ):
            own = row[mask].tolist()
            tokens.append(own[:-1] if reason == "stop" and own[-1] in special else own)
        # a special token that was sampled inside an answer is not hidden from its reward
        texts: list[str] = self.tokenizer.batch_decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return texts
