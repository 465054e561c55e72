"""Reinforcement learning in real jobs: the same on any world, and after any stop."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dist.test_sft import START_S, finish, finish_killed, kill_somewhere, result

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS = 12
ROUNDS = int(os.environ.get("ROLL_TD_KILL_ROUNDS", "1"))


def write_rlvr(folder: Path, **given: Any) -> Path:
    """A config of a tiny model and all that can go on from step to step: a KL whose coefficient
    adapts, running statistics, several updates a rollout, prompts that are drawn until enough have
    a signal."""
    made = yaml.safe_load((CONFIGS / "sft" / "tiny.yaml").read_text())
    words = [f"{n}{chr(97 + n % 26)}" for n in range(60)]
    for name, some in (("train", words), ("validation", words[:7])):
        rows = (json.dumps({"word": word}) + "\n" for word in some)
        (folder / f"{name}.jsonl").write_text("".join(rows))
    config = {
        "pipeline_cls": "roll_td.pipelines.rlvr.RLVRPipeline",
        "output_dir": str(folder),
        "model": made["model"] | {"tokenizer": str(CONFIGS / "sft" / "tiny" / "tokenizer")},
        "data": {
            "train": str(folder / "train.jsonl"),
            "validation": str(folder / "validation.jsonl"),
            "prompt_key": "word",
            "keep": {"word": "word"},
            "max_length": 16,
        },
        "rewards": {"default": {"name": "rlvr_scenarios.digits"}},
        "algorithm": {
            "scores": {"drop_without_signal": True, "mean": "running", "std": "running"},
            "advantage": {"name": "rloo"},
            "kl": {"coefficient": 0.1, "target": 0.01},
            "importance_weights": {"cap": 2.0},
            "entropy_coefficient": 0.001,
        },
        "validation": {"generation": {"max_new_tokens": 6}, "pass_score": 0.5},
        "batch_size": 4,
        "max_refills": 2,
        "mini_batches": 2,
        "max_steps": STEPS,
        "save_steps": 3,
        "keep_checkpoints": 2,
        "eval_steps": 4,
        "actor_train": {"device_mapping": [0, 1], "training": {"learning_rate": 1.0e-3}},
        "actor_infer": {"generation": {"num_return_sequences": 3, "max_new_tokens": 6}},
    }
    path = folder / "rlvr.yaml"
    path.write_text(yaml.safe_dump(config | given))
    return path


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_killed_at_any_moment_it_ends_as_if_it_had_never_been(seed: int, tmp_path: Path) -> None:
    draws = random.Random(seed)
    config = write_rlvr(tmp_path)
    finish(config, "whole")
    weights, metrics = result(tmp_path / "whole")
    trained = [line for line in metrics if "actor/loss" in line]
    assert [line["step"] for line in trained] == list(range(STEPS))
    assert len({line["actor/kl_coefficient"] for line in trained}) == STEPS, "it adapts"
    kinds = {"driver": range(3, 5), "worker": range(5, 8), "checkpoint": range(0)}
    for kind, steps in kinds.items():
        kill_somewhere(config, "killed", kind, draws, steps)
    finish_killed(config)
    assert result(tmp_path / "killed") == (weights, metrics)


@pytest.mark.timeout(300)
def test_roles_shared_or_apart_learn_the_same(tmp_path: Path) -> None:
    generation = {"num_return_sequences": 3, "max_new_tokens": 6}
    placements = {
        "shared": {"train": [0], "infer": [0], "reference": [0]},
        "apart": {"train": [1, 2], "infer": [3], "reference": [0]},
        "overlapping": {"train": [0, 1, 2], "infer": [2, 3], "reference": [0, 3]},
    }
    runs = {}
    for name, devices in placements.items():
        folder = tmp_path / name
        folder.mkdir()
        config = write_rlvr(
            folder,
            max_steps=3,
            offload=name == "overlapping",
            actor_train={
                "device_mapping": devices["train"],
                "training": {"learning_rate": 1.0e-3, "micro_batch_size": 2},
            },
            actor_infer={"device_mapping": devices["infer"], "generation": generation},
            reference={"device_mapping": devices["reference"]},
        )
        finish(config, name)
        runs[name] = result(folder / name)[1]
    for name in ("apart", "overlapping"):
        for line, wanted in zip(runs[name], runs["shared"], strict=True):
            assert line == pytest.approx(wanted, rel=1e-3, abs=1e-5), name
