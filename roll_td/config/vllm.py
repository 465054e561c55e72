"""What can be told of an engine of vLLM without it: importing it takes seconds."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import field, make_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roll_td.config.base import WorkerConfig
from roll_td.config.model import GenerationConfig, ModelConfig
from roll_td.config.schema import Problem
from roll_td.config.strategies import StrategyArgs, VllmConfig


def engine_arguments() -> type | None:
    """A dataclass with the fields of its EngineArgs, from its source: those of built-in types have
    them, the others take anything. None where vLLM is not installed."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    (body,) = (
        node.body
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    )
    arguments = [
        (node.target.id, _hint(node.annotation), field(default=None))
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    return make_dataclass("EngineArgs", arguments)


def _hint(annotation: ast.expr) -> Any:
    """A type that needs no other module, as the source says it; else any."""
    parts = list(ast.walk(annotation))
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    quoted = any(isinstance(part, ast.Constant) and part.value is not None for part in parts)
    known = all(hasattr(builtins, name) for name in names) and not quoted
    return ast.unparse(annotation) if known else Any


TEMPERATURES = 0.01, 2.0
"""The lowest above 0 and the highest that vLLM samples at: it takes a lower one for the lowest
without telling, and refuses a higher one."""


def temperature_problems(
    args: StrategyArgs | None, generation: GenerationConfig
) -> Iterator[Problem]:
    """If a role with this strategy is to sample at a temperature that its engine doesn't."""
    given, (low, high) = generation.temperature, TEMPERATURES
    if args is not None and args.strategy_name == "vllm" and given and not low <= given <= high:
        rule, fix = f"vLLM samples at 0 and from {low:g} to {high:g}", "set one of these"
        yield Problem("temperature", repr(given), rule, fix)


def engine_problems(role: WorkerConfig, model: ModelConfig) -> Iterator[Problem]:
    """If the settings of the role's engine don't go with its devices, its model or how it is to
    generate."""
    settings = role.strategy_args.settings if role.strategy_args else None
    if not isinstance(settings, VllmConfig):
        return
    wrong = temperature_problems(role.strategy_args, role.generation)
    yield from (problem.under("generation") for problem in wrong)
    key, devices = "strategy_args.strategy_config", role.num_gpus_per_worker
    stages = settings.engine_args.get("pipeline_parallel_size", 1)
    if isinstance(stages, int) and stages > 0 and devices % stages:
        rule = f"does not divide the {devices} devices of a worker, num_gpus_per_worker"
        fix = f"set num_gpus_per_worker to a multiple of {stages}, or leave it out"
        yield Problem(f"{key}.pipeline_parallel_size", repr(stages), rule, fix)
    if settings.lora == "merged":
        return
    if model.lora is None:
        rule, fix = "has no adapters to bring", "set model.lora, or leave it out"
        yield Problem(f"{key}.lora", settings.lora, rule, fix)
    if model.path is None or model.path.endswith(".gguf"):
        rule = f"has vLLM read the model, and model.path={model.path} is no folder and no hub name"
        yield Problem(f"{key}.lora", settings.lora, rule, "set it to merged")


def room_problems(
    role: WorkerConfig, prompt_tokens: int, limit: str = "data.max_length"
) -> Iterator[Problem]:
    """If an engine of the role has no room for an answer to a prompt of so many tokens, which the
    setting `limit` says."""
    settings = role.strategy_args.settings if role.strategy_args else None
    most = settings.engine_args.get("max_model_len") if isinstance(settings, VllmConfig) else None
    if isinstance(most, int) and 0 < most <= prompt_tokens:
        rule = f"leaves a prompt of {limit}={prompt_tokens} tokens none for an answer"
        key = "strategy_args.strategy_config.max_model_len"
        yield Problem(key, repr(most), rule, f"raise it, or lower {limit}")
