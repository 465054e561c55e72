"""From a YAML file and overrides to a config: composed by Hydra, read strictly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll_td.config.base import BaseConfig, JobSize, WorkerConfig, job_size, role_sections
from roll_td.config.classes import check_class, config_class_of, import_class
from roll_td.config.masking import mask_urls, masked, shown
from roll_td.config.schema import ConfigError, Problem, Reading, read

T = TypeVar("T")

_BASE_FIELDS = frozenset(f.name for f in dataclasses.fields(BaseConfig))
_ROLE_FIELDS = frozenset(f.name for f in dataclasses.fields(WorkerConfig))


class Checked(NamedTuple):
    """What could be read of a config, and all that is wrong with it."""

    config: BaseConfig | None
    """The config; None if there is any problem."""
    problems: list[Problem]
    """Everything that is wrong."""
    roles: dict[str, WorkerConfig]
    """The roles that could be read, by dotted key; left out are those with problems and, unless
    they are final, those without a place."""
    size: JobSize | None
    """The size of a job for these roles; None if it can't be told."""
    roles_are_final: bool
    """False: the config class would have had a say in them, but could not be made."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> BaseConfig:
    """The config of a YAML file with `key=value` overrides.

    Raises ConfigError with every problem.
    """
    checked = check_config(path, overrides)
    if checked.config is None:
        raise ConfigError(checked.problems, source=str(path))
    return checked.config


def check_config(path: str | Path, overrides: Sequence[str] = ()) -> Checked:
    """Read a config as `load` does; problems are returned, and what could be read is kept."""
    path = Path(path)
    try:
        data, missing = _compose(path, overrides)
    except ConfigError as error:
        return Checked(None, error.problems, {}, None, False)
    if data.get("exp_name") is None:
        data["exp_name"] = path.stem
    cls, problems = _config_class(data)
    known = cls is not None
    if cls is None:
        data = _without_unknown_roles(data)
        cls = BaseConfig
    if cls is BaseConfig:
        cls, data, more = _with_roles(data)
        problems += more
    reading: Reading[BaseConfig] = read(cls, data)
    problems += [p for p in reading.problems if not _follows(p, missing)]
    problems += [Problem(key, "'???'", "must be given", "set it") for key in missing]
    # the config class may have roles of its own beside those in the file
    fields = reading.fields if reading.value is None else vars(reading.value)
    roles = role_sections(fields)
    if reading.value is None:
        problems += [p for p in _base_problems(reading.fields, roles) if p not in problems]
    sizes = ("num_nodes", "num_gpus_per_node", "num_cpu_ranks_per_node")
    given = {name: fields[name] for name in sizes if name in fields}
    try:
        size = job_size(roles.values(), **given)
    except ConfigError:
        size = None
    is_final = known and (reading.value is not None or _keeps_roles(cls))
    if not is_final:  # the config class may have wanted to place them
        roles = {key: role for key, role in roles.items() if _is_placed(role)}
    return Checked(None if problems else reading.value, problems, roles, size, is_final)


def resolved_yaml(config: BaseConfig) -> str:
    """The config as YAML with secrets masked; it loads again where none was."""
    return yaml.safe_dump(masked(dataclasses.asdict(config)), sort_keys=False)


def _follows(problem: Problem, missing: Sequence[str]) -> bool:
    """Whether it is there only because of what is missing: it is of the same key, or section."""
    return any(key == problem.key or key.startswith(f"{problem.key}.") for key in missing)


def _compose(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The config without the keys that still have to be given (???), and these."""
    if not path.is_file():
        raise ConfigError([Problem("", "", f"there is no file {path}", "give the path of a YAML")])
    if path.suffix != ".yaml":
        raise ConfigError([Problem("", "", f"{path} must end with .yaml", "rename it")])
    directory = path.resolve().parent
    reaching, problems = _reaching_overrides(overrides, directory)
    if problems:
        raise ConfigError(problems)
    try:
        with initialize_config_dir(config_dir=str(directory), version_base=None):
            composed = compose(config_name=path.stem, overrides=reaching)
        missing = sorted(OmegaConf.missing_keys(composed))
        data = OmegaConf.to_container(composed, resolve=not missing)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        rule = f"not readable as YAML{line}: {error.problem}"
        raise ConfigError([Problem("", "", rule, "mend the file")]) from None
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(_into_lists(path, overrides) or [_hydra_problem(error)]) from None
    assert isinstance(data, dict)
    for key in missing:
        _remove(data, key)
    return {str(key): value for key, value in data.items()}, missing


def _remove(data: Any, dotted: str) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        if not isinstance(data, dict) or section not in data:
            return  # in a list, whose items are read as they are
        data = data[section]
    if isinstance(data, dict):
        data.pop(last, None)


def _into_lists(path: Path, overrides: Sequence[str]) -> list[Problem]:
    """The overrides that name no item of a list of the file, of which Hydra does not tell which."""
    problems = []
    for text in overrides:
        key, _, value = text.partition("=")
        *sections, last = key.lstrip("+~").split(".")
        node = yaml.safe_load(path.read_text())
        for depth, part in enumerate((*sections, last)):
            if isinstance(node, list):
                section = ".".join(sections[:depth])
                if part.isdigit() and int(part) < len(node) and not key.startswith("~"):
                    node = node[int(part)]
                    continue
                rule = f"{section} is a list of {len(node)}"
                fix = (
                    f"write {section}.N with N below {len(node)}, or {section}=[…] for another list"
                )
                problems.append(Problem(key, shown(key, value), rule, fix))
                break
            node = node.get(part) if isinstance(node, dict) else None
    return problems


