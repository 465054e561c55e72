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
JUDGE = {
    "role": "any",
    "template": "{ground_truth}?{response}",
    "pattern": r"(\d)",
    "highest": 9,
    "attempts": 2,
}
"""A model of random weights as judge: the last digit of its reply, if there is one."""


def judgement(reply: str) -> float:
    """What it says an answer is worth; 0 where it has not said."""
    return ([int(letter) for letter in reply if letter.isdigit()] or [0])[-1] / 9


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
    judge = {"weight": 0.5, "on_error": "zero", "settings": JUDGE}
    rewards = [{"name": "rlvr_scenarios.digits"}, {"name": "llm_judge", **judge}]
    roles = {"any": {"generation": {"max_new_tokens": 12}}}
    config = write_rollout(tmp_path, rewards={"default": rewards}, judges=roles)
    draws = random.Random(3)
    whole, out = answered(config, "whole")
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [line["row"] for line in lines] == [n // 2 for n in range(2 * SUMS)]
    assert len({tuple(line["tokens"]) for line in lines}) > SUMS, "they are sampled"
    digits = [sum(map(str.isdigit, a["response"])) / max(len(a["response"]), 1) for a in lines]
    judged = [judgement(line["judge_reply"]) for line in lines]
    assert [line["score_digits"] for line in lines] == pytest.approx(digits)
    assert [line["score_llm_judge"] for line in lines] == pytest.approx(judged)
    assert 0.3 * SUMS < sum(map(bool, judged)) < 2 * SUMS, "some have no score"
    table = [line.split() for line in out.splitlines() if line.startswith("all ")]
    scores = [a + 0.5 * b for a, b in zip(digits, judged, strict=True)]
    assert [line["score"] for line in lines] == pytest.approx(scores)
    share = sum(value >= 0.1 for value in scores) / len(scores)
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
    """Two in one call for each batch, one by requests, ahead."""
    config = write_rollout(tmp_path)
    two, _ = answered(config, "two")
    ahead = "scheduling.async_generation_ratio=1"
    one, _ = answered(config, "one", "actor_infer.device_mapping=[0]", "batch_size=7", ahead)
    assert len(two) > 0

    def tokens(lines: bytes) -> list[list[int]]:
        return [json.loads(line)["tokens"] for line in lines.splitlines()]

    assert tokens(one) == tokens(two)
