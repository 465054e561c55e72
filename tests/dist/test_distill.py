"""Distillation in real jobs: it learns, wherever the teacher is, and after any stop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_td.trackers import read_metrics
from tests.dist.harness import roll_td_run
from tests.dist.test_replay import replayed_without_difference
from tests.dist.test_sft import (
    START_S,
    TINY,
    finish,
    finish_killed,
    kill_somewhere,
    result,
    sampled,
    write_sft,
)

STEPS = 20


def write_distill(folder: Path, **given: Any) -> Path:
    """The shipped config with a teacher of random weights and checkpoints every 4 steps."""
    made = yaml.safe_load((TINY.parents[1] / "distill" / "tiny.yaml").read_text())
    made["model"]["tokenizer"] = str(TINY / "tokenizer")
    made["data"] |= {kind: str(TINY / f"{kind}.jsonl") for kind in ("train", "validation")}
    teacher = dict(made["model"], config=made["model"]["config"] | {"hidden_size": 48})
    made["teacher"] = {"model": teacher}
    made |= {"output_dir": str(folder), "max_steps": STEPS, "save_steps": 4, "eval_steps": 6}
    made |= {"batch_size": 13, "divergence": {"name": "jsd", "settings": {"beta": 0.3}}}
    path = folder / "distill.yaml"
    path.write_text(yaml.safe_dump(made | given))
    return path


@pytest.mark.timeout(600)
def test_killed_it_ends_as_if_it_had_never_been(tmp_path: Path) -> None:
    draws = random.Random(1)
    config = write_distill(
        tmp_path, top_k=5, cross_entropy_share=0.3, record_steps=16, **sampled()
    )
    given = yaml.safe_load(config.read_text())
    given["teacher"]["device_mapping"] = [1, 2]  # one rank with both, one with each alone
    config.write_text(yaml.safe_dump(given))
    finish(config, "whole")
    whole = result(tmp_path / "whole")
    told = replayed_without_difference(tmp_path / "whole", 16)
    assert {("rows", "divergence"), ("losses", "divergence"), ("losses", "grad_norm")} < told
    assert [line["step"] for line in whole[1] if "loss" in line] == list(range(STEPS))
    assert all(line["teacher_mb"] > 0 for line in whole[1] if "loss" in line)
    scores = {line["step"]: line["val/score"] for line in whole[1] if "val/score" in line}
    assert sorted(scores) == [0, 6, 12, 18, 20] and len(set(scores.values())) > 1
    kill_somewhere(config, "killed", "worker", draws, range(9, 15))
    finish_killed(config)
    assert result(tmp_path / "killed") == whole


@pytest.mark.timeout(300)
def test_each_divergence_gives_the_same_gradients_on_any_world_wherever_the_teacher_is(
    tmp_path: Path,
) -> None:
    config = write_distill(
        tmp_path,
        pipeline_cls="distill_scenarios.OnAnyWorld",
        config_cls="roll_td.config.distill.DistillConfig",
        batch_size=7,
        top_k=5,
        student={"device_mapping": [0, 1, 2, 3]},
    )
    given = yaml.safe_load(config.read_text())
    given["teacher"] |= {"device_mapping": [0], "strategy_args": {"strategy_name": "hf_infer"}}
    config.write_text(yaml.safe_dump(given))
    ended = roll_td_run(config).finish(2 * START_S)
    assert ended.code == 0 and "RECORDED TEXT CHECKED" in ended.out, ended.out
    print(ended.out.splitlines()[-1])


@pytest.mark.timeout(400)
def test_the_shipped_config_comes_near_its_teacher(tmp_path: Path) -> None:
    teacher = write_sft(tmp_path, max_steps=40, batch_size=32, record_steps=36)
    finish(teacher, "teacher")
    told = replayed_without_difference(tmp_path / "teacher", 36)
    assert {("inputs", "labels"), ("rows", "loss"), ("losses", "loss")} < told
    config = write_distill(
        tmp_path,
        teacher={"model": {"path": str(tmp_path / "teacher" / "model")}},
        divergence={"name": "forward_kl"},
        batch_size=32,
        max_steps=60,
        eval_steps=60,
    )
    finish(config, "student")
    metrics = read_metrics(tmp_path / "student" / "metrics.jsonl")
    # measured: 1.9 at the start and .059 at the end
    assert metrics["divergence", 0] > 1 and metrics["val/divergence", 59] < 0.1


@pytest.mark.timeout(100)
def test_j01_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    for file in (TINY / "tokenizer").iterdir():
        (other / file.name).write_text(file.read_text().replace('"z": 95', '"ä": 95'))
    config = write_distill(tmp_path)
    ended = roll_td_run(config, f"teacher.model.tokenizer={other}").finish(START_S)
    assert ended.code != 0
    assert "2 tokens differ between the tokenizers of student (101 tokens)" in ended.cause
