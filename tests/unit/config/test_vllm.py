from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from roll_td.config import vllm
from roll_td.config.schema import ConfigError
from roll_td.config.strategies import StrategyArgs

SOURCE = """
from dataclasses import dataclass

raise ImportError("it is only read")

@dataclass
class EngineArgs:
    model: str = "m"
    max_model_len: int | None = None
    seqs: int | None = None
    share: float = 0.9
    names: list[str] | None = None
    kind: "Kind | str" = None
    MAX = 3

    def __post_init__(self) -> None:
        inner: int = 4

class OtherArgs(EngineArgs):
    other: int = 5
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('it is only found')")
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(SOURCE)


def test_arguments_come_from_the_source(installed: None) -> None:
    cls = vllm.engine_arguments()
    assert cls is not None
    assert [field.name for field in fields(cls)] == [
        "model", "max_model_len", "seqs", "share", "names", "kind",
    ]  # fmt: skip


def test_one_of_another_type_is_told(installed: None) -> None:
    given = {"seqs": "abc", "share": 1, "names": ["a", 2], "kind": 3}
    problems = StrategyArgs("vllm", given).further_problems()
    assert problems is not None
    assert [str(problem) for problem in problems] == [
        "seqs='abc': must be int or null, is str",
        "names[1]=2: must be str, is int; write it in quotes",
    ]


def test_an_unknown_one_is_told_with_the_nearest(installed: None) -> None:
    given = {"max_modellen": 3, "max_model_len": 4, "zzz": 5, "sleep_level": 1}
    problems = StrategyArgs("vllm", given).further_problems()
    assert problems is not None
    assert [str(problem) for problem in problems] == [
        "max_modellen=3: the engine has no such argument; did you mean max_model_len?",
        "zzz=5: the engine has no such argument; leave it out",
    ]
    assert StrategyArgs("mock_infer").further_problems() == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seqs": "abc"}, "max_num_seqs='abc': must be int or null, is str"),
        ({"max_num_seqs": True}, "max_num_seqs=True: must be int or null, is bool"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0: must be above 0"),
        ({"gpu_memory_utilization": -0.5}, "gpu_memory_utilization=-0.5: must be above 0"),
        ({"enforce_eager": "no"}, "enforce_eager='no': must be bool or null, is str"),
    ],
)
def test_those_that_are_looked_at_are_checked_without_it(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        StrategyArgs("vllm", given)
    assert str(raised.value) == f"strategy_config.{message}"


def test_without_it_none_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    assert vllm.engine_arguments() is None
    assert StrategyArgs("vllm", {"max_modellen": 3}).further_problems() is None
