from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from roll_td.config.base import WorkerConfig
from roll_td.config.model import ModelConfig
from roll_td.config.strategies import StrategyArgs
from roll_td.distributed.topology import data_parallel, rank_infos
from roll_td.models import load_model
from roll_td.strategies.base import StrategyContext
from roll_td.strategies.vllm.strategy import VllmInfer

HERE = Path(__file__).parent
TOKENIZER = str(HERE.parents[1] / "configs" / "sft" / "tiny" / "tokenizer")
FIELDS = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 99,
    "max_position_embeddings": 160,
    "tie_word_embeddings": True,
}
ENGINE = {"max_num_seqs": 64, "kv_cache_memory_bytes": 64 << 20}


NEEDS_VLLM = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed; README, vLLM, says how"
)


def context(devices: int, fields: dict[str, object], **engine: object) -> StrategyContext:
    args = StrategyArgs("vllm", ENGINE | engine)
    config = WorkerConfig(
        name="infer",
        device_mapping=list(range(devices)),
        num_gpus_per_worker=devices,
        strategy_args=args,
        timeout_s=240,
    )
    model = ModelConfig(config=fields, tokenizer=TOKENIZER)
    place = rank_infos(data_parallel(1))[0]
    return StrategyContext("infer", config, model, place, {}, None, torch.device("cpu"), 42)


def strong(config: ModelConfig, seed: int) -> PreTrainedModel:
    """Weights far from those that make all tokens equally likely, norms too."""
    model = load_model(config, seed)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
            else:
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=draws))
    return model


@pytest.fixture(scope="session")
def one() -> Iterator[VllmInfer]:
    """An engine on one device, of a model with a tied head."""
    made = VllmInfer(context(1, FIELDS))
    made.initialize(strong)
    yield made
    made.close()


@pytest.fixture(scope="session")
def two() -> Iterator[VllmInfer]:
    """An engine on two devices, of a model with a head of its own; its vocabulary is no multiple
    of what vLLM pads it to."""
    made = VllmInfer(context(2, FIELDS | {"tie_word_embeddings": False}))
    made.initialize(strong)
    yield made
    made.close()
