"""Choices by name, and calls of functions whose arguments are columns and settings.

An advantage or a loss is a function `f(column, …, *, setting, …)`: positional parameters have names
of columns, keyword-only ones are settings. Which columns it needs can be read off it, so nobody
has to know its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def named(what: str, name: str, table: Mapping[str, T]) -> T:
    """The entry of a table. ValueError, naming `what`, for a name that isn't in it."""
    if name not in table:
        raise ValueError(f"{what}={name!r}: want one of {', '.join(table)}")
    return table[name]


@cache
def columns_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The columns a function needs: names of its positional parameters without a default."""
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and parameter.default is parameter.empty
    )


def check_settings(function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """ValueError unless these are the settings of the function, none missing or unknown."""
    try:
        inspect.signature(function).bind(*columns_of(function), **settings)
    except TypeError as error:
        name = f"{function.__module__}.{function.__qualname__}"
        given = f"settings {sorted(settings)} do not fit {name}{inspect.signature(function)}"
        raise ValueError(f"{given}: {error}; settings are its keyword-only parameters") from None


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
