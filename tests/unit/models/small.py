"""Small models for the tests of roll_td.models."""

import torch

from roll_td.config.model import ModelConfig
from roll_td.models import full_weights

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 64}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
KINDS = {
    "llama": SMALL,
    "qwen2": SMALL | {"tie_word_embeddings": True},
    "qwen3": SMALL | {"head_dim": 16, "tie_word_embeddings": True},
    "gpt2": GPT2,
    "gemma": SMALL | {"head_dim": 16},
    "gemma2": SMALL | {"head_dim": 16, "final_logit_softcapping": 0.1},
}
TOKENS = torch.arange(3, 23).view(2, 10)


def config(kind="qwen3", lora=None, dtype="float32", **fields):
    attention = "eager" if kind == "gemma2" else "sdpa"
    fields = {"model_type": kind, **KINDS[kind], **fields}
    return ModelConfig(config=fields, lora=lora, dtype=dtype, attn_implementation=attention)


def hf_logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def weights(model):
    return {name: tensor.clone() for name, tensor in full_weights(model)}
