"""On-policy distillation in real jobs: teachers answer together, and no stop is seen in the end."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dist.harness import roll_td_run
from tests.dist.test_ppo import overlap
from tests.dist.test_replay import replayed_without_difference
from tests.dist.test_rlvr import CONFIGS, STEPS, write_rlvr
from tests.dist.test_sft import START_S, finish, finish_killed, kill_somewhere, result


def write_taught(folder: Path, **given: Any) -> Path:
    """Two teachers of random weights, each on a rank of its own, for the rows of two domains; and
    rewards, unless `rewards` is empty."""
    random_weights = yaml.safe_load((CONFIGS / "sft" / "tiny.yaml").read_text())["model"]
    random_weights["tokenizer"] = str(CONFIGS / "sft" / "tiny" / "tokenizer")
    teachers = {
        tag: {
            "device_mapping": [rank],
            "model": random_weights | {"config": random_weights["config"] | {"hidden_size": size}},
        }
        for tag, rank, size in (("odd", 0, 48), ("default", 1, 80))
    }
    config: dict[str, Any] = {
        "pipeline_cls": "roll_td.pipelines.onpolicy_distill.OnPolicyDistillPipeline",
        "teachers": teachers,
        "teacher_key": "kind",
        "teacher_coefficient": 0.5,
        "teacher_gamma": 0.9,
        "algorithm": {"advantage": {"name": "rloo"}},
        "max_refills": 0,
        "actor_train": {"device_mapping": [0], "training": {"learning_rate": 1.0e-3}},
        "actor_infer": {
            "device_mapping": [0, 1],
            "generation": {"num_return_sequences": 3, "max_new_tokens": 6},
        },
    }
    path = write_rlvr(folder, **config | given)
    made = yaml.safe_load(path.read_text())
    made["data"]["keep"]["kind"] = "kind"
    path.write_text(yaml.safe_dump(made))
    for name in ("train", "validation"):
        file = folder / f"{name}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for number, row in enumerate(rows):
            row["kind"] = ("odd", "even", "zero")[number % 3]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.timeout(600)
def test_killed_it_ends_as_if_it_had_never_been(tmp_path: Path) -> None:
    draws = random.Random(0)
    config = write_taught(tmp_path, record_steps=9)
    finish(config, "whole")
    weights, metrics = result(tmp_path / "whole")
    taught = [line for line in metrics if "teacher/reverse_kl" in line]
    assert [line["step"] for line in taught] == list(range(STEPS))
    for line in taught:
        assert line["teacher/without_answer"] == 0 and line["actor/loss"] != 0
    # a third of the rows are odd, so a few steps of 4 prompts have none, or no others
    tags = [{key for key in line if key.endswith("/reverse_kl")} for line in taught]
    assert sum(len(own) == 3 for own in tags) > STEPS / 2, "all, odd, default"
    names = ("teacher_odd", "teacher_default")
    assert overlap(tmp_path / "whole", *(f"{name}.compute_log_probs" for name in names))
    told = replayed_without_difference(tmp_path / "whole", 9)
    assert {("log-probs", "teacher_log_probs"), ("losses", "actor/loss")} < told
    kill_somewhere(config, "killed", "worker", draws, range(6, 8))
    finish_killed(config)
    assert result(tmp_path / "killed") == (weights, metrics)


@pytest.mark.timeout(300)
def test_on_shared_ranks_and_without_rewards_it_learns_the_same(tmp_path: Path) -> None:
    runs = []
    for name, devices, offload in ("apart", None, False), ("shared", [0, 1], True):
        folder = tmp_path / name
        folder.mkdir()
        path = write_taught(folder, rewards={}, max_steps=4, offload=offload)
        made = yaml.safe_load(path.read_text())
        for role in (made["actor_train"], *made["teachers"].values()):
            role["device_mapping"] = devices or role["device_mapping"]
        path.write_text(yaml.safe_dump(made))
        finish(path, name)
        runs.append(result(folder / name)[1])
    assert all(not key.startswith(("reward/", "val/score")) for line in runs[0] for key in line)
    for line, wanted in zip(*runs, strict=True):
        assert line == pytest.approx(wanted, rel=1e-3, abs=1e-5)


@pytest.mark.timeout(120)
def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path) -> None:
    path = write_taught(tmp_path)
    made = yaml.safe_load(path.read_text())
    made["teachers"]["odd"]["model"]["config"]["vocab_size"] = 100
    path.write_text(yaml.safe_dump(made))
    ended = roll_td_run(path).finish(START_S)
    assert ended.code == 1
    assert "logits for 101 tokens and teacher odd for 100" in ended.cause
