"""Roles that judge: what a config may ask of them."""

from __future__ import annotations

from typing import Any

import pytest

from roll_td.config.device_memory import memory_by_device
from roll_td.config.judges import JudgeConfig
from roll_td.config.rlvr import RLVRConfig
from roll_td.config.rollout import RolloutConfig
from roll_td.config.schema import ConfigError, read

ASKS: dict[str, Any] = {"role": "strict", "template": "Is {response} good? {ground_truth}"}
SIZES = {
    "model_type": "qwen3", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64,
}  # fmt: skip
GIVEN: dict[type, dict[str, Any]] = {
    RolloutConfig: {},
    RLVRConfig: {
        "max_steps": 1,
        "algorithm": {"advantage": {"name": "reinforce"}},
        "actor_train": {"device_mapping": "0-1"},
    },
}


def config(cls: type = RLVRConfig, settings: dict[str, Any] = ASKS, **given: Any) -> Any:
    data = GIVEN[cls] | {
        "model": {"config": SIZES, "tokenizer": "my-tokenizer"},
        "data": {"train": "my.jsonl", "prompt_key": "q", "keep": {"ground_truth": "a"}},
        "rewards": {"default": {"name": "llm_judge", "settings": settings}},
        "judges": {"strict": {"max_length": 500, "generation": {"max_new_tokens": 30}}},
    }
    reading = read(cls, data | given)
    if reading.value is None:
        raise ConfigError(reading.problems)
    return reading.value


@pytest.mark.parametrize("cls", [RLVRConfig, RolloutConfig])
def test_a_judge_stands_beside_the_role_that_works_for_it(cls: type) -> None:
    role = config(cls).judges["strict"]
    assert (role.name, role.worker_cls) == (
        "judge_strict",
        "roll_td.workers.generation.GenerationWorker",
    )
    assert role.device_mapping == ([0, 1] if cls is RLVRConfig else [0])
    assert role.strategy_args.strategy_name == "hf_infer"
    alone = config(cls, judges={"strict": {"device_mapping": 3, "name": "j"}}).judges["strict"]
    assert (alone.name, alone.device_mapping) == ("j", [3])


@pytest.mark.parametrize("cls", [RLVRConfig, RolloutConfig])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"judges": {}},
            "rewards.default.settings.role='strict': is none of judges: there are none; add it",
        ),
        (
            {"judges": {"strict": {}, "mild": {}}},
            "judges.mild={…}: is given and no reward asks it; name it in a reward llm_judge",
        ),
        (
            {"judges": {"strict": {"strategy_args": {"strategy_name": "fsdp2_infer"}}}},
            "judges.strict.strategy_args.strategy_name='fsdp2_infer': is a strategy that can't gen",
        ),
        (
            {"judges": {"strict": {"generation": {"num_return_sequences": 3}}}},
            "judges.strict.generation.num_return_sequences=3: must be 1: a judge says one thing",
        ),
        ({"judges": {"strict": {"max_length": 0}}}, "judges.strict.max_length=0: must be at least"),
        (
            {"settings": ASKS | {"url": "http://a"}},
            "settings.url='http://a': is of an endpoint, and role='strict' is asked; drop one",
        ),
        (
            {"settings": ASKS | {"template": "{response}{rubric}"}},
            "rewards.default: llm_judge needs columns that rows don't have: rubric; keep them",
        ),
    ],
)
def test_what_is_refused(cls: type, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(cls, **given)
    assert message in str(raised.value)


def test_the_memory_of_a_judge_is_that_of_its_own_questions() -> None:
    """And its replies make nobody else's rows longer."""
    own, short = {"max_length": 100_000, "generation": {"max_new_tokens": 30}}, {"max_length": 10}
    found = {}
    for name, judge in (("long", own), ("short", short)):
        (taken,), unknown = memory_by_device(config(judges={"strict": judge}))
        assert not unknown and taken.devices == (0, 1)
        found[name] = taken.roles
    assert set(found["long"]) == {"actor_train", "actor_infer", "judge_strict"}
    for name in ("actor_train", "actor_infer"):
        assert found["long"][name] == found["short"][name]
    assert (
        found["long"]["judge_strict"].kv_cache_mb > 50 * found["short"]["judge_strict"].kv_cache_mb
    )
    assert JudgeConfig().max_length == 4096
