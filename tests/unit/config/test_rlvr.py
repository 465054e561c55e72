"""RLVRConfig: what it derives and refuses; the shipped config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_td.config.load import load
from roll_td.config.rlvr import RLVRConfig
from roll_td.config.schema import ConfigError, read

ROOT = Path(__file__).parents[3]
GROUP = {"generation": {"num_return_sequences": 4}}
GAE = {"algorithm": {"advantage": {"name": "gae"}}}


def config(**given: Any) -> RLVRConfig:
    data = {
        "model": {"path": "my-model"},
        "data": {"train": "my.jsonl", "prompt_key": "q", "keep": {"ground_truth": "a"}},
        "rewards": {"default": {"name": "exact_match"}},
        "actor_infer": GROUP,
        "max_steps": 10,
    }
    reading = read(RLVRConfig, data | given)
    if reading.value is None:
        raise ConfigError(reading.problems)
    return reading.value


def test_a_model_prompts_and_a_reward_are_enough() -> None:
    made = config()
    train, infer, reward = made.actor_train, made.actor_infer, made.reward
    assert (train.device_mapping, infer.device_mapping, reward.world_size) == ([0], [0], 1)
    assert made.reference is None
    names = [role.strategy_args.strategy_name for role in (train, infer) if role.strategy_args]
    assert names == ["fsdp2_train", "hf_infer"] and reward.strategy_args is None
    assert (made.num_gpus_per_node, made.num_cpu_ranks_per_node) == (1, 2)


def test_roles_share_the_devices_of_actor_train_unless_told() -> None:
    made = config(
        actor_train={"device_mapping": "0-2"},
        algorithm={"kl": {"coefficient": 0.1}},
        actor_infer=GROUP | {"device_mapping": "3"},
    )
    assert made.reference is not None and made.reference.strategy_args is not None
    assert made.reference.device_mapping == [0, 1, 2] and made.actor_infer.device_mapping == [3]
    assert made.reference.strategy_args.strategy_name == "fsdp2_infer"
    assert made.num_gpus_per_node == 4


def test_an_advantage_brings_its_critic() -> None:
    made = config(actor_train={"device_mapping": "0-2"}, **GAE)
    assert made.critic is not None and made.critic.strategy_args is not None
    assert made.critic.device_mapping == [0, 1, 2]
    assert made.critic.strategy_args.strategy_name == "fsdp2_train"
    assert made.critic.worker_cls == "roll_td.workers.critic.CriticWorker"
    own = {"algorithm": {"advantage": {"name": "my_module.mine"}}, "critic": {"world_size": 2}}
    assert config(**own).critic is not None, "a function of the user's own may want one"


def test_in_the_warm_up_of_the_critic_the_schedule_of_the_actor_stands() -> None:
    made = config(mini_batches=3, critic_warmup_steps=4, critic={"device_mapping": [1]}, **GAE)
    assert [made.optimizer_steps(role) for role in ("actor_train", "critic")] == [18, 30]


def test_a_schedule_ends_with_the_last_optimiser_step() -> None:
    assert config(mini_batches=3, ppo_epochs=2).optimizer_steps("actor_train") == 60


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, False),
        ({"mini_batches": 2}, True),
        ({"ppo_epochs": 2}, True),
        ({"algorithm": {"kl": {"coefficient": 0.1}}}, False),
        ({"algorithm": {"kl": {"coefficient": 0.1, "place": "reward"}}}, True),
        ({"algorithm": {"importance_filter": {"low": 0.5, "high": 2}}}, True),
        ({"algorithm": {"importance_weights": {}}}, False),
    ],
)
def test_old_log_probs_are_computed_only_where_an_update_can_not_tell_them(given, wanted) -> None:
    assert config(**given).compares_old is wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rewards": {}}, "rewards: is empty: nothing says what a response is worth"),  # C12
        ({"rewards": {"maths": {"name": "exact_match"}}}, "rewards.maths: is the reward of a dom"),
        ({"rewards": {"default": {"name": "exactmatch"}}}, "did you mean exact_match?"),
        ({"model": {}}, "model: is missing; set model.path"),
        ({"max_steps": 0}, "max_steps=0: must be a whole number of at least 1"),
        ({"mini_batches": 0}, "mini_batches=0: must be"),
        (
            {"mini_batches": 9, "batch_size": 2},
            "mini_batches=9: is more than the 8 answers of a step; take fewer",
        ),
        (
            {"actor_infer": {"generation": {"num_return_sequences": 4, "temperature": 0}}},
            "algorithm.advantage.name='grpo': compares the responses to one prompt, and with temp",
        ),
        ({"max_refills": 1}, "max_refills=1: has nothing to do"),
        ({"reference": {}}, "reference={…}: is given and nothing asks it; set algorithm.kl"),
        ({"actor_infer": {}}, "algorithm.advantage.name='grpo': compares the responses"),
        (
            {"algorithm": {"advantage": {"name": "gigpo"}}},
            "algorithm.advantage.name=gigpo: compares states of an environment, and these answers",
        ),
        ({"critic": {}}, "critic={…}: is given and advantage grpo does not ask it; drop it, or"),
        ({"critic_warmup_steps": 1}, "critic_warmup_steps=1: has nothing to do: advantage grpo"),
        ({"algorithm": {"value_clip": 0.2}}, "algorithm.value_clip=0.2: has nothing to do"),
        (GAE | {"critic_warmup_steps": 10}, "critic_warmup_steps=10: must be at least 0 and below"),
        (
            GAE | {"critic": {"strategy_args": {"strategy_name": "fsdp2_infer"}}},
            "critic.strategy_args.strategy_name='fsdp2_infer': is a strategy that can't train",
        ),
        ({"reward": None}, "reward=null: leaves nobody to compute rewards"),
        (
            {"validation": {"pass_at": [2]}},
            "validation.pass_at=[2]: must lie in 1 to generation.num_return_sequences=1",
        ),
        (
            {
                "algorithm": {"importance_weights": {}},
                "actor_infer": {"generation": {"num_return_sequences": 4, "top_p": 0.9}},
            },
            "algorithm.importance_weights={…}: needs the engine's log-probs over all tokens",  # F16
        ),
        (
            {"actor_train": {"strategy_args": {"strategy_name": "hf_infer"}}},
            "actor_train.strategy_args.strategy_name='hf_infer': is a strategy that can't train",
        ),
        (
            {"actor_infer": GROUP | {"strategy_args": {"strategy_name": "fsdp2_infer"}}},
            "actor_infer.strategy_args.strategy_name='fsdp2_infer': is a strategy that can't gen",
        ),
    ],
)
def test_what_is_refused(given, message) -> None:
    with pytest.raises(ConfigError) as raised:
        config(**given)
    assert message in str(raised.value)


def far(log_probs, ref_log_probs, response_mask):
    """For the test below."""


def worth(token_level_rewards, values):
    """For the test below."""


def test_own_functions_that_take_what_nobody_computes() -> None:
    def problems(**given: Any) -> list[str]:
        own = {
            "policy_loss": {"name": f"{__name__}.far"},
            "advantage": {"name": f"{__name__}.worth"},
        }
        made = config(**given | {"algorithm": own | given.get("algorithm", {})})
        return [str(p) for p in made.outside_problems() if p.key.startswith("algorithm")]

    advantage, loss = problems()
    assert "far': needs ref_log_probs, which no role computes; set algorithm.kl" in loss
    assert "worth': needs values, which no role computes; set algorithm.advantage" in advantage
    assert problems(algorithm={"kl": {"coefficient": 0.1}}, critic={}) == []


def test_the_quick_start() -> None:
    made = load(ROOT / "configs" / "rlvr" / "quickstart.yaml", [])
    assert isinstance(made, RLVRConfig)
    assert made.actor_infer.device_mapping == made.actor_train.device_mapping == [0, 1]
    assert made.batch_size * made.actor_infer.generation.num_return_sequences == 256
