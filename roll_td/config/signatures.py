"""What a function says of itself: its positional parameters have names of columns, its keyword-only
ones are settings. So nobody has to know its name to call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


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
