"""AdamW, its learning rate, and clipping by the global norm of sharded gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from roll_td.config.model import TrainingConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(weights: Iterable[Tensor], config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over plain tensors, its state made; those with two dimensions or more decay, biases
    and norms don't."""
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for weight in weights:
        (matrices if weight.ndim > 1 else vectors).append(weight)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    first, second = config.adam_betas
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(first, second),
        eps=config.adam_eps,
        fused=True,
    )
    moments = {
        i: {"step": torch.tensor(0.0)} | {key: torch.zeros_like(weight) for key in MOMENTS}
        for i, weight in enumerate([*matrices, *vectors])
    }
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": settings})
    return optimizer


def learning_rate(config: TrainingConfig, step: int, max_steps: int | None) -> float:
    """The rate of optimiser step `step`, counted from 0.

    Step s of warmup_steps has (s + 1) / warmup_steps of the peak; then linear and cosine fall
    from the peak to min_lr_ratio of it, which step max_steps would have. Raises ValueError if
    one of them lacks max_steps.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.lr_schedule != "constant" and max_steps is None:
        raise ValueError(
            f"lr_schedule {config.lr_schedule} ends after max_steps, which is not given: "
            "set max_steps of the pipeline, or lr_schedule: constant"
        )
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.lr_schedule == "constant" or max_steps is None:
        return peak
    done = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    left = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def clip_gradients(
    weights: Iterable[Tensor], max_norm: float, shard_group: dist.ProcessGroup
) -> float:
    """Scale the gradients so that their global L2 norm is at most max_norm (0: don't), in place.

    weights: this rank's parts, plain tensors. Returns the norm before, over all ranks of
    shard_group, which hold one copy of the model between them; copies beside it are not counted.
    The same number on every rank.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    squared = torch.nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(squared, group=shard_group)
    norm = float(squared.sqrt())
    if 0 < max_norm < norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
    return norm
