"""Choices by name, and calls of functions whose arguments are columns and settings.

An advantage or a loss is a function `f(column, …, *, setting, …)`, see config.signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from roll_td.config.signatures import columns_of

T = TypeVar("T")


def named(what: str, name: str, table: Mapping[str, T]) -> T:
    """The entry of a table. ValueError, naming `what`, for a name that isn't in it."""
    if name not in table:
        raise ValueError(f"{what}={name!r}: want one of {', '.join(table)}")
    return table[name]


def call(function: Callable[..., T], columns: Mapping[str, Any], settings: Mapping[str, Any]) -> T:
    """function(its columns of those given, **settings).

    KeyError for a column that isn't there, TypeError for a setting it doesn't have.
    """
    needed = columns_of(function)
    missing = [name for name in needed if name not in columns]
    if missing:
        there = f"there are {sorted(columns)}"
        raise KeyError(f"{function.__qualname__} needs columns {missing}; {there}")
    return function(*(columns[name] for name in needed), **settings)


def check_advantages(function: Callable[..., Any], made: Any, mask: Tensor) -> None:
    """ValueError unless a function has made a dict with `advantages` of the mask's shape (B, T)."""
    if not isinstance(made, Mapping) or not _fits(made.get("advantages"), mask):
        raise ValueError(
            f"advantage {function.__qualname__} returned {_shown(made)}: "
            f'want {{"advantages": a tensor of shape {tuple(mask.shape)}}}, as response_mask has'
        )


def check_losses(function: Callable[..., Any], made: Any, log_probs: Tensor) -> None:
    """ValueError unless a function has made a loss for each of these log-probs (b, T), with a
    gradient where they have one, and a dict of metrics."""
    name = f"policy loss {function.__qualname__}"
    is_pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)
    if not is_pair or not _fits(made[0], log_probs):
        raise ValueError(
            f"{name} returned {_shown(made)}: want (losses, metrics), a tensor of shape "
            f"{tuple(log_probs.shape)}, as log_probs has, and a dict; algorithm.aggregation makes "
            "one number of the losses"
        )
    if log_probs.requires_grad and not made[0].requires_grad:
        raise ValueError(
            f"{name} returned losses without a gradient: compute them from log_probs, "
            "which are not to be detached"
        )


def _fits(made: Any, like: Tensor) -> bool:
    return isinstance(made, Tensor) and made.shape == like.shape


def _shown(made: Any) -> str:
    if isinstance(made, Tensor):
        return f"a tensor of shape {tuple(made.shape)}"
    if isinstance(made, Mapping):
        return f"{{{', '.join(f'{key!r}: {_shown(value)}' for key, value in made.items())}}}"
    if isinstance(made, tuple):
        return f"({', '.join(map(_shown, made))})"
    return type(made).__name__
