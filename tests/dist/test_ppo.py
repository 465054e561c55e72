"""PPO with a critic in real jobs: on ranks of its own it learns while the policy does."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from roll_td.report.spans import read_starts
from tests.dist.harness import roll_td_run
from tests.dist.test_replay import replayed_without_difference
from tests.dist.test_rlvr import STEPS, write_rlvr
from tests.dist.test_sft import START_S, finish, finish_killed, kill_somewhere, result

ROUNDS = int(os.environ.get("ROLL_TD_KILL_ROUNDS", "1"))
WARMUP = 2
TRAINING = {"learning_rate": 1.0e-3, "micro_batch_size": 2}


def write_ppo(folder: Path, **given: Any) -> Path:
    """A config with a critic on a rank of its own."""
    config: dict[str, Any] = {
        "algorithm": {
            "advantage": {"name": "gae"},
            "whiten_advantages": True,
            "value_clip": 0.5,
            "kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1", "target": 0.01},
        },
        "critic_warmup_steps": WARMUP,
        "max_refills": 0,
        "ppo_epochs": 2,
        "actor_train": {"device_mapping": [0], "training": TRAINING},
        "actor_infer": {
            "device_mapping": [0, 1],
            "generation": {"num_return_sequences": 3, "max_new_tokens": 6},
        },
        "reference": {"device_mapping": [1]},
        "critic": {"device_mapping": [1], "training": TRAINING},
    }
    return write_rlvr(folder, **config | given)


def overlap(folder: Path, one: str, other: str) -> bool:
    """Whether calls of two stages ran at the same time."""
    (start,) = read_starts(folder / "trace")
    spans = [[span for span in start.spans if span.stage == stage] for stage in (one, other)]
    assert all(spans), {span.stage for span in start.spans}
    return any(a.begin_s < b.end_s and b.begin_s < a.end_s for a in spans[0] for b in spans[1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_killed_it_ends_as_if_it_had_never_been(seed: int, tmp_path: Path) -> None:
    draws = random.Random(seed)
    config = write_ppo(tmp_path, record_steps=9)
    finish(config, "whole")
    weights, metrics = result(tmp_path / "whole")
    valued = [line for line in metrics if "critic/loss" in line]
    assert [line["step"] for line in valued] == list(range(STEPS))
    assert [line["step"] for line in valued if "actor/loss" in line] == list(range(WARMUP, STEPS))
    assert len({line["critic/explained_variance"] for line in valued}) == STEPS
    for pair in ("train_step", "train_step"), ("compute_values", "compute_log_probs"):
        assert overlap(tmp_path / "whole", f"critic.{pair[0]}", f"actor_train.{pair[1]}")
    told = replayed_without_difference(tmp_path / "whole", 9)
    again = {("log-probs", "values"), ("advantages", "returns"), ("losses", "actor/loss")}
    critics = {("losses", f"critic/{name}") for name in ("loss", "grad_norm", "value_error")}
    assert again | critics < told
    kill_somewhere(config, "killed", "checkpoint", draws, range(0))
    finish_killed(config)
    assert result(tmp_path / "killed") == (weights, metrics)


@pytest.mark.timeout(300)
def test_each_loss_of_a_recorded_batch_gives_the_same_gradients_on_any_world(
    tmp_path: Path,
) -> None:
    config = write_ppo(
        tmp_path,
        pipeline_cls="rlvr_scenarios.OnAnyWorld",
        config_cls="roll_td.config.rlvr.RLVRConfig",
        batch_size=6,
        actor_train={"device_mapping": [0, 1, 2, 3]},
    )
    ended = roll_td_run(config).finish(2 * START_S)
    assert ended.code == 0 and "RECORDED BATCH CHECKED" in ended.out, ended.out
    print(ended.out.splitlines()[-1])


@pytest.mark.timeout(300)
def test_on_shared_ranks_it_learns_the_same(tmp_path: Path) -> None:
    runs = []
    for devices, offload in ({"actor_train": [0], "critic": [1]}, False), ({}, True):
        folder = tmp_path / str(offload)
        folder.mkdir()
        roles = {
            name: {"device_mapping": devices.get(name, [0, 1]), "training": TRAINING}
            for name in ("actor_train", "critic")
        }
        finish(write_ppo(folder, max_steps=4, offload=offload, **roles), "run")
        runs.append(result(folder / "run")[1])
    for line, wanted in zip(*runs, strict=True):
        assert line == pytest.approx(wanted, rel=1e-3, abs=1e-5)
