"""Names of vLLM's engine arguments, from its source: importing it takes seconds."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path


def engine_arguments() -> frozenset[str] | None:
    """The fields of its EngineArgs; None where vLLM is not installed."""
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
