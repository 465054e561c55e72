"""The shipped config for a real model, which no test has the time to run."""

from pathlib import Path

import pytest

from roll_td.cli import check

ROOT = Path(__file__).parents[3]


def test_the_real_models_config_lacks_nothing_but_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    problems = check("configs/rlvr/smollm2.yaml", ["model.path=/nowhere.gguf"]).problems
    assert [problem.key for problem in problems] == ["model.path"]
    assert "is not there" in problems[0].rule