def _hydra_problem(error: Exception) -> Problem:
    """What Hydra or OmegaConf says; ValueErrors of theirs come from the text of the file."""
    if isinstance(error, UnicodeDecodeError):
        return Problem("", "", f"not readable as UTF-8: {error.reason}", "mend the file")
    said = str(error) or str(error.__cause__)
    rule = mask_urls(said).strip().partition("\n")[0]
    return Problem(getattr(error, "full_key", None) or "", "", rule, "")


def _reaching_overrides(
    overrides: Sequence[str], directory: Path
) -> tuple[list[str], list[Problem]]:
    """The overrides in Hydra's words: a plain key=value may add a key, groups stay as they are."""
    parser = OverridesParser.create()
    reaching, problems = [], []
    for text in overrides:
        key, _, value = text.partition("=")
        try:
            parsed = parser.parse_override(text) if key.strip("+~ ") else None
        except HydraException:
            parsed = None
        if parsed is None:
            rule, fix = "Hydra can't read this override", "write key=value or 'key=\"value\"'"
            problems.append(Problem(key, shown(key, value), rule, fix))
            continue
        if parsed.is_sweep_override():
            rule, fix = "is several values", f"write a list as {key}=[…], a text as '{key}=\"…\"'"
            problems.append(Problem(key, shown(key, value), rule, fix))
        is_group = "@" in key or "/" in key or (directory / key.replace(".", "/")).is_dir()
        is_plain = parsed.type == OverrideType.CHANGE and not key.startswith("hydra.")
        reaching.append(f"++{text}" if is_plain and not is_group else text)
    return reaching, problems


def _config_class(data: Mapping[str, Any]) -> tuple[type[BaseConfig] | None, list[Problem]]:
    """The config class that the YAML or the pipeline class says; None if that can't be told."""
    pipeline_cls, config_cls = data.get("pipeline_cls"), data.get("config_cls")
    if not config_cls:
        return _find("pipeline_cls", pipeline_cls, lambda path: _checked(config_class_of(path)))
    _, problems = _find("pipeline_cls", pipeline_cls, check_class)
    found, more = _find("config_cls", config_cls, lambda path: _checked(import_class(path)))
    return found, [*problems, *more]


def _find(key: str, dotted: object, find: Callable[[str], T]) -> tuple[T | None, list[Problem]]:
    if not dotted:
        return None, [Problem(key, "", "is missing", "set the dotted path of the class")]
    if not isinstance(dotted, str):
        return None, []
    try:
        return find(dotted), []
    except ValueError as error:
        rule, _, fix = str(error).rpartition("; ")
        return None, [Problem(key, repr(dotted), rule, fix)]


def _checked(cls: type | None) -> type[BaseConfig]:
    if cls is None:
        return BaseConfig
    if not isinstance(cls, type) or not issubclass(cls, BaseConfig):
        raise ValueError(f"config class {cls!r} is not a BaseConfig; derive it from BaseConfig")
    if "__annotations__" in vars(cls) and "__dataclass_fields__" not in vars(cls):
        raise ValueError(f"config class {cls.__name__} is no dataclass; put @dataclass above it")
    return cls


def _is_placed(role: WorkerConfig) -> bool:
    return role.device_mapping is not None or role.world_size is not None


def _keeps_roles(cls: type[BaseConfig]) -> bool:
    return cls.__post_init__ is BaseConfig.__post_init__


def _without_unknown_roles(data: Mapping[str, Any]) -> dict[str, Any]:
    """What can be checked although the config class is not known."""
    kept = {key: value for key, value in data.items() if key in _BASE_FIELDS}
    for key, value in data.items():
        if isinstance(value, dict) and _ROLE_FIELDS & value.keys() and key not in _BASE_FIELDS:
            kept[key] = {k: v for k, v in value.items() if k in _ROLE_FIELDS}
    return kept


def _with_roles(data: Mapping[str, Any]) -> tuple[type[BaseConfig], dict[str, Any], list[Problem]]:
    """A config class in which every further section of `data` is a role, and what it can read."""
    sections = [k for k, v in data.items() if isinstance(v, dict) and k not in _BASE_FIELDS]
    wrong = [name for name in sections if not name.isidentifier()]
    fix = "use letters, digits and _"
    problems = [Problem(name, "", "can't be the name of a role", fix) for name in wrong]
    names = tuple(name for name in sections if name not in wrong)
    return _roles_class(names), {k: v for k, v in data.items() if k not in wrong}, problems


def _roles_class(names: tuple[str, ...]) -> type[BaseConfig]:
    fields = [
        (name, WorkerConfig, dataclasses.field(default_factory=WorkerConfig)) for name in names
    ]

    def reduce(self: BaseConfig) -> tuple[Any, ...]:
        return _rebuild, (names, vars(self))

    return dataclasses.make_dataclass(
        "RolesConfig", fields, bases=(BaseConfig,), namespace={"__reduce__": reduce}
    )


def _rebuild(names: tuple[str, ...], fields: dict[str, Any]) -> BaseConfig:
    """Unpickle a config whose class was made for its roles."""
    return _roles_class(names)(**fields)


def _base_problems(fields: Mapping[str, Any], roles: Mapping[str, WorkerConfig]) -> list[Problem]:
    """What BaseConfig finds wrong, from the fields and roles that could be read."""
    given = {name: value for name, value in fields.items() if name in _BASE_FIELDS}
    given |= {section.replace(".", "__"): role for section, role in roles.items()}
    try:
        _roles_class(tuple(name for name in given if name not in _BASE_FIELDS))(**given)
    except ConfigError as error:
        return error.problems
    return []
