"""Engines in real jobs."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
import yaml

from tests.dist.harness import HERE as DIST
from tests.dist.harness import Ended, roll_td_run, write_config
from tests.dist.test_rlvr import write_rlvr
from tests.vllm.conftest import ENGINE, HERE, NEEDS_VLLM

pytestmark = NEEDS_VLLM
START_S = 280
"""How long a job may take on a busy machine."""


def finish(config: Path) -> Ended:
    path = f"{DIST}:{HERE}:{HERE.parents[1]}"
    ended = roll_td_run(config, PYTHONPATH=path).finish(START_S)
    assert ended.code == 0, ended.out
    return ended


@pytest.mark.timeout(300)
def test_ten_updates_on_shared_and_disjoint_ranks(tmp_path: Path) -> None:
    vllm = {"strategy_name": "vllm", "strategy_config": ENGINE | {"max_model_len": 64}}
    roles = {
        "train": {"device_mapping": [0, 1], "strategy_args": {"strategy_name": "fsdp2_train"}},
        "shared": {"device_mapping": [1], "strategy_args": vllm},
        "apart": {"device_mapping": [2, 3], "num_gpus_per_worker": 2, "strategy_args": vllm},
    }
    for role in roles.values():
        role["worker_cls"] = "vllm_scenarios.Role"
    config = write_config(
        tmp_path,
        "vllm_scenarios.TenUpdates",
        roles=roles,
        model={"config": {"model_type": "qwen3"}},  # the scenario makes its own
    )
    assert "TEN UPDATES CHECKED" in finish(config).out


@pytest.mark.timeout(300)
def test_grpo_learns(tmp_path: Path) -> None:
    """More digits in the answers, as with hf_infer; offloaded while the other role works."""
    generation = {"num_return_sequences": 8, "max_new_tokens": 6}
    config = write_rlvr(
        tmp_path,
        algorithm={"advantage": {"name": "grpo"}},
        batch_size=8,
        mini_batches=1,
        max_refills=0,
        max_steps=25,
        save_steps=None,
        eval_steps=None,
        offload=True,
        actor_train={"device_mapping": [0], "training": {"learning_rate": 3.0e-3}},
        actor_infer={
            "strategy_args": {"strategy_name": "vllm", "strategy_config": ENGINE},
            "generation": generation,
        },
    )
    given = yaml.safe_load(config.read_text())
    given["model"]["config"] |= {"head_dim": 32, "max_position_embeddings": 64}
    config.write_text(yaml.safe_dump(given))
    finish(config)
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    assert len(rewards) == 25
    assert mean(rewards[:3]) < 0.2 and mean(rewards[-3:]) > 0.6, rewards
