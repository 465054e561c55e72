"""From a worker to its strategy."""

from __future__ import annotations

from typing import Any

from roll_td.config.classes import import_class
from roll_td.strategies.base import InferenceStrategy, StrategyContext


def create_strategy(worker: Any) -> InferenceStrategy:
    """The strategy that the worker's config names, not yet initialised.

    Raises ValueError if the config names none, or there is no model for it.
    """
    config, role = worker.worker_config, worker.context.role
    if config.strategy_args is None:
        raise ValueError(
            f"role {role} has no strategy_args; set {role}.strategy_args.strategy_name, "
            "or do without create_strategy()"
        )
    model = config.model or getattr(worker.pipeline_config, "model", None)
    if model is None:
        raise ValueError(
            f"role {role} has no model; set {role}.model or the pipeline's model, "
            "and call super().initialize(pipeline_config) before create_strategy()"
        )
    row = config.strategy_args.row
    context = StrategyContext(
        role=role,
        config=config,
        model=model,
        rank_info=worker.rank_info,
        groups=worker.groups,
        mesh=worker.mesh if worker.groups else None,
        device=worker.device,
        seed=worker.pipeline_config.seed,
        max_steps=worker.pipeline_config.optimizer_steps(role),
    )
    strategy: InferenceStrategy = import_class(row.cls)(context)
    return strategy
