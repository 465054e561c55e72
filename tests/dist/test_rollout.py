"""Rollout only in real jobs: stopped at any moment, its file ends as if it had never been."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dist.harness import roll_td_run
from tests.dist.test_sft import DRIVER, START_S, TINY, WORKER, kill_rank

SUMS = 150


def write_rollout(folder: Path, **given: Any) -> Path:
    """A config of two ranks that answer, and of some sums."""
    made = yaml.safe_load((TINY.parent / "tiny.yaml").read_text())
    rows = (json.dumps({"q": f"{n}+{n + 1}", "a": str(2 * n + 1)}) + "\n" for n in range(SUMS))
    (folder / "sums.jsonl").write_text("".join(rows))
    config = {
        "pipeline_cls": "roll_td.pipelines.rollout.RolloutPipeline",
        "output_dir": str(folder),
        "model": made["model"] | {"tokenizer": str(TINY / "tokenizer")},
        "data": {
            "train": str(folder / "sums.jsonl"),
            "prompt_key": "q",
            "keep": {"ground_truth": "a"},
            "max_length": 16,
        },
        "rewards": {"default": {"name": "rlvr_scenarios.digits"}},
        "batch_size": 3,
        "pass_score": 0.1,
        "pass_at": [1, 2],
        "actor_infer": {
            "device_mapping": [0, 1],
            "generation": {"num_return_sequences": 2, "max_new_tokens": 8},
        },
    }
    path = folder / "rollout.yaml"
    path.write_text(yaml.safe_dump(config | given))
    return path


def answered(config: Path, name: str, *overrides: str) -> tuple[bytes, str]:
    """The file, and what the job printed."""
    ended = roll_td_run(config, f"exp_name={name}", *overrides).finish(START_S)
    assert ended.code == 0, ended.out
    return (config.parent / name / "answers.jsonl").read_bytes(), ended.out


@pytest.mark.timeout(400)
def test_killed_at_any_moment_it_ends_as_if_it_had_never_been(tmp_path: Path) -> None:
    config, draws = write_rollout(tmp_path), random.Random(3)
    whole, out = answered(config, "whole")
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [line["row"] for line in lines] == [n // 2 for n in range(2 * SUMS)]
    assert len({tuple(line["tokens"]) for line in lines}) > SUMS, "they are sampled"
    digits = [sum(map(str.isdigit, a["response"])) / max(len(a["response"]), 1) for a in lines]
    assert [line["score"] for line in lines] == pytest.approx(digits)
    table = [line.split() for line in out.splitlines() if line.startswith("all ")]
    share = sum(value >= 0.1 for value in digits) / len(digits)
    assert 0 < share < 1 and table[0][2] == f"{share:.4f}"
    for rank, step in ((DRIVER, 4), (WORKER, 8)):
        job = roll_td_run(config, "exp_name=killed")
        job.wait_for(f"step {step}/", START_S)
        time.sleep(draws.uniform(0, 0.1))
        kill_rank(job, rank)
        assert job.finish(START_S).code != 0
    killed, out = answered(config, "killed")
    assert "going on from" in out and killed == whole


@pytest.mark.timeout(300)
def test_one_rank_or_two_answer_the_same(tmp_path: Path) -> None:
    config = write_rollout(tmp_path)
    two, _ = answered(config, "two")
    one, _ = answered(config, "one", "actor_infer.device_mapping=[0]", "batch_size=7")
    assert len(two) > 0

    def tokens(lines: bytes) -> list[list[int]]:
        return [json.loads(line)["tokens"] for line in lines.splitlines()]

    assert tokens(one) == tokens(two)
