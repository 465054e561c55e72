"""Finds classes by dotted path; shipped ones from their source, so that torch stays out."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import typing
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

_SHIPPED = "roll_td."


def import_class(dotted: str) -> type:
    """As import_object; a ValueError too if it is no class."""
    found = import_object(dotted)
    if not isinstance(found, type):
        raise ValueError(f"is a {type(found).__name__}; name a class")
    return found


def import_object(dotted: str) -> Any:
    """What is at `dotted`, imported; the working directory counts as on the Python path.

    Raises ValueError if it is no dotted path, or there is no such module or attribute.
    """
    module_name, name = _split(dotted)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(_no_module(error.name)) from error
        raise ValueError(f"importing {module_name} failed: {error}; install it") from error
    except (ImportError, SyntaxError) as error:
        raise ValueError(f"importing {module_name} failed: {error}; mend it") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ValueError(_no_class(module_name, name, dir(module))) from None


def check_class(dotted: str) -> None:
    """Raise ValueError unless there is a class at `dotted`. Shipped ones are not imported."""
    module_name, name = _split(dotted)
    if not dotted.startswith(_SHIPPED):
        import_class(dotted)
        return
    names = _Source.of(module_name).names()
    if name in names:
        return
    if "__getattr__" in names:
        import_class(dotted)
        return
    raise ValueError(_no_class(module_name, name, list(names)))


def config_class_of(pipeline_cls: str) -> type | None:
    """The config class a pipeline class says: the annotation of `pipeline_config` in its
    __init__, or its config_cls; inherited ones count. None if it says none.

    Raises ValueError if the pipeline class, or what it says, can't be found.
    """
    if pipeline_cls.startswith(_SHIPPED):
        check_class(pipeline_cls)
        dotted = _config_class_in_source(pipeline_cls)
        return import_class(dotted) if dotted else None
    for cls in import_class(pipeline_cls).__mro__:
        found = _own_config_class(cls)
        if found is not None:
            return found
    return None


def _own_config_class(cls: type) -> type | None:
    init = vars(cls).get("__init__")
    if inspect.isfunction(init) and "pipeline_config" in init.__annotations__:
        try:
            hint = typing.get_type_hints(init)["pipeline_config"]
        except NameError as error:
            rule = f"the annotations of {cls.__qualname__}.__init__ can't be read: {error}"
            raise ValueError(f"{rule}; import the name in the module, or set config_cls") from error
        if isinstance(hint, type) and hint is not object:
            return hint
    said = vars(cls).get("config_cls")
    return import_class(said) if isinstance(said, str) else said


def _config_class_in_source(dotted: str) -> str | None:
    module_name, _, name = dotted.rpartition(".")
    source = _Source.of(module_name)
    node = source.classes.get(name)
    if node is None:
        return _config_class_in_source(source.imports[name]) if name in source.imports else None
    said = _annotation(node) or _class_attribute(node)
    if said is not None:
        return source.dotted(said)
    for base in node.bases:
        base_dotted = source.dotted(base)
        if base_dotted and base_dotted.startswith(_SHIPPED):
            found = _config_class_in_source(base_dotted)
            if found:
                return found
    return None


def _annotation(node: ast.ClassDef) -> ast.expr | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            arguments = [*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs]
            return next((a.annotation for a in arguments if a.arg == "pipeline_config"), None)
    return None


def _class_attribute(node: ast.ClassDef) -> ast.expr | None:
    for item in node.body:
        targets = item.targets if isinstance(item, ast.Assign) else []
        if isinstance(item, ast.AnnAssign) and item.value is not None:
            targets = [item.target]
        if any(isinstance(t, ast.Name) and t.id == "config_cls" for t in targets):
            assert isinstance(item, ast.Assign | ast.AnnAssign)
            return item.value
    return None


@dataclass(frozen=True)
class _Source:
    """A module as its source says, not imported (its parent packages are)."""

    module: str
    classes: dict[str, ast.ClassDef]
    imports: dict[str, str]
    """Name in the module → dotted path it was imported from."""
    others: frozenset[str]
    """Functions and variables."""

    @staticmethod
    @cache
    def of(module: str) -> _Source:
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError as error:
            raise ValueError(_no_module(error.name or module)) from error
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise ValueError(_no_module(module))
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        package = module if spec.submodule_search_locations else module.rpartition(".")[0]
        functions = {item.name for item in tree.body if isinstance(item, ast.FunctionDef)}
        assigned = [item for item in tree.body if isinstance(item, ast.Assign)]
        targets = {t.id for item in assigned for t in item.targets if isinstance(t, ast.Name)}
        classes = {item.name: item for item in tree.body if isinstance(item, ast.ClassDef)}
        return _Source(module, classes, _imports(tree, package), frozenset(functions | targets))

    def names(self) -> set[str]:
        return self.classes.keys() | self.imports.keys() | self.others

    def dotted(self, node: ast.expr) -> str | None:
        """The dotted path that a name, attribute or quoted annotation stands for."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        text = ast.unparse(node)
        first, dot, rest = text.partition(".")
        if first in self.classes:
            return f"{self.module}.{text}"
        if first in self.imports:
            return f"{self.imports[first]}{dot}{rest}"
        return text if dot and text.replace(".", "").isidentifier() else None


def _imports(tree: ast.Module, package: str) -> dict[str, str]:
    """Imported names, those under `if TYPE_CHECKING` too."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({a.asname: a.name for a in node.names if a.asname})
            found.update({a.name.split(".")[0]: a.name.split(".")[0] for a in node.names})
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            origin = importlib.util.resolve_name(relative, package)
            found.update({a.asname or a.name: f"{origin}.{a.name}" for a in node.names})
    return found


def _split(dotted: str) -> tuple[str, str]:
    module_name, _, name = dotted.rpartition(".")
    if not all(part.isidentifier() for part in dotted.split(".")) or not module_name:
        raise ValueError("is not a dotted path; write module.Class, as in my_package.worker.Mine")
    return module_name, name


def _no_module(module: str) -> str:
    way_out = "check the spelling, or start where it can be imported"
    return f"there is no module {module} on the Python path or in {os.getcwd()}; {way_out}"


def _no_class(module: str, name: str, names: list[str]) -> str:
    near = get_close_matches(name, names, n=1)
    way_out = f"did you mean {module}.{near[0]}?" if near else "check the spelling"
    return f"module {module} has no {name}; {way_out}"
