"""OnPolicyDistillConfig: what it derives and refuses; the shipped config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_td.config.load import load
from roll_td.config.onpolicy_distill import OnPolicyDistillConfig
from roll_td.config.schema import ConfigError, read

ROOT = Path(__file__).parents[3]
TEACHER = {"model": {"path": "its-model"}}
REWARDS = {"rewards": {"default": {"name": "exact_match"}}}


def config(**given: Any) -> OnPolicyDistillConfig:
    data = {
        "model": {"path": "my-model"},
        "data": {
            "train": "my.jsonl",
            "prompt_key": "q",
            "keep": {"ground_truth": "a", "domain": "d"},
        },
        "teachers": {"default": TEACHER},
        "max_steps": 10,
    }
    reading = read(OnPolicyDistillConfig, data | given)
    if reading.value is None:
        raise ConfigError(reading.problems)
    return reading.value


def test_a_teacher_and_prompts_are_enough() -> None:
    made = config(actor_train={"device_mapping": "0-1"})
    assert made.reward is None and made.compares_old
    (teacher,) = made.teachers.values()
    assert teacher.strategy_args is not None
    assert teacher.strategy_args.strategy_name == "fsdp2_infer"
    assert (teacher.name, teacher.device_mapping) == ("teacher_default", [0, 1])
    assert (made.num_gpus_per_node, made.num_cpu_ranks_per_node) == (2, 1)


def test_rewards_bring_their_role_and_teachers_may_have_devices_of_their_own() -> None:
    teachers = {"maths": TEACHER | {"device_mapping": [1]}, "code": TEACHER | {"name": "coder"}}
    group = {"actor_infer": {"generation": {"num_return_sequences": 4}}}
    made = config(teachers=teachers, **REWARDS, **group)
    assert made.reward is not None and made.num_cpu_ranks_per_node == 2
    places = {role.name: role.device_mapping for role in made.teachers.values()}
    assert places == {"teacher_maths": [1], "coder": [0]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"teachers": {}}, "teachers: is empty: nobody says what a token is worth; name one"),
        ({"teachers": {"default": {}}}, "teachers.default.model: is missing: it would be the stu"),
        (
            {"teachers": {"maths": TEACHER}, "teacher_key": "tag"},
            "teacher_key='tag': is not kept, and says which rows maths judge; keep it (data.keep",
        ),
        ({"teacher_coefficient": 0}, "teacher_coefficient=0.0: must be above 0"),
        ({"teacher_gamma": 1.5}, "teacher_gamma=1.5: must lie in 0 to 1"),
        ({"algorithm": {"advantage": {"name": "gae"}}}, "critic: needs rewards, and there are no"),
        (
            {"algorithm": {"scores": {"drop_without_signal": True}}},
            "algorithm.scores.drop_without_signal: needs rewards, and there are none",
        ),
        (
            {"algorithm": {"advantage": {"name": "gigpo"}}},
            "compares states of an environment, and these answers have none",
        ),
        (REWARDS, "algorithm.advantage.name='grpo': compares the responses to one prompt"),
        (
            {"algorithm": {"importance_weights": {}}, "actor_infer": {"generation": {"top_k": 4}}},
            "algorithm.importance_weights={…}: needs the engine's log-probs over all tokens",
        ),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(**given)
    assert message in str(raised.value)


def test_each_row_has_to_have_a_teacher() -> None:
    made = config(teachers={"maths": TEACHER})
    made.check_teachers(["maths", "maths"])
    with pytest.raises(ConfigError) as raised:
        made.check_teachers(["maths", "code", "law", "code"])
    told = str(raised.value).splitlines()
    assert len(told) == 2 and "domain='code' has no teacher: there are maths" in told[0]
    config(teachers={"maths": TEACHER, "default": TEACHER}).check_teachers(["maths", "law", None])


def test_files_of_the_teachers_are_looked_for() -> None:
    made = config(teachers={"default": {"model": {"path": "./not-here"}}})
    keys = [problem.key for problem in made.outside_problems()]
    assert "teachers.default.model.path" in keys


def test_the_shipped_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    made = load(ROOT / "configs" / "onpolicy_distill" / "tiny.yaml", [])
    assert isinstance(made, OnPolicyDistillConfig)
    problems = made.outside_problems()
    assert {problem.key for problem in problems} <= {"teachers.default.model.path"}
