"""Models and tokenizers: the one importer of transformers; peft's is `lora`.

A model here is a causal language model of transformers, with LoRA layers of peft in it where the
config wants them; parameter names stay those of transformers either way.

What is named transformers.X here is imported when it is first used: models bring torch's compiler
along, for which a rank that wants a tokenizer alone would wait a second and a half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.utils import logging

from roll_td.algorithms.functional import Head, logits
from roll_td.config.model import ModelConfig
from roll_td.models.lora import adapter_weights, adapters_off, add_lora, full_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "KeyValueStore",
    "adapter_weights",
    "adapters_off",
    "body_and_head",
    "cache_in",
    "export_hf",
    "full_weights",
    "load_model",
    "load_tokenizer",
]

_MORE_FIELDS = {"model_type", "head_dim", "rope_scaling", "rope_theta", "torch_dtype"}
"""What a transformers config takes though it is no field of its class."""

_NOT_LOADED = (
    OSError,
    ValueError,
    ImportError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)
"""What transformers raises for what isn't there, can't be read or isn't installed."""


def load_model(config: ModelConfig, seed: int) -> PreTrainedModel:
    """The model on the CPU in config.dtype, in eval mode; with config.lora only its adapters are
    trainable.

    Random weights, the adapters' too, follow from the seed alone; the caller's random state stays
    as it was. ValueError for: no such folder or hub model, no weights there or not those of the
    model, an unknown model_type or field, no causal language model, a head that `body_and_head`
    does not know, a missing optional package, LoRA on anything but linear layers.
    """
    logging.disable_progress_bar()  # one a rank
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if config.config is not None:
            model = _from_fields(config.config, config)
        else:
            model = _from_path(config)
        _check_head(model.eval(), config.attn_implementation)
        if config.lora is not None:
            transposed = any(isinstance(module, transformers.Conv1D) for module in model.modules())
            add_lora(model, config.lora, transposed)
    return model.eval()


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, with config.chat_template if given.

    ValueError if neither tokenizer nor path is given, if there is none at that place, or if
    chat_template is neither a template nor a file with one.
    """
    source = config.tokenizer or config.path
    if source is None:
        raise ValueError("the model has no tokenizer; set model.tokenizer to a folder or hub name")
    key = "model.tokenizer" if config.tokenizer else "model.path"
    place = _place(source, key)
    with _as_value_error(f"{key}={source}: can't load a tokenizer", "set model.tokenizer"):
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            **place, trust_remote_code=config.trust_remote_code
        )
    if tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():
        # what transformers makes of a folder that has a model's config.json alone
        raise ValueError(f"{key}={source}: no tokenizer there; set model.tokenizer")
    if config.chat_template is not None:
        tokenizer.chat_template = _template(config.chat_template)
    return tokenizer


def body_and_head(model: PreTrainedModel) -> tuple[nn.Module, Callable[[], Head]]:
    """What makes hidden states (its output's last_hidden_state), and what gives the Head as it is
    when called: never keep one over an optimiser step or a gather of shards.

    LoRA layers are part of the body. ValueError if the model has no linear head of its own.
    """
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        kind = model.config.model_type
        raise ValueError(f"model_type={kind}: its head is {type(linear).__name__}; must be linear")
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return model.get_decoder(), lambda: Head(linear.weight, linear.bias, softcap)


class KeyValueStore(Protocol):
    """Where the keys and values of a model's layers lie."""

    @property
    def seen(self) -> int:
        """Tokens of each row that are there."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take those of new tokens, (b, heads, t, size); return those of all, in this order."""


def attend_with(model: Any, name: str, attention: Callable[..., Any]) -> None:
    """Have the model compute attention by our function; transformers knows it by `name`."""
    transformers.AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)


def cache_in(model: Any, store: KeyValueStore) -> Cache:
    """A KV cache, for the argument `cache` of body and model, that leaves its tensors to `store`.

    ValueError if a layer of the model keeps anything but keys and values.
    """
    layers = DynamicCache(config=model.config).layers
    odd = {type(layer) for layer in layers} - {DynamicLayer, DynamicSlidingWindowLayer, DummyLayer}
    if odd:
        kinds = sorted(kind.__name__ for kind in odd)
        raise ValueError(
            f"model_type={model.config.model_type}: its layers keep {kinds}, and generation here "
            "is for those that keep keys and values alone; generate with another engine"
        )
    return Cache(
        [
            layer if isinstance(layer, DummyLayer) else _StoredLayer(store, number)
            for number, layer in enumerate(layers)
        ]
    )


class _StoredLayer(DynamicLayer):
    """One layer of `cache_in`. A window, where there is one, is for the mask to cut."""

    def __init__(self, store: KeyValueStore, number: int) -> None:
        super().__init__()
        self.store, self.number = store, number

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self.store.append(self.number, key_states, value_states)

    def get_seq_length(self) -> int:
        return self.store.seen


