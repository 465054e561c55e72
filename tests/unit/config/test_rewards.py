"""Rewards in a config: what is refused before a rank starts."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from roll_td.config.classes import import_object
from roll_td.config.rewards import (
    REWARDS,
    RewardArgs,
    Rewards,
    RewardWorkerConfig,
    check_domains,
    reward_problems,
    tag_of,
)
from roll_td.config.schema import ConfigError, read
from roll_td.config.signatures import check_settings, columns_of

COLUMNS = {"response", "prompt", "ground_truth", "domain"}


@dataclass
class Config:
    """A pipeline's, as far as rewards go."""

    rewards: Rewards = field(default_factory=dict)
    reward: RewardWorkerConfig = field(default_factory=RewardWorkerConfig)


def loaded(rewards: dict[str, Any]) -> Rewards:
    config = read(Config, {"rewards": rewards})
    if config.problems:
        raise ConfigError(config.problems)
    assert config.value is not None
    return config.value.rewards


ENDPOINT = {"url": "http://a/v1", "model": "m", "template": "Rate {response} by {rubric}"}
NEEDED = {"format": {"pattern": "a"}, "llm_judge": ENDPOINT}
"""Settings that have no default."""


@pytest.mark.parametrize("name", REWARDS)
def test_the_table_says_what_its_functions_take(name: str) -> None:
    row = REWARDS[name]
    function = import_object(row.path)
    assert row.columns == columns_of(function)
    arguments = RewardArgs(name, NEEDED.get(name, {})).arguments
    check_settings(function, arguments)
    assert set(arguments) == {
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    if row.gold_check is not None:
        check = import_object(row.gold_check)
        assert columns_of(check) == row.gold_columns
        check_settings(check, arguments)
    if row.start_check is not None:
        check_settings(import_object(row.start_check), arguments)


def test_a_domain_has_one_function_or_several() -> None:
    rewards = loaded(
        {
            "sums": {"name": "exact_match", "settings": {"after": "#"}, "on_error": "skip"},
            "math": [
                {"name": "math_rule"},
                {"name": "format", "weight": 0.2, "settings": {"pattern": "<think>.*"}},
            ],
            "default": {"name": "my.own_reward", "settings": {"any": 1}, "timeout_s": 10},
        }
    )
    assert reward_problems(rewards, COLUMNS) == []
    sums, math, default = rewards["sums"], rewards["math"], rewards["default"]
    assert isinstance(sums, RewardArgs) and isinstance(default, RewardArgs)
    assert sums.arguments == {"after": "#", "part": "text"} and sums.on_error == "skip"
    assert isinstance(math, list) and [own.weight for own in math] == [1.0, 0.2]
    assert [own.timeout_s for own in (sums, *math, default)] == [None, 5.0, None, 10.0]
    assert default.label == "own_reward" and default.path == "my.own_reward"


def judge(**settings: Any) -> dict[str, Any]:
    return {"name": "llm_judge", "settings": ENDPOINT | settings}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"name": "math_rul"}, "is none of math_rule, .*; did you mean math_rule"),
        ({"name": "exact_match", "settings": {"afer": "#"}}, "settings.afer.*did you mean after"),
        ({"name": "exact_match", "settings": {"after": ""}}, "must not be empty"),
        ({"name": "exact_match", "settings": {"part": "word"}}, "'text', 'last_integer'"),
        ({"name": "format"}, "settings.pattern: is missing"),
        ({"name": "format", "settings": {"pattern": "("}}, "is no regular expression: missing"),
        ({"name": "exact_match", "weight": float("nan")}, "weight=nan: must be a finite number"),
        ({"name": "exact_match", "on_error": "ignore"}, "'fail', 'skip', 'zero'"),
        ({"name": "exact_match", "timeout_s": 0}, "timeout_s=0.0: must be a finite number above 0"),
        ({"name": "math_rule", "timeout_s": float("inf")}, "must be a finite number above 0"),
        ({"name": "code", "settings": {"limits": {"time_s": 0}}}, "time_s=0.0: must be a finite"),
        ({"name": "code", "settings": {"limits": {"processes": 0}}}, "must be at least 1"),
        ({"name": "code", "settings": {"limits": {"isolation": "none"}}}, "'namespaces', 'limits'"),
        ({"name": "multiple_choice", "settings": {"letters": 1}}, "must lie in 2 to 26"),
        ({"name": "llm_judge"}, "template: is missing"),
        (judge(url=None), "url: is missing: nobody is asked; set url and model"),
        (judge(model=None), "model: is missing; set its name"),
        (
            judge(role="strict", model=None),
            "url='http://a/v1': is of an endpoint, and role='strict'",
        ),
        (
            judge(role="strict", url=None),
            "model='m': is of an endpoint, and role='strict' is asked",
        ),
        (judge(role="a", url=None, model=None, wait_s=1), "wait_s=1.0: is of an endpoint"),
        (judge(url="host:80"), r"url='host:80': must begin with http\(s\)://"),
        (judge(template="{response"), "is no template"),
        (judge(template="{0} {response}"), "has '0' in braces, which names no column"),
        (judge(template="Rate this"), r"must have \{response\} in it"),
        (judge(pattern="score"), "must have 1 group in parentheses"),
        (judge(lowest=10), "highest=10.0: must be above lowest=10.0"),
        (judge(attempts=0), "attempts=0: must be at least 1"),
        ({}, "name: is missing"),
        ([{"name": "exact_match"}, {"name": "format"}], r"x\[1\].settings.pattern: is missing"),
        ("exact_match", "rewards.x"),
    ],
)
def test_a_wrong_reward_is_named(args: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded({"x": args})


@pytest.mark.parametrize(
    ("rewards", "columns", "message"),
    [
        ({}, COLUMNS, "is empty: nothing says what a response is worth; name one"),
        ({"math": []}, COLUMNS, "math: is empty: nothing says"),
        (
            {"math": {"name": "math_rule"}, "default": {"name": "my.own"}},
            COLUMNS - {"domain"},
            "math: is the reward of a domain, and rows have no column domain",
        ),
        (
            {"default": {"name": "exact_match"}},
            {"response"},
            "default: exact_match needs columns that rows don't have: ground_truth; keep them",
        ),
        (
            {"default": judge()},
            COLUMNS,
            "default: llm_judge needs columns that rows don't have: rubric; keep them: data.keep",
        ),
        (
            {"default": [{"name": "a.own"}, {"name": "b.own"}]},
            COLUMNS,
            "default.name='own': is there twice",
        ),
    ],
)
def test_c12_a_run_has_a_reward_for_what_it_learns_from(  # C12
    rewards: dict[str, Any], columns: set[str], message: str
) -> None:
    (problem,) = reward_problems(loaded(rewards), columns)
    assert message in str(problem)


def test_c12_the_domains_of_a_data_set_are_checked_at_the_start() -> None:  # C12
    rewards = loaded({"math": {"name": "math_rule"}, "sums": {"name": "exact_match"}})
    check_domains(rewards, ["math", "sums", "math"])
    with pytest.raises(ConfigError) as caught:
        check_domains(rewards, ["math", "code", "code", None])
    first, second = str(caught.value).splitlines()
    assert "domain='code' has no reward: there are math, sums; add it" in first
    assert "domain=None has no reward" in second
    assert tag_of({**rewards, "default": 1}, "code") == "default"


def test_the_role_has_one_worker_unless_told_otherwise() -> None:
    config = read(Config, {}).value
    assert config is not None
    assert config.reward.world_size == 1 and config.reward.device_mapping is None
    assert RewardWorkerConfig(world_size=3).world_size == 3
    assert RewardWorkerConfig(device_mapping="0-1").world_size == 2
    with pytest.raises(ConfigError, match="processes=0: must be at least 1"):
        RewardWorkerConfig(processes=0)


def test_neither_config_nor_pool_need_what_verifies() -> None:
    code = (
        "import sys, roll_td.config.rewards, roll_td.rewards.judge\n"
        "bad = {'torch', 'sympy', 'math_verify', 'numpy'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
