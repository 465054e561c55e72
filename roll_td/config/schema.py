"""Reads plain dicts into dataclasses, strictly, and collects everything that is wrong."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from roll_td.config.masking import mask_urls, shown

T = TypeVar("T")

AT_THE_TOP = "at the top level"


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a config. Its text shows no secret if `given` comes from `shown`."""

    key: str
    """Dotted key; empty for the config as a whole."""
    given: str
    """The value as text; empty if there is none, or none that may be shown."""
    rule: str
    """What holds, or what was found to be broken."""
    fix: str
    """The way out; may be empty."""

    def under(self, section: str) -> Problem:
        """The same problem seen from outside the section."""
        rule = self.rule.replace(AT_THE_TOP, f"of section {section}")
        return dataclasses.replace(self, key=join(section, self.key), rule=rule)

    def __str__(self) -> str:
        subject = f"{self.key}={self.given}" if self.given else self.key
        return "; ".join(t for t in (f"{subject}: {self.rule}".removeprefix(": "), self.fix) if t)


class ConfigError(ValueError):
    """All problems of a config, one per line."""

    def __init__(self, problems: Iterable[Problem], source: str = "") -> None:
        self.problems = list(problems)
        lines = [str(problem) for problem in self.problems]
        super().__init__("\n".join([f"{source}:", *lines] if source else lines))


@dataclass(frozen=True)
class Reading(Generic[T]):
    """What came of reading a dict into a dataclass."""

    value: T | None
    """The object; None if anything was wrong."""
    problems: list[Problem]
    """Everything that was wrong."""
    fields: dict[str, Any]
    """The fields that could be read, even if others could not."""


_BAD: Any = object()
"""Stands for a value that could not be read."""

_Sections = Mapping[str, list[str]]
"""Field name → the sections of the whole config that have it."""


def join(section: str, key: str) -> str:
    """The dotted key of `key` in `section`."""
    return ".".join(part for part in (section, key) if part)


def read(cls: type[T], data: Mapping[str, Any]) -> Reading[T]:
    """Read `data` into the dataclass `cls` and the dataclasses in it."""
    sections: dict[str, list[str]] = {}
    for name, section in _all_fields(cls, "", ()):
        sections.setdefault(name, []).append(section)
    # of a section that the config does not have nobody thinks who mistakes a key's
    for name, homes in sections.items():
        sections[name] = [home for home in homes if home.partition(".")[0] in data] or homes
    fields, problems, complete = _read_fields(cls, data, "", sections)
    value, more = _construct(cls, fields, "") if complete else (_BAD, [])
    problems += more
    return Reading(None if problems else value, problems, fields)


def _read_fields(
    cls: type, data: Mapping[str, Any], section: str, sections: _Sections
) -> tuple[dict[str, Any], list[Problem], bool]:
    """The fields of `data`, the problems, and whether an object can be made of the fields."""
    hints = _init_fields(cls)
    values: dict[str, Any] = {}
    problems = [_unknown(str(k), section, hints, sections) for k in data if k not in hints]
    complete = True
    for name in [n for n in hints if n in data]:
        value, found = _convert(hints[name], data[name], join(section, name), sections)
        problems += found
        complete = complete and not found
        if value is not _BAD:
            values[name] = value
    for name in sorted(_required(cls) - data.keys()):
        problems.append(Problem(join(section, name), "", "is missing", "set it"))
        complete = False
    return values, problems, complete


def _construct(cls: type, values: dict[str, Any], section: str) -> tuple[Any, list[Problem]]:
    try:
        return cls(**values), []
    except ConfigError as error:
        return _BAD, [problem.under(section) for problem in error.problems]
    except (ValueError, AssertionError) as error:
        lines = mask_urls(str(error)).splitlines() or [type(error).__name__]
        return _BAD, [Problem(section, "", line, "") for line in lines]


def _convert(hint: Any, value: Any, key: str, sections: _Sections) -> tuple[Any, list[Problem]]:
    origin = get_origin(hint)
    if hint is Any or hint is object:
        return value, []
    if origin is Literal:
        return _convert_literal(hint, value, key)
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value, key, sections)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _convert_dataclass(hint, value, key, sections)
    if (origin or hint) in _CONTAINERS:
        return _CONTAINERS[origin or hint](hint, value, key, sections)
    return _convert_scalar(hint, value, key)


def _convert_scalar(hint: Any, value: Any, key: str) -> tuple[Any, list[Problem]]:
    if hint is float and type(value) is int:
        return float(value), []
    if hint is None or hint is type(None):
        return (None, []) if value is None else _wrong(hint, value, key)
    is_bool_for_number = isinstance(value, bool) and hint in (int, float)
    if not isinstance(value, get_origin(hint) or hint) or is_bool_for_number:
        return _wrong(hint, value, key)
    return value, []


def _convert_literal(hint: Any, value: Any, key: str) -> tuple[Any, list[Problem]]:
    choices = get_args(hint)
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return value, []
    listed = ", ".join(repr(choice) for choice in choices)
    near = _nearest(str(value), [str(choice) for choice in choices])
    return _BAD, [Problem(key, shown(key, value), f"must be one of {listed}", near)]


def _convert_union(
    hint: Any, value: Any, key: str, sections: _Sections
) -> tuple[Any, list[Problem]]:
    members = sorted(get_args(hint), key=lambda member: member is not type(value))
    tries = [(member, *_convert(member, value, key, sections)) for member in members]
    for _, result, problems in tries:
        if not problems:
            return result, []
    fitting = [(res, problems) for member, res, problems in tries if _same_shape(member, value)]
    return fitting[0] if len(fitting) == 1 else _wrong(hint, value, key)