def export_hf(
    folder: Path,
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write safetensors, config and tokenizer, for transformers' from_pretrained.

    weights: all of full_weights(model); the model gives its config and generation config, so it
    may be sharded. Without an end token of its own it gets the tokenizer's. Call it on one rank.
    ValueError if a weight is missing or left over.
    """
    with torch.device("meta"):
        plain = transformers.AutoModelForCausalLM.from_config(model.config)
    names = {name for name, _ in full_weights(plain)}
    if names != weights.keys():
        missing, over = sorted(names - weights.keys()), sorted(weights.keys() - names)
        raise ValueError(f"export to {folder}: missing weights {missing}, left over {over}")
    plain.load_state_dict(weights, strict=False, assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    if tokenizer is not None and plain.generation_config.eos_token_id is None:
        plain.generation_config.eos_token_id = tokenizer.eos_token_id
    # else the rank of the job would have to be 0
    plain.should_save_on_this_rank = lambda is_main_process: is_main_process
    plain.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _from_fields(fields: Mapping[str, Any], config: ModelConfig) -> PreTrainedModel:
    """A model with random weights."""
    kind = fields["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"model.config.model_type={kind}: unknown{_nearest(kind, transformers.CONFIG_MAPPING)}"
        )
    cls: Any = transformers.CONFIG_MAPPING[kind]
    known = {f.name for f in dataclasses.fields(cls)} | cls.attribute_map.keys() | _MORE_FIELDS
    for name in fields.keys() - known:
        raise ValueError(f"model.config.{name}: no field of {cls.__name__}{_nearest(name, known)}")
    with _as_value_error("model.config", "change the field"):
        made = transformers.AutoConfig.for_model(**fields)
    return _random(made, config)


def _random(fields: PreTrainedConfig, config: ModelConfig) -> PreTrainedModel:
    attention = config.attn_implementation
    what = f"model_type={fields.model_type}: can't be made with attn_implementation={attention}"
    with _as_value_error(what, "try another type, or attn_implementation: eager"):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            fields, dtype=getattr(torch, config.dtype), attn_implementation=attention
        )
    return model


def _nearest(name: str, names: Any) -> str:
    near = get_close_matches(name, list(names), 1)
    return f"; did you mean {near[0]}?" if near else ""


def _from_path(config: ModelConfig) -> PreTrainedModel:
    if config.path is None:
        raise ValueError("the model has neither path nor config; set model.path or model.config")
    place = _place(config.path, "model.path")
    if "gguf_file" in place:
        # else weights may stay packed, and could not be trained
        place["quantization_config"] = transformers.GgufConfig(dequantize=True)
    rule = f"model.path={config.path}: can't load a model"
    with _as_value_error(rule, "give a model's folder or hub name"):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            **place,
            dtype=getattr(torch, config.dtype),
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    model, info = loaded
    wrong = {what: sorted(map(str, info[what])) for what in ("missing_keys", "mismatched_keys")}
    if any(wrong.values()):
        raise ValueError(f"model.path={config.path}: not the weights of its config: {wrong}")
    return model


def _place(source: str, key: str) -> dict[str, Any]:
    """Arguments of from_pretrained for a folder, a hub name or a .gguf file."""
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"{key}={source}: no such file")
        for package in ("gguf", "accelerate"):
            if find_spec(package) is None:
                fix = "pip install 'roll-td[gguf]'"
                raise ValueError(f"{key}={source}: a .gguf file needs {package}; {fix}")
        return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    looks_local = path.is_absolute() or source.startswith(("~", ".")) or source.count("/") > 1
    if looks_local and not path.is_dir():
        raise ValueError(f"{key}={source}: no such folder")
    return {"pretrained_model_name_or_path": str(path)}


@contextmanager
def _as_value_error(what: str, fix: str) -> Iterator[None]:
    try:
        yield
    except _NOT_LOADED as error:
        raise ValueError(f"{what}; {fix}. transformers says: {error}") from error


def _template(given: str) -> str:
    """A Jinja template has a brace; a name of a file with one has none."""
    if "{" in given:
        return given
    if not Path(given).is_file():
        raise ValueError(f"chat_template={given}: no such file, and no Jinja template")
    return Path(given).read_text(encoding="utf-8")


@torch.no_grad()
def _check_head(model: PreTrainedModel, attn_implementation: str) -> None:
    """Some models do more to logits than body_and_head knows, under config names that don't tell
    what: a log-prob would be wrong without a word."""
    body, head = body_and_head(model)
    seen: list[Any] = []
    hook = body.register_forward_hook(lambda *call: seen.append(call[-1]))
    model.set_attn_implementation("eager")  # others may not run on the CPU
    theirs = model(input_ids=torch.tensor([[0, 1]]), use_cache=False).logits.float()
    model.set_attn_implementation(attn_implementation)
    hook.remove()
    ours = logits(seen[0].last_hidden_state, head())
    if not (ours - theirs).abs().max() <= 1e-2 * theirs.abs().max():
        kind = model.config.model_type
        raise ValueError(f"model_type={kind}: its logits are not those of a linear layer alone")
