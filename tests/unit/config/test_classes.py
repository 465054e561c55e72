"""Finding classes by dotted path, from source where they are shipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from roll_td.config.base import BaseConfig
from roll_td.config.classes import check_class, config_class_of, import_class


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ("nodots", "is not a dotted path"),
        ("a..b", "is not a dotted path"),
        ("no_such_pkg.mod.Cls", "there is no module no_such_pkg"),
        ("user_code.sub.Cls", "there is no module user_code.sub"),
        ("user_code.MyWorkr", r"did you mean user_code\.MyWorker\?"),
        ("user_code.a_function", "is a builtin_function_or_method; name a class"),
        ("broken.Cls", "importing broken failed: No module named 'not_installed_anywhere'"),
    ],
)
def test_import_errors(workdir: Path, dotted: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        import_class(dotted)


@pytest.mark.parametrize("name", ["Annotated", "Inherits", "Attribute", "AttributeText"])
def test_config_class_of_a_users_pipeline(workdir: Path, name: str) -> None:
    found = config_class_of(f"user_code.{name}")
    assert found is import_class("user_code.MyConfig")


def test_a_pipeline_that_says_nothing_gets_what_its_base_says(workdir: Path) -> None:
    assert config_class_of("user_code.Plain") is BaseConfig
    assert config_class_of("user_code.MyWorker") is None


def test_unreadable_annotation(workdir: Path) -> None:
    with pytest.raises(ValueError, match="name 'Nowhere' is not defined; import the name"):
        config_class_of("user_code.Unreadable")


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that look as if they belonged to roll_td, and must not be imported."""
    import roll_td.config

    monkeypatch.setattr(roll_td.config, "__path__", [*roll_td.config.__path__, str(tmp_path)])
    (tmp_path / "t_base.py").write_text(
        "raise RuntimeError('imported')\n"
        "from .base import BaseConfig\n"
        "class Root:\n    def __init__(self, pipeline_config: 'BaseConfig') -> None: ...\n"
        "class Silent: ...\n"
    )
    (tmp_path / "t_pipes.py").write_text(
        "raise RuntimeError('imported')\n"
        "import roll_td.config.t_base as base\n"
        "import roll_td.config.t_settings\n"
        "from typing import TYPE_CHECKING\n"
        "from roll_td.config.t_base import Root, Silent\n"
        "if TYPE_CHECKING:\n    from roll_td.config.t_settings import Mine as Settings\n"
        "class Typed(Root):\n    def __init__(self, pipeline_config: Settings) -> None: ...\n"
        "class Full(Root):\n"
        "    def __init__(self, pipeline_config: roll_td.config.t_settings.Mine) -> None: ...\n"
        "class Child(Typed): ...\n"
        "class Attribute(Root):\n    config_cls: type = Settings\n"
        "class Second(Silent, base.Root): ...\n"
        "class Alone(Silent): ...\n"
        "HANDY = 1\n"
    )
    (tmp_path / "t_settings.py").write_text(
        "from dataclasses import dataclass\n"
        "from roll_td.config.base import BaseConfig\n"
        "@dataclass\nclass Mine(BaseConfig):\n    extra: int = 1\n"
    )
    for name in ("t_base", "t_pipes", "t_settings"):
        monkeypatch.delitem(sys.modules, f"roll_td.config.{name}", raising=False)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Typed", "Mine"),
        ("Full", "Mine"),
        ("Child", "Mine"),
        ("Attribute", "Mine"),
        ("Second", "BaseConfig"),
        ("Root", "BaseConfig"),
        ("Alone", None),
    ],
)
def test_config_class_from_source(shipped: None, name: str, config: str | None) -> None:
    found = config_class_of(f"roll_td.config.t_pipes.{name}")
    assert (found.__name__ if found else None) == config
    assert "roll_td.config.t_pipes" not in sys.modules


def test_check_class_reads_shipped_source(shipped: None) -> None:
    check_class("roll_td.config.t_pipes.Typed")
    with pytest.raises(ValueError, match=r"did you mean roll_td\.config\.t_pipes\.Typed\?"):
        check_class("roll_td.config.t_pipes.Typd")
    with pytest.raises(ValueError, match=r"there is no module roll_td\.no_such"):
        check_class("roll_td.no_such.thing.Cls")
