"""Settings of a model, of generation from it, and of its training. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from roll_td.config.schema import ConfigError, Problem

Dtype = Literal["float32", "bfloat16", "float16"]
LEAVE = "leave it out for the default"


@dataclass
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), by peft."""

    rank: int = 16
    """Rank r of the update B A."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    """Of the adapters' input."""
    target_modules: list[str] | str = "all-linear"
    """Names of modules that get one; all-linear: all linear layers but the head."""

    def __post_init__(self) -> None:
        _check(self, rank=(1, None), alpha=(0, None), dropout=(0, 1))


@dataclass
class ModelConfig:
    """Where a model comes from: `path`, or `config` for random weights."""

    path: str | None = None
    """A folder, a name on the Hugging Face hub, or a .gguf file."""
    config: dict[str, Any] | None = None
    """Fields of a transformers config with its model_type: a model with random weights, which
    follow from the job's seed."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; None: that of `path`."""
    chat_template: str | None = None
    """A Jinja template, or a file with one, instead of the tokenizer's own."""
    dtype: Dtype = "float32"
    """Of the weights as they are held; a training role computes in TrainingConfig.compute_dtype."""
    attn_implementation: str = "sdpa"
    """Name that transformers gives it: sdpa, eager, flash_attention_2, …"""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights."""

    def __post_init__(self) -> None:
        if self.path is not None and self.config is not None:
            rule = "is given beside path; a model comes from one of the two"
            raise ConfigError([Problem("config", "{…}", rule, "drop one of them")])
        if self.config is not None and "model_type" not in self.config:
            fix = "add for example model_type: qwen3"
            raise ConfigError([Problem("config", "{…}", "lacks model_type", fix)])

    def text_problems(self) -> list[Problem]:
        """What keeps a pipeline that reads and writes text from using it."""
        if self.path is None and self.config is None:
            fix = "set model.path, or model.config for random weights"
            return [Problem("", "", "is missing", fix)]
        if self.path is None and self.tokenizer is None:
            rule = "is missing: a model made from model.config has none of its own"
            fix = "set the folder or hub name of a tokenizer"
            return [Problem("tokenizer", "", rule, fix)]
        return []

    def file_problems(self) -> list[Problem]:
        """Folders and files that are not there, of what can't be a name on the hub, or hold no
        model or tokenizer; and optional packages that are not installed."""
        problems = []
        for key, lack in ("path", _lack_of_model), ("tokenizer", _lack_of_tokenizer):
            value = getattr(self, key)
            if value is None:
                continue
            place, rule = Path(value).expanduser(), ""
            if place.is_dir():
                rule = lack(place)
            elif (value[0] in "/.~" or value.endswith(".gguf")) and not place.exists():
                rule = "is not there"
            if rule:
                fix = f"give a path from {Path.cwd()}, or a whole one"
                problems.append(Problem(key, repr(value), rule, fix))
        template = self.chat_template
        if template is not None and "{" not in template and not Path(template).is_file():
            rule, fix = "is no file, and no Jinja template", "give one of the two"
            problems.append(Problem("chat_template", repr(template), rule, fix))
        is_gguf = self.path is not None and self.path.endswith(".gguf")
        for key, package, extra, is_used in (
            ("lora", "peft", "lora", self.lora is not None),
            ("path", "gguf", "gguf", is_gguf),
        ):
            if is_used and find_spec(package) is None:
                rule, fix = f"needs the package {package}", f"pip install 'roll-td[{extra}]'"
                problems.append(Problem(key, "", rule, fix))
        return problems


def _lack_of_model(folder: Path) -> str:
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except OSError:
        return "has no config.json that can be read"
    except ValueError as error:
        return f"has a config.json that is not JSON: {error}"
    return "" if isinstance(found, dict) else "has a config.json without fields"


def _lack_of_tokenizer(folder: Path) -> str:
    names = [path.name for path in folder.iterdir()]
    is_there = any(word in name for name in names for word in ("token", "vocab", ".model"))
    return "" if is_there else "has no file of a tokenizer"


@dataclass
class GenerationConfig:
    """How responses are sampled."""

    max_new_tokens: int = 128
    """Tokens of a response at most, the end token included."""
    temperature: float = 1.0
    """Logits are divided by it; 0: the most likely token (greedy)."""
    top_p: float = 1.0
    """The smallest set of tokens with this probability is kept; 1: all."""
    top_k: int = 0
    """The k most likely tokens are kept; 0: all."""
    num_return_sequences: int = 1
    """Responses per prompt."""
    stop: list[str] = field(default_factory=list)
    """A response ends when its text contains one of these."""
    stop_token_ids: list[int] = field(default_factory=list)
    """A response ends with one of these tokens; the model's end tokens always count too."""

    def __post_init__(self) -> None:
        _check(
            self,
            max_new_tokens=(1, None),
            temperature=(0, None),
            top_p=(0, 1),
            top_k=(0, None),
            num_return_sequences=(1, None),
        )
        if "" in self.stop:
            rule = "is in every text, so each response would end at its first token"
            raise ConfigError([Problem("stop", "''", rule, "leave it out")])
        if self.top_p == 0:
            rule = "keeps no token; must be above 0"
            raise ConfigError([Problem("top_p", "0", rule, "use temperature: 0 for greedy")])


@dataclass
class TrainingConfig:
    """Optimiser, schedule, and how a mini-batch is cut."""

    learning_rate: float = 1e-5
    """Peak rate of AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    weight_decay: float = 0.0
    """Decoupled; of weights with two dimensions or more."""
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of the first and second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm; 0: never."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up; linear and cosine end at min_lr_ratio after max_steps."""
    warmup_steps: int = 0
    """Optimiser steps in which the rate rises linearly from 0."""
    min_lr_ratio: float = 0.0
    """Lowest rate of a schedule as a share of learning_rate."""
    micro_batch_size: int = 8
    """Rows of one forward and backward pass on a rank."""
    max_tokens_per_micro_batch: int | None = None
    """Instead: as many rows as have this many real tokens together, balanced over ranks."""
    packing: bool = True
    """Compute real tokens only: rows of a micro-batch lie end to end, without padding."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Forward and backward are computed in it, gradients summed in float32; None: the model's."""

    def __post_init__(self) -> None:
        _check(
            self,
            learning_rate=(0, None),
            weight_decay=(0, None),
            adam_eps=(0, None),
            max_grad_norm=(0, None),
            warmup_steps=(0, None),
            min_lr_ratio=(0, 1),
            micro_batch_size=(1, None),
            max_tokens_per_micro_batch=(1, None),
        )
        if len(self.adam_betas) != 2 or not all(0 <= b < 1 for b in self.adam_betas):
            rule = "must be two numbers from 0 to below 1"
            raise ConfigError([Problem("adam_betas", repr(self.adam_betas), rule, LEAVE)])


def _check(owner: object, **bounds: tuple[float, float | None]) -> None:
    """Raise ConfigError for the fields that lie outside (least, most); None passes."""
    problems = []
    for name, (least, most) in bounds.items():
        value = getattr(owner, name)
        if value is None or (value >= least and (most is None or value <= most)):
            continue
        rule = f"must be at least {least}" if most is None else f"must lie in {least} to {most}"
        problems.append(Problem(name, repr(value), rule, LEAVE))
    if problems:
        raise ConfigError(problems)
