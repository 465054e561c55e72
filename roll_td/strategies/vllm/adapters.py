"""LoRA adapters in the form that vLLM reads: a folder as peft has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from roll_td.config.model import LoraConfig

PREFIX = "base_model.model."
"""Of each name in such a folder."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM 0.32 has as max_lora_rank."""


def most_rank(lora: LoraConfig) -> int:
    """vLLM's max_lora_rank for these. ValueError if it has none."""
    for rank in RANKS:
        if rank >= lora.rank:
            return rank
    raise ValueError(
        f"model.lora.rank={lora.rank}: vLLM takes at most {RANKS[-1]}; set a lower one"
    )


def write(folder: Path, weights: Mapping[str, Tensor], lora: LoraConfig) -> None:
    """Write weights as models.adapter_weights gives them."""
    folder.mkdir(exist_ok=True)
    save_file(
        {PREFIX + name: weight for name, weight in weights.items()},
        folder / "adapter_model.safetensors",
    )
    owners = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in weights}
    settings = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(owners),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
