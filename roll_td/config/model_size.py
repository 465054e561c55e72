"""How large a model is, by arithmetic on its config.json: no torch, no transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from roll_td.config.hub import hub_config
from roll_td.config.model import LoraConfig, ModelConfig


@dataclass(frozen=True)
class Linear:
    """A linear layer."""

    name: str
    """Its place inside a transformer layer."""
    inputs: int
    """Width of what goes in."""
    outputs: int
    """Width of what comes out."""
    bias: bool
    """Whether it has one."""

    @property
    def parameters(self) -> int:
        """Weight and bias."""
        return self.outputs * (self.inputs + self.bias)


@dataclass(frozen=True)
class ModelSize:
    """What a memory estimate needs of a model."""

    vocab_size: int
    """Width of the logits."""
    hidden_size: int
    """Width of the hidden states."""
    intermediate_size: int
    """Width inside the MLP."""
    num_layers: int
    """Transformer layers."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a head."""
    tied: bool
    """Whether head and embedding are one weight."""
    layer_path: str
    """Name of the list of layers in the model."""
    linears: tuple[Linear, ...]
    """Of one layer."""
    layer_extras: int
    """Parameters of one layer's norms."""
    embeddings: int
    """Parameters of the input embeddings, of positions too."""
    head: int
    """Parameters of the head that are not the embedding's."""
    final_norm: int
    """Parameters of the norm before the head."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return self.layer_extras + sum(linear.parameters for linear in self.linears)

    @property
    def parameters(self) -> int:
        """All parameters; a tied head counts once."""
        whole = self.embeddings + self.head + self.final_norm
        return whole + self.num_layers * self.layer_parameters

    @property
    def cache_values_per_token(self) -> int:
        """Numbers in the KV cache for each token of a sequence."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def lora_parameters(self, lora: LoraConfig) -> int:
        """Parameters of the adapters. ValueError if target_modules names no linear layer."""
        total = sum(
            lora.rank * (linear.inputs + linear.outputs)
            for number in range(self.num_layers)
            for linear in self.linears
            if _targeted(f"{self.layer_path}.{number}.{linear.name}", lora.target_modules)
        )
        if not total:
            names = ", ".join(linear.name for linear in self.linears)
            raise ValueError(f"target_modules={lora.target_modules}: none of {names}")
        return total


def _targeted(name: str, targets: list[str] | str) -> bool:
    """As peft matches: names by their end, a text as a regular expression of the whole name."""
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def model_size(config: ModelConfig) -> ModelSize:
    """The size of config's model, exact.

    ValueError if it has no config.json, neither here nor on the hub, is of a type not known here,
    or lacks a field that its size depends on.
    """
    fields = _fields(config)
    kind = fields.get("model_type", "")
    if kind == "gpt2":
        return _gpt2(fields)
    if kind in _LLAMA_LIKE:
        return _llama_like(fields, _LLAMA_LIKE[kind])
    known = ["gpt2", *_LLAMA_LIKE]
    near = get_close_matches(kind, known, 1)
    fix = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    raise ValueError(f"model_type={kind}: its size is not known; {fix}")


def _fields(config: ModelConfig) -> Mapping[str, Any]:
    if config.config is not None:
        return config.config
    if config.path is None:
        raise ValueError("path=None: no model; the size is not known")
    path = Path(config.path).expanduser()
    if (path / "config.json").is_file():
        fields: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return fields
    if path.exists() or config.path[0] in "/.~" or config.path.count("/") > 1:
        raise ValueError(f"path={config.path}: no folder with a config.json; the size is not known")
    return hub_config(config.path)


@dataclass(frozen=True)
class _Llama:
    """How a model differs from Llama, and what transformers takes for a field left out."""

    tied: bool = False
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    num_kv_heads: int | None = None
    """None: num_attention_heads."""
    qkv_bias: bool | None = None
    """None: attention_bias says it, of all four."""
    qk_norm: bool = False
    """A norm of each query and key head."""
    norms: int = 2
    """Of the hidden width in a layer."""


_LLAMA_LIKE = {
    "llama": _Llama(),
    "mistral": _Llama(num_kv_heads=8),
    "qwen2": _Llama(num_kv_heads=32, qkv_bias=True),
    "qwen3": _Llama(num_kv_heads=32, head_dim=128, qk_norm=True),
    "gemma": _Llama(tied=True, num_kv_heads=16, head_dim=256),
    "gemma2": _Llama(tied=True, num_kv_heads=4, head_dim=256, norms=4),
    "gemma3_text": _Llama(tied=True, num_kv_heads=4, head_dim=256, norms=4, qk_norm=True),
}


def _llama_like(fields: Mapping[str, Any], kind: _Llama) -> ModelSize:
    hidden, inner, vocab = (
        _need(fields, name) for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    layers, heads = (_need(fields, name) for name in ("num_hidden_layers", "num_attention_heads"))
    dim = fields.get("head_dim") or kind.head_dim or hidden // heads
    kv_heads = fields.get("num_key_value_heads") or kind.num_kv_heads or heads
    any_bias = fields.get("attention_bias", False)
    qkv_bias = any_bias if kind.qkv_bias is None else kind.qkv_bias
    o_bias = any_bias if kind.qkv_bias is None else False
    mlp_bias = fields.get("mlp_bias", False)
    tied = fields.get("tie_word_embeddings", kind.tied)
    return ModelSize(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        tied=tied,
        layer_path="model.layers",
        linears=(
            Linear("self_attn.q_proj", hidden, heads * dim, qkv_bias),
            Linear("self_attn.k_proj", hidden, kv_heads * dim, qkv_bias),
            Linear("self_attn.v_proj", hidden, kv_heads * dim, qkv_bias),
            Linear("self_attn.o_proj", heads * dim, hidden, o_bias),
            Linear("mlp.gate_proj", hidden, inner, mlp_bias),
            Linear("mlp.up_proj", hidden, inner, mlp_bias),
            Linear("mlp.down_proj", inner, hidden, mlp_bias),
        ),
        layer_extras=kind.norms * hidden + 2 * dim * kind.qk_norm,
        embeddings=vocab * hidden,
        head=0 if tied else vocab * hidden,
        final_norm=hidden,
    )


def _gpt2(fields: Mapping[str, Any]) -> ModelSize:
    hidden = _need(fields, "n_embd", "hidden_size")
    layers = _need(fields, "n_layer", "num_hidden_layers")
    heads = _need(fields, "n_head", "num_attention_heads")
    positions = _need(fields, "n_positions", "max_position_embeddings")
    vocab = _need(fields, "vocab_size")
    inner = fields.get("n_inner") or 4 * hidden
    tied = fields.get("tie_word_embeddings", True)
    return ModelSize(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        tied=tied,
        layer_path="transformer.h",
        linears=(
            Linear("attn.c_attn", hidden, 3 * hidden, True),
            Linear("attn.c_proj", hidden, hidden, True),
            Linear("mlp.c_fc", hidden, inner, True),
            Linear("mlp.c_proj", inner, hidden, True),
        ),
        layer_extras=4 * hidden,
        embeddings=(vocab + positions) * hidden,
        head=0 if tied else vocab * hidden,
        final_norm=2 * hidden,
    )


def _need(fields: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if name in fields:
            value: int = fields[name]
            return value
    raise ValueError(f"the model's config lacks {names[0]}, so its size is not known; add it")
