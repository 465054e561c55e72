"""Strict reading of dicts into dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from roll_td.config.schema import read


@dataclass
class Optim:
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    steps: tuple[int, ...] = ()


@dataclass
class Role:
    name: str | None = None
    optim: Optim = field(default_factory=Optim)
    devices: list[int] | str | int | None = None


@dataclass
class Config:
    actor: Role = field(default_factory=Role)
    critic: Role | None = None
    others: dict[str, Role] = field(default_factory=dict)
    seed: int = 1
    flag: bool = False
    mode: Literal["none", "group", 3] = "none"
    anything: Any = None
    ratio: float | int = 0


@dataclass
class Strict:
    needed: int
    text: str = ""

    def __post_init__(self) -> None:
        if self.needed < 0:
            raise ValueError("needed must not be negative\ntext is too short")


def _texts(cls: type, data: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in read(cls, data).problems]


def test_everything_right() -> None:
    data = {
        "actor": {"name": "a", "optim": {"learning_rate": 1, "betas": [0, 0.5], "steps": [1, 2]}},
        "critic": None,
        "others": {"x": {"devices": "0-3"}, "y": {"devices": [1]}, "z": {"devices": 2}},
        "flag": True,
        "mode": 3,
        "anything": {"a": [1, None]},
        "ratio": 2,
    }
    config = read(Config, data).value
    assert config is not None
    assert config.actor.optim == Optim(1.0, (0.0, 0.5), (1, 2))
    assert type(config.actor.optim.learning_rate) is float
    assert type(config.ratio) is int
    assert [role.devices for role in config.others.values()] == ["0-3", [1], 2]
    assert (config.critic, config.flag, config.mode) == (None, True, 3)
    assert config.anything == {"a": [1, None]}


def test_an_empty_section_means_defaults() -> None:
    config = read(Config, {"actor": None}).value
    assert config is not None
    assert config.actor == Role()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"seed": True}, "seed=True: must be int, is bool"),
        ({"seed": 1.0}, "seed=1.0: must be int, is float"),
        ({"seed": "4"}, "seed='4': must be int, is str"),
        ({"flag": 1}, "flag=1: must be bool, is int"),
        ({"ratio": True}, "ratio=True: must be float or int, is bool"),
        ({"mode": "grup"}, "mode='grup': must be one of 'none', 'group', 3; did you mean group?"),
        ({"mode": True}, "mode=True: must be one of 'none', 'group', 3"),
        ({"actor": 3}, "actor=3: must be a section of Role fields, is int"),
        ({"critic": {"name": 3}}, "critic.name=3: must be str or null, is int"),
        ({"others": {"x": {"name": 1}}}, "others.x.name=1: must be str or null, is int"),
        ({"actor": {"devices": [0, "1"]}}, "actor.devices[1]='1': must be int, is str"),
        ({"actor": {"devices": True}}, "list[int] or str or int or null, is bool"),
        ({"actor": {"optim": {"betas": [1]}}}, "betas=[1]: must be tuple[float, float], is list"),
        ({"actor": {"optim": {"steps": [1, None]}}}, "steps[1]=None: must be int, is null"),
    ],
)
def test_wrong_values(data: dict[str, Any], text: str) -> None:
    (problem,) = _texts(Config, data)
    assert text in problem


def test_c06_misspelt_key() -> None:
    (problem,) = _texts(Config, {"actor": {"optim": {"learning_rat": 1}}})
    assert problem == (
        "actor.optim.learning_rat: is not a key of section actor.optim; did you mean learning_rate?"
    )


@pytest.mark.parametrize(
    ("data", "home"),
    [
        ({"actor": {"seed": 3}}, "the right key is seed"),
        ({"seed": 3, "betas": 1}, "actor.optim.betas or critic.optim.betas"),
        ({"devices": 1}, "actor.devices or critic.devices or others.NAME"),
        ({"actor": {"optim": {"devices": 1}}}, "the right key is actor.devices"),
        ({"actor": {}, "critic": {}, "betas": 1}, "key is actor.optim.betas or critic.optim.betas"),
    ],
)
def test_c06_right_key_at_the_wrong_level(data: dict[str, Any], home: str) -> None:
    (problem,) = _texts(Config, data)
    assert home in problem


def test_a_misspelt_key_shows_no_value() -> None:
    (problem,) = _texts(Config, {"api_ky": "S3CRET"})
    assert problem.startswith("api_ky: is not a key")
    assert "S3CRET" not in problem


def test_all_problems_are_collected_and_the_rest_is_kept() -> None:
    data = {
        "sed": 1,
        "seed": "x",
        "flag": True,
        "actor": {"optim": {"learning_rate": "fast"}, "nam": "a"},
        "others": {"good": {"name": "g"}, "bad": {"name": 1}},
    }
    reading = read(Config, data)
    keys = {problem.key for problem in reading.problems}
    assert keys == {
        "sed",
        "seed",
        "actor.nam",
        "actor.optim.learning_rate",
        "others.bad.name",
    }
    assert reading.value is None
    assert reading.fields == {"flag": True, "others": {"good": Role("g")}}


def test_missing_field_and_checks_of_the_class() -> None:
    assert _texts(Strict, {}) == ["needed: is missing; set it"]
    assert _texts(Strict, {"needed": -1, "txt": "a"}) == [
        "txt: is not a key at the top level; did you mean text?",
        "needed must not be negative",
        "text is too short",
    ]
