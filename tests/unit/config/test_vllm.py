from __future__ import annotations

import sys
from pathlib import Path

import pytest

from roll_td.config import vllm
from roll_td.config.strategies import StrategyArgs

SOURCE = """
from dataclasses import dataclass

raise ImportError("it is only read")

@dataclass
class EngineArgs:
    model: str = "m"
    max_model_len: int | None = None
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


def test_names_come_from_the_source(installed: None) -> None:
    assert vllm.engine_arguments() == {"model", "max_model_len"}


def test_an_unknown_one_is_told_with_the_nearest(installed: None) -> None:
    given = {"max_modellen": 3, "max_model_len": 4, "zzz": 5, "sleep_level": 1}
    problems = StrategyArgs("vllm", given).further_problems()
    assert problems is not None
    assert [str(problem) for problem in problems] == [
        "max_modellen=3: the engine has no such argument; did you mean max_model_len?",
        "zzz=5: the engine has no such argument; leave it out",
    ]
    assert StrategyArgs("mock_infer").further_problems() == []


def test_without_it_none_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    assert vllm.engine_arguments() is None
    assert StrategyArgs("vllm", {"max_modellen": 3}).further_problems() is None
