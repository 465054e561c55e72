"""Answers as text, and their random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from roll_td.config.base import BaseConfig, WorkerConfig
from roll_td.config.model import GenerationConfig, ModelConfig
from roll_td.models import load_tokenizer
from roll_td.protocol import DataProto
from roll_td.strategies.batches import Response, with_responses
from roll_td.workers.generation import GenerationWorker

TOKENIZER = Path(__file__).parents[3] / "configs" / "sft" / "tiny" / "tokenizer"


class Strategy:
    """Gives the answers it was made with, and keeps what it was asked."""

    def __init__(self, *answers: tuple[str, str], tokenizer: Any) -> None:
        self.answers, self.tokenizer = answers, tokenizer

    def generate(self, data: DataProto, generation: GenerationConfig, seed: int) -> DataProto:
        self.asked = generation, seed
        encode = self.tokenizer.encode
        return with_responses(
            data,
            [
                Response(tokens := encode(text, add_special_tokens=False), [0.0] * len(tokens), why)
                for text, why in self.answers
            ],
            0,
        )


def test_answers_are_text_without_the_end_token_alone():
    worker = GenerationWorker(WorkerConfig(world_size=1))
    worker.tokenizer = load_tokenizer(ModelConfig(tokenizer=str(TOKENIZER)))
    worker.pipeline_config = BaseConfig()
    worker.strategy = Strategy(
        ("12<eos>", "stop"),
        # one that was sampled inside is not hidden; one at the end of what was cut is no end
        ("1<user>2<eos>", "stop"),
        ("7<eos>", "length"),
        ("+3", "stop"),  # ended by a stop string
        tokenizer=worker.tokenizer,
    )
    prompts = DataProto(
        {
            "input_ids": torch.tensor([[1, 5], [1, 6]]),
            "lengths": torch.tensor([2, 2]),
            "sample_id": torch.tensor([10, 3]),
        }
    )
    generation = GenerationConfig(num_return_sequences=2, stop_token_ids=[7])
    answers = worker.generate(prompts, generation, seed=4)
    assert list(answers["response"]) == ["12", "1<user>2", "7<eos>", "+3"]
    assert answers["sample_id"].tolist() == [20, 21, 6, 7]
    asked, seed = worker.strategy.asked
    assert seed == 4 and asked.num_return_sequences == 2
    assert asked.stop_token_ids == sorted({7, worker.tokenizer.eos_token_id})


def test_h06_tokens_stay_those_that_were_sampled():  # H06
    """Whatever they would be as text again."""
    tokenizer: Any = load_tokenizer(ModelConfig(tokenizer=str(TOKENIZER)))
    sampled = [tokenizer.convert_tokens_to_ids(letter) for letter in "1<eos>2"]
    worker = GenerationWorker(WorkerConfig(world_size=1))
    worker.tokenizer, worker.pipeline_config = tokenizer, BaseConfig()
    worker.strategy = Sampled(sampled)
    prompts = DataProto(
        {
            "input_ids": torch.tensor([[1, 5]]),
            "lengths": torch.tensor([2]),
            "sample_id": torch.tensor([0]),
        }
    )
    answers = worker.generate(prompts, GenerationConfig(), seed=4)
    text = answers["response"][0]
    assert text == "1<eos>2" and len(tokenizer.encode(text, add_special_tokens=False)) == 3
    mask = answers["response_mask"][0]
    assert answers["input_ids"][0][mask].tolist() == sampled and len(sampled) == 7
    log_probs = answers["infer_log_probs"][0][mask].tolist()
    assert log_probs == pytest.approx([-0.5] * 6 + [-0.25])


class Sampled:
    """Gives these tokens, and a log-prob of each."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def generate(self, data: DataProto, generation: GenerationConfig, seed: int) -> DataProto:
        log_probs = [-0.5] * (len(self.tokens) - 1) + [-0.25]
        return with_responses(data, [Response(self.tokens, log_probs, "length")], 0)