def _same_shape(hint: Any, value: Any) -> bool:
    """Whether `value` was meant for `hint`, so that what is wrong inside is worth telling."""
    if dataclasses.is_dataclass(hint):
        return isinstance(value, Mapping)
    kind = get_origin(hint) or hint
    if kind is Literal:
        return any(type(value) is type(choice) for choice in get_args(hint))
    return kind in _CONTAINERS and isinstance(value, list | tuple if kind is not dict else Mapping)


def _convert_dataclass(
    cls: type, value: Any, key: str, sections: _Sections
) -> tuple[Any, list[Problem]]:
    if isinstance(value, cls):
        return value, []
    if value is not None and not isinstance(value, Mapping):
        return _wrong(cls, value, key)
    fields, problems, complete = _read_fields(cls, value or {}, key, sections)
    result, more = _construct(cls, fields, key) if complete else (_BAD, [])
    problems += more
    return (_BAD if problems else result), problems


def _convert_list(hint: Any, value: Any, key: str, s: _Sections) -> tuple[Any, list[Problem]]:
    if not isinstance(value, list | tuple):
        return _wrong(hint, value, key)
    (item,) = get_args(hint) or (Any,)
    return _convert_items([item] * len(value), value, key, s)


def _convert_tuple(hint: Any, value: Any, key: str, s: _Sections) -> tuple[Any, list[Problem]]:
    if not isinstance(value, list | tuple):
        return _wrong(hint, value, key)
    items = list(get_args(hint)) or [Any, ...]
    if items[1:] == [...]:
        items = items[:1] * len(value)
    if len(items) != len(value):
        return _wrong(hint, value, key)
    result, problems = _convert_items(items, value, key, s)
    return (result if problems else tuple(result)), problems


def _convert_items(
    hints: list[Any], values: Iterable[Any], key: str, sections: _Sections
) -> tuple[Any, list[Problem]]:
    pairs = enumerate(zip(hints, values, strict=True))
    results = [_convert(h, v, f"{key}[{i}]", sections) for i, (h, v) in pairs]
    problems = [problem for _, found in results for problem in found]
    return (_BAD if problems else [result for result, _ in results]), problems


def _convert_dict(hint: Any, value: Any, key: str, s: _Sections) -> tuple[Any, list[Problem]]:
    """A dict; entries that could not be read are left out, so that the others can be used."""
    if not isinstance(value, Mapping):
        return _wrong(hint, value, key)
    key_hint, value_hint = get_args(hint) or (Any, Any)
    result: dict[Any, Any] = {}
    problems: list[Problem] = []
    for k, v in value.items():
        place = join(key, str(k))
        new_key, key_problems = _convert(key_hint, k, place, s)
        new_value, value_problems = _convert(value_hint, v, place, s)
        problems += key_problems + value_problems
        if new_key is not _BAD and new_value is not _BAD:
            result[new_key] = new_value
    return result, problems


_CONTAINERS: dict[Any, Callable[[Any, Any, str, _Sections], tuple[Any, list[Problem]]]] = {
    list: _convert_list,
    tuple: _convert_tuple,
    dict: _convert_dict,
}


def _wrong(hint: Any, value: Any, key: str) -> tuple[Any, list[Problem]]:
    got = "null" if value is None else type(value).__name__
    rule = f"must be {_type_text(hint)}, is {got}"
    is_text = hint is str or set(get_args(hint)) == {str, type(None)}
    fix = "write it in quotes" if is_text and isinstance(value, int | float) else ""
    return _BAD, [Problem(key, shown(key, value), rule, fix)]


def _type_text(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_type_text(member) for member in get_args(hint))
    if hint is type(None):
        return "null"
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return f"a section of {hint.__name__} fields"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def _unknown(name: str, section: str, hints: Mapping[str, Any], sections: _Sections) -> Problem:
    """No value is shown: a misspelt key may hide a secret."""
    place = f"of section {section}" if section else AT_THE_TOP
    homes = [home for home in sections.get(name, []) if home != section]
    if homes:
        listed = " or ".join(join(home, name) for home in homes[:4])
        fix = f"move it: the right key is {listed}"
    else:
        near_here, near = _nearest(name, hints), _nearest(name, sections)
        fix = near_here or (near and f"{near} In section {_home(name, sections)}") or _known(hints)
    return Problem(join(section, name), "", f"is not a key {place}", fix)


def _home(name: str, sections: _Sections) -> str:
    (near,) = get_close_matches(name, sections, n=1)
    return sections[near][0] or "at the top level"


def _known(hints: Mapping[str, Any]) -> str:
    return f"its keys are {', '.join(hints)}" if hints else "it has no keys"


def _nearest(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]}?" if near else ""


def _init_fields(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def _required(cls: type) -> set[str]:
    missing = dataclasses.MISSING
    fields = [f for f in dataclasses.fields(cls) if f.init]
    return {f.name for f in fields if f.default is missing and f.default_factory is missing}


def _all_fields(cls: type, section: str, above: tuple[type, ...]) -> Iterator[tuple[str, str]]:
    """(field, section) of `cls` and of every dataclass in it; recursive types once."""
    for name, hint in _init_fields(cls).items():
        yield name, section
        for inner, suffix in _dataclasses_in(hint):
            if inner is not cls and inner not in above:
                yield from _all_fields(inner, join(section, name) + suffix, (*above, cls))


def _dataclasses_in(hint: Any, suffix: str = "") -> Iterator[tuple[type, str]]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint, suffix
    inner = {dict: ".NAME", list: "[i]", tuple: "[i]"}.get(get_origin(hint) or hint, "")
    for member in get_args(hint):
        yield from _dataclasses_in(member, suffix + inner)
