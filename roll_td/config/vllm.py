"""What can be told of an engine of vLLM without it: importing it takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from roll_td.config.base import WorkerConfig
from roll_td.config.schema import Problem
from roll_td.config.strategies import VllmConfig


def engine_arguments() -> frozenset[str] | None:
    """The fields of its EngineArgs, from its source; None where vLLM is not installed."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    (body,) = (
        node.body
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    )
    return frozenset(
        node.target.id
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    )


def room_problems(role: WorkerConfig, prompt_tokens: int) -> Iterator[Problem]:
    """If an engine of the role has no room for an answer to a prompt of so many tokens."""
    settings = role.strategy_args.settings if role.strategy_args else None
    most = settings.engine_args.get("max_model_len") if isinstance(settings, VllmConfig) else None
    if isinstance(most, int) and 0 < most <= prompt_tokens:
        rule = f"leaves a prompt of data.max_length={prompt_tokens} tokens none for an answer"
        key = "strategy_args.strategy_config.max_model_len"
        yield Problem(key, repr(most), rule, "raise it, or lower data.max_length")
