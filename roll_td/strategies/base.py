"""What a Worker asks of a model backend: InferenceStrategy and TrainStrategy.

A strategy knows a role's config, groups, mesh and device; it never sees a Worker, Cluster or
Pipeline. What a backend can't do it doesn't have: `require` finds that out at start-up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from roll_td.config.base import WorkerConfig
from roll_td.config.model import ModelConfig
from roll_td.distributed.topology import RankInfo
from roll_td.protocol import DataProto

ModelProvider = Callable[[ModelConfig, int], torch.nn.Module]
"""(config, seed of random weights) → a model in memory, on the CPU or the meta device."""
ForwardFunc = Callable[[DataProto, Any], Mapping[str, torch.Tensor]]
"""(rows of a micro-batch, output_tensor) → columns (b, …) of these rows."""
LossFunc = Callable[[DataProto, Any], tuple[torch.Tensor, Mapping[str, Any]]]
"""(rows of a micro-batch, output_tensor) → (loss, metrics). The loss is a sum over the rows
divided by the plan's global denominator; the strategy only adds, over micro-batches and ranks."""


@dataclass(frozen=True)
class StrategyContext:
    """What a strategy gets of the worker that has it."""

    role: str
    """Name of the role."""
    config: WorkerConfig
    """The role's config."""
    model: ModelConfig
    """The role's model."""
    rank_info: RankInfo
    """Place in the role's topology."""
    groups: Mapping[str, Any]
    """The role's process groups that this rank is in, by name as role_groups has them."""
    mesh: DeviceMesh | None
    """The role's mesh over those groups; None where the workers have nothing to do together."""
    device: torch.device
    """The worker's device."""
    seed: int
    """The job's seed."""
    max_steps: int | None = None
    """Optimiser steps of the whole run, if the pipeline's config says so as max_steps."""


class InferenceStrategy(ABC):
    """A model that is asked, not trained."""

    def __init__(self, context: StrategyContext) -> None:
        self.context = context
        args = context.config.strategy_args
        self.settings: Any = args.settings if args is not None else None

    @abstractmethod
    def initialize(self, model_provider: ModelProvider) -> None:
        """Make the model. Called once, on all workers of the role."""


class TrainStrategy(InferenceStrategy):
    """A model that is trained: all workers of the role step together."""

    @abstractmethod
    def train_step(self, batch: DataProto, loss_func: LossFunc) -> dict[str, Any]:
        """One optimiser step on this rank's rows of a global mini-batch, cut by batch.plan.
        Returns typed metrics, the loss and the gradients' global norm among them."""
