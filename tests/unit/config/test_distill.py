"""DistillConfig: what it derives and refuses; the shipped configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_td.config.distill import DistillConfig
from roll_td.config.load import load
from roll_td.config.schema import ConfigError, read

ROOT = Path(__file__).parents[3]
TEACHER = {"model": {"path": "large"}}


def config(**given: Any) -> DistillConfig:
    data = {"model": {"path": "small"}, "data": {"train": "my.jsonl"}, "teacher": TEACHER}
    reading = read(DistillConfig, data | given)
    if reading.value is None:
        raise ConfigError(reading.problems)
    return reading.value


def test_two_models_and_data_are_enough() -> None:
    made = config(student={"device_mapping": "0-1"})
    assert made.teacher.device_mapping == [0, 1] and made.top_k is None
    args = made.student.strategy_args, made.teacher.strategy_args
    assert [a.strategy_name for a in args if a] == ["fsdp2_train", "fsdp2_infer"]
    apart = config(top_k=8, teacher=TEACHER | {"device_mapping": "1-3"})
    assert apart.num_gpus_per_node == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"teacher": {}}, "teacher.model: is missing: it would be the student itself"),
        ({"teacher": TEACHER | {"device_mapping": [1]}}, "teacher.device_mapping=[1]: are not"),
        (
            {"teacher": TEACHER | {"strategy_args": {"strategy_name": "hf_infer"}}},
            "teacher.strategy_args.strategy_name='hf_infer': can't step together with student",
        ),
        ({"top_k": 0}, "top_k=0: must be a whole number of at least 1"),
        ({"temperature": 0}, "temperature=0.0: must be above 0"),
        ({"cross_entropy_share": 1}, "cross_entropy_share=1.0: must be at least 0 and below 1"),
        ({"divergence": {"name": "foward_kl"}}, "did you mean forward_kl?"),
        ({"divergence": {"name": "jsd", "settings": {"skew": 0.1}}}, "divergence.settings.skew"),
        ({"learn_from": "prompts"}, "learn_from='prompts'"),
        (
            {"data": {"train": "a.jsonl", "prompt_key": "q"}},
            "data.response_key: is missing: there is nothing to learn from",
        ),
        (
            {"student": {"strategy_args": {"strategy_name": "fsdp2_infer"}}},
            "student.strategy_args.strategy_name='fsdp2_infer': is a strategy that can't train",
        ),
    ],
)
def test_what_is_refused(given, message) -> None:
    with pytest.raises(ConfigError) as raised:
        config(**given)
    assert message in str(raised.value)


def test_a_teacher_that_is_not_there_is_told_before_the_start() -> None:
    made = config(teacher={"model": {"path": "./nowhere"}})
    keys = [problem.key for problem in made.outside_problems()]
    assert "teacher.model.path" in keys


def test_the_shipped_configs() -> None:
    tiny = load(ROOT / "configs" / "distill" / "tiny.yaml", [])
    assert isinstance(tiny, DistillConfig)
    given = ["model.path=m", "teacher.model.path=t", "data.train=my.jsonl"]
    made = load(ROOT / "configs" / "distill" / "distill.yaml", given)
    assert isinstance(made, DistillConfig)
