"""A language model's body with a head that gives one number: what a state is worth."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roll_td.config.model import ModelConfig
from roll_td.models import load_model


def load_value_model(config: ModelConfig, seed: int) -> nn.Module:
    """The model of `load_model`, its head replaced by a linear layer to 1, float32 (1, H), that
    begins at 0 and is trained also where of the rest only adapters are. So each value is 0 at
    first, and what is learnt at once is the head alone.

    ValueError as load_model.
    """
    model: Any = load_model(config, seed)
    width = model.get_output_embeddings().in_features
    head = nn.Linear(width, 1, bias=False, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    model.set_output_embeddings(head)
    return model
