"""Training that answers prompts too: what its config derives and refuses."""

from __future__ import annotations

from typing import Any

import pytest

from roll_td.config.device_memory import memory_by_device
from roll_td.config.distill import DistillConfig
from roll_td.config.dpo import DPOConfig
from roll_td.config.schema import ConfigError, read
from roll_td.config.sft import SFTConfig
from tests.unit.config.test_judges import SIZES

MODEL = {"config": SIZES, "tokenizer": "my-tokenizer"}
GIVEN: dict[type, dict[str, Any]] = {
    SFTConfig: {"data": {"train": "a.jsonl"}},
    DPOConfig: {"data": {"train": "a.jsonl", "chosen_key": "c", "rejected_key": "r"}},
    DistillConfig: {"data": {"train": "a.jsonl"}, "teacher": {"model": MODEL}},
}
PROMPTS = {"train": "b.jsonl", "prompt_key": "q", "keep": {"ground_truth": "a"}, "max_length": 50}
TRIED = {
    "prompts": PROMPTS,
    "rewards": {"default": {"name": "exact_match"}},
    "validation": {"generation": {"num_return_sequences": 4, "max_new_tokens": 7}, "pass_at": [4]},
}


def config(cls: type = SFTConfig, **given: Any) -> Any:
    reading = read(cls, {"model": MODEL} | GIVEN[cls] | given)
    if reading.value is None:
        raise ConfigError(reading.problems)
    return reading.value


@pytest.mark.parametrize("cls", GIVEN)
def test_roles_that_answer_and_score_stand_beside_the_one_that_trains(cls: type) -> None:
    plain = config(cls)
    assert plain.actor_infer is None and plain.reward is None and plain.num_cpu_ranks_per_node == 1
    trained = "student" if cls is DistillConfig else "actor_train"
    made = config(cls, **TRIED, **{trained: {"device_mapping": 1}})
    infer = made.actor_infer
    assert infer.device_mapping == [1] and infer.strategy_args.strategy_name == "hf_infer"
    assert infer.generation.max_new_tokens == 7 and made.reward.world_size == 1
    assert made.num_cpu_ranks_per_node == 2 and made.validation.pass_at == [4]
    apart = config(cls, **TRIED, actor_infer={"device_mapping": "2-3", "name": "tried"})
    assert (apart.actor_infer.device_mapping, apart.actor_infer.name) == ([2, 3], "tried")


def test_their_answers_make_no_row_longer_that_is_learnt() -> None:
    """The memory of the role that trains stays what it is; that of the other goes by prompts."""
    (plain,), _ = memory_by_device(config())
    prompts = PROMPTS | {"max_length": 5000}
    (tried,), unknown = memory_by_device(config(**TRIED | {"prompts": prompts}))
    (short,), _ = memory_by_device(config(**TRIED))
    assert not unknown and tried.roles["actor_train"] == plain.roles["actor_train"]
    assert tried.roles["actor_infer"].kv_cache_mb > 50 * short.roles["actor_infer"].kv_cache_mb


@pytest.mark.parametrize("cls", GIVEN)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": None}, "rewards={…}: has nothing to do without prompts; set prompts, or drop"),
        ({"rewards": {}}, "rewards: is empty: nothing says what a response is worth"),
        (
            {"prompts": PROMPTS | {"keep": {}}},
            "exact_match needs columns that rows don't have: gro",
        ),
        (
            {"prompts": PROMPTS | {"validation_split": 0.1}},
            "prompts.validation_split=0.1: would hold rows back",
        ),
        ({"prompts": PROMPTS | {"truncation": "right"}}, "prompts.truncation=right: would cut"),
        (
            {"validation": {"pass_at": [2]}},
            "validation.pass_at=[2]: must lie in 1 to generation.num",
        ),
        (
            {"actor_infer": {"generation": {"max_new_tokens": 9}}},
            "actor_infer.generation={…}: says it beside validation.generation, which counts",
        ),
        (
            {"actor_infer": {"strategy_args": {"strategy_name": "fsdp2_infer"}}},
            "actor_infer.strategy_args.strategy_name='fsdp2_infer': is a strategy that can't gen",
        ),
        ({"judges": {"j": {}}}, "judges.j={…}: is given and no reward asks it"),
    ],
)
def test_what_is_refused(cls: type, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(cls, **TRIED | given)
    assert message in str(raised.value)


def test_prompts_that_are_not_there_are_told_before_a_rank_starts() -> None:
    told = [str(problem) for problem in config(**TRIED).outside_problems()]
    assert any(line.startswith("prompts.train='b.jsonl': there is no such file") for line in told)
