"""Functions of the user's own: what is wrong with them is told before a rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_td.config.distill import DistillConfig
from roll_td.config.dpo import DPOConfig
from roll_td.config.rlvr import RLVRConfig
from roll_td.config.rollout import RolloutConfig
from roll_td.config.schema import read

MODULE = """
LIMIT = 3

def brief(response, ground_truth, *, most=9):
    return 1.0

def hard(response, level):
    return 1.0

def loss(log_probs, advantages, *, scale=1.0):
    return log_probs
"""
MODEL = {"path": "some/model"}
RLVR = {
    "model": MODEL,
    "data": {"train": "a.jsonl", "prompt_key": "p", "keep": {"ground_truth": "x"}},
    "actor_infer": {"generation": {"num_return_sequences": 2}},
    "max_steps": 1,
}
REWARD = {"rewards": {"default": {"name": "mine.brief"}}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def told(cls: type, **given: Any) -> list[str]:
    """What is wrong with functions in a config."""
    reading = read(cls, given)
    assert reading.problems == []
    found = [str(problem) for problem in reading.value.outside_problems()]
    return [text for text in found if "mine" in text or "nowhere" in text]


def test_right_ones_are_no_problem() -> None:
    loss = {"name": "mine.loss", "settings": {"scale": 2.0}}
    assert told(RLVRConfig, **RLVR, **REWARD, algorithm={"policy_loss": loss}) == []


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"name": "nowhere.f"}, ".name='nowhere.f': there is no module nowhere on the Python path"),
        ({"name": "mine.bref"}, ".name='mine.bref': module mine has no bref; did you mean mine.br"),
        ({"name": "mine.LIMIT"}, ".name='mine.LIMIT': is a int; name a function"),
        (
            {"name": "mine.brief", "settings": {"mots": 1}},
            ".settings: settings ['mots'] do not fit mine.brief(response, ground_truth, *, most=9)",
        ),
        (
            {"name": "mine.hard"},
            ": mine.hard needs columns that rows don't have: level; keep them: data.keep: {level",
        ),
    ],
)
def test_a_reward_that_cannot_be_called(reward: dict[str, Any], message: str) -> None:
    (text,) = told(RLVRConfig, **RLVR, rewards={"default": reward})
    assert text.startswith("rewards.default" + message)


def test_it_is_told_wherever_functions_are_named() -> None:
    wrong = {"name": "mine.f"}
    several = {"math": [{"name": "mine.brief"}, wrong], "default": wrong}
    kept = {"ground_truth": "x", "domain": "y"}
    given = RLVR | {"data": {"train": "a.jsonl", "prompt_key": "p", "keep": kept}}
    both = {"advantage": wrong, "policy_loss": wrong}
    texts = told(RLVRConfig, **given, rewards=several, algorithm=both)
    assert sorted(text.partition("=")[0] for text in texts) == [
        "algorithm.advantage.name",
        "algorithm.policy_loss.name",
        "rewards.default.name",
        "rewards.math.1.name",
    ]
    prompts = {"train": "b.jsonl", "prompt_key": "p"}
    answers = {"train": "a.jsonl", "prompt_key": "p", "response_key": "r"}
    pairs = {"train": "a.jsonl", "prompt_key": "p", "chosen_key": "c", "rejected_key": "r"}
    (said,) = told(DPOConfig, model=MODEL, data=pairs, loss=wrong)
    assert said.startswith("loss.name='mine.f': module mine has no f")
    hard = {"default": {"name": "mine.hard"}}
    both = {"model": MODEL, "data": answers, "teacher": {"model": MODEL}}
    divergence, reward = told(
        DistillConfig, **both, divergence=wrong, prompts=prompts, rewards=hard
    )
    assert divergence.startswith("divergence.name='mine.f'")
    assert reward.startswith("rewards.default: mine.hard needs columns")
    (said,) = told(RolloutConfig, model=MODEL, data=prompts, rewards=hard)
    assert said.startswith("rewards.default: mine.hard needs columns")
