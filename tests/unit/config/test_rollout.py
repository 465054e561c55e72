"""RolloutConfig: what it derives and refuses; the shipped config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_td.config.load import load
from roll_td.config.rollout import RolloutConfig
from roll_td.config.schema import ConfigError, read

ROOT = Path(__file__).parents[3]


VLLM = {"strategy_name": "vllm", "strategy_config": {"max_model_len": 2048}}


def config(**given: Any) -> RolloutConfig:
    data = {
        "model": {"path": "my-model"},
        "data": {"train": "my.jsonl", "prompt_key": "q", "keep": {"ground_truth": "a"}},
        "rewards": {"default": {"name": "exact_match"}},
    }
    reading = read(RolloutConfig, data | given)
    if reading.value is None:
        raise ConfigError(reading.problems)
    return reading.value


def test_a_model_prompts_and_a_reward_are_enough() -> None:
    made = config()
    infer = made.actor_infer
    assert infer.device_mapping == [0] and made.reward.world_size == 1
    assert infer.strategy_args is not None and infer.strategy_args.strategy_name == "hf_infer"
    assert (made.save_steps, made.passes.pass_at) == (1, [1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rewards": {}}, "rewards: is empty: nothing says what a response is worth"),
        ({"pass_at": [2]}, "pass_at=[2]: must lie in 1 to generation.num_return_sequences=1"),
        (
            {"actor_infer": {"strategy_args": VLLM}, "scheduling": {"deterministic": False}},
            "actor_infer.strategy_args.strategy_config.max_model_len=2048: leaves a prompt of "
            "data.max_length=2048 tokens none for an answer; raise it, or lower data.max_length",
        ),
        ({"batch_size": 0}, "batch_size=0: must be a whole number of at least 1"),
        ({"model": {}}, "model: is missing; set model.path"),
        (
            {"data": {"train": "my.jsonl", "validation": "b.jsonl", "keep": {"ground_truth": "a"}}},
            "data.validation='b.jsonl': is not answered here; name the files to answer as train",
        ),
        (
            {"data": {"train": "my.jsonl", "validation_split": 0.5, "keep": {"ground_truth": "a"}}},
            "data.validation_split=0.5: would hold rows back",
        ),
        (
            {"data": {"train": [{"path": "a.jsonl"}], "keep": {"ground_truth": "a"}}},
            "data.train=[…]: has weights, and each prompt is answered once",
        ),
        (
            {"actor_infer": {"strategy_args": {"strategy_name": "fsdp2_infer"}}},
            "actor_infer.strategy_args.strategy_name='fsdp2_infer': is a strategy that can't gen",
        ),
    ],
)
def test_what_is_refused(given, message) -> None:
    with pytest.raises(ConfigError) as raised:
        config(**given)
    assert message in str(raised.value)


def test_the_shipped_config() -> None:
    path = ROOT / "configs" / "rollout" / "rollout.yaml"
    made = load(path, ["model.path=m", "data.train=my.jsonl"])
    assert isinstance(made, RolloutConfig) and made.passes.pass_at == [1, 4]
