"""Choices by name, and calls of functions whose arguments are columns and settings.

An advantage or a loss is a function `f(column, …, *, setting, …)`, see config.signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

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
