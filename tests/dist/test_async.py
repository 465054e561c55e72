"""Generation ahead of training in real jobs: overlap, age of tokens, stops, engines that fail."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import roll_td_run
from tests.dist.test_rlvr import STEPS, write_rlvr
from tests.dist.test_sft import START_S, finish, kill_somewhere

SAMPLED = {"num_return_sequences": 3, "max_new_tokens": 6}


def write_async(folder: Path, scheduling: dict[str, Any], **given: Any) -> Path:
    """Roles that train on rank 0, one that answers on rank 1, no refills."""
    roles = {
        "actor_train": {"device_mapping": [0], "training": {"learning_rate": 1.0e-3}},
        "reference": {"device_mapping": [0]},
        "actor_infer": {"device_mapping": [1], "generation": SAMPLED},
    }
    config = {
        "pipeline_cls": "async_scenarios.Recorded",
        "config_cls": "roll_td.config.rlvr.RLVRConfig",
        "max_refills": 0,
        "scheduling": scheduling,
        "export_dir": None,
    }
    return write_rlvr(folder, **config | roles | given)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def spans(folder: Path, name: str) -> list[tuple[float, float]]:
    """Start and end of what workers did under this name, in the trace of a run's last start."""
    trace = json.loads(max((folder / "trace").glob("*.json")).read_text())
    return [(e["ts"], e["ts"] + e["dur"]) for e in trace if e["ph"] == "X" and e["name"] == name]


@pytest.mark.timeout(300)
def test_it_answers_while_it_trains_by_weights_a_step_older(tmp_path: Path) -> None:
    infer = {
        "device_mapping": [1],
        "strategy_args": {"strategy_name": "hf_infer", "strategy_config": {"batch_size": 4}},
        "generation": {"num_return_sequences": 3, "max_new_tokens": 60},
    }
    scheduling = {"async_generation_ratio": 1.0, "in_flight": "abort"}
    finish(write_async(tmp_path, scheduling, actor_infer=infer), "ahead")
    metrics = [line for line in lines(tmp_path / "ahead" / "metrics.jsonl") if "actor/loss" in line]
    assert [line["step"] for line in metrics] == list(range(STEPS))
    oldest = [line["staleness/max"] for line in metrics]
    assert oldest[0] == 0 and set(oldest[1:]) == {1}
    assert all(0 < line["reward/mean"] < 1 for line in metrics)
    recorded = lines(tmp_path / "ahead" / "groups.jsonl")
    assert [n for line in recorded for n in line["groups"]] == list(range(4 * STEPS))
    for line in recorded:
        assert set(line["versions"]) <= {line["step"], line["step"] + 1}
    engine, train = (
        spans(tmp_path / "ahead", name) for name in ("actor_infer.engine", "actor_train.train_step")
    )
    overlaps = [a for a in engine for b in train if a[0] < b[1] and b[0] < a[1]]
    assert overlaps, "nothing was generated while it trained"


@pytest.mark.timeout(600)
def test_killed_it_learns_from_each_prompt_once(tmp_path: Path) -> None:
    draws = random.Random(3)
    config = write_async(tmp_path, {"async_generation_ratio": 1.0})
    for kind, steps in {"driver": range(3, 5), "worker": range(6, 9)}.items():
        kill_somewhere(config, "killed", kind, draws, steps)
    ended = finish(config, "killed")
    assert "going on from" in ended.out
    # a step that was done again after a kill stands as it was done last
    recorded = {line["step"]: line["groups"] for line in lines(tmp_path / "killed/groups.jsonl")}
    assert [n for step in range(STEPS) for n in recorded[step]] == list(range(4 * STEPS))


@pytest.mark.timeout(300)
def test_one_by_one_without_running_ahead_it_learns_what_the_call_for_all_does(
    tmp_path: Path,
) -> None:
    """Scores of a role that judges too."""
    runs, asks = {}, {"role": "any", "pattern": r"(\d)", "highest": 9, "template": "{response}"}
    judge = {"name": "llm_judge", "weight": 0.5, "on_error": "zero", "settings": asks}
    given = {
        "rewards": {"default": [{"name": "rlvr_scenarios.digits"}, judge]},
        "judges": {"any": {"generation": {"max_new_tokens": 8}}},
    }
    for name, scheduling in {"call": {}, "requests": {"deterministic": False}}.items():
        folder = tmp_path / name
        folder.mkdir()
        finish(write_async(folder, scheduling, max_steps=4, **given), name)
        assert [n for line in lines(folder / name / "groups.jsonl") for n in line["groups"]] == [
            *range(16)
        ]
        runs[name] = [
            line for line in lines(folder / name / "metrics.jsonl") if "val/score" not in line
        ]
        assert all(0 < line["reward/default/llm_judge"] < 1 for line in runs[name])
        assert sum(line["judge/any/asked_again"] for line in runs[name]) > 4
    for line, wanted in zip(runs["requests"], runs["call"], strict=True):
        shared = {k: v for k, v in wanted.items() if not k.startswith("time")}
        assert {k: line[k] for k in shared} == pytest.approx(shared, rel=1e-3, abs=1e-5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["fail", "hang"])
def test_an_engine_that_fails_ends_the_job_or_others_take_over(fault: str, tmp_path: Path) -> None:
    mock = {"fault": fault, "fault_worker": 1, "fault_after": 8, "max_tokens": 6}
    scheduling = {"async_generation_ratio": 1.0, "request_timeout_s": 3.0}
    infer = {
        "device_mapping": [1, 2],
        "strategy_args": {"strategy_name": "mock_infer", "strategy_config": mock},
        "generation": SAMPLED,
    }
    config = write_async(tmp_path, scheduling, actor_infer=infer, max_steps=4)
    ended = roll_td_run(config, "exp_name=ends").finish(START_S)
    assert ended.code == 1
    assert "actor_infer.engine failed (worker 1 of actor_infer, rank 2 on" in ended.cause
    assert "its last request: sample" in ended.cause
    ended = finish(config, "goes_on", "scheduling.on_engine_failure=reroute")
    assert "worker 1 of actor_infer, rank 2" in ended.out and "others take over" in ended.out
    recorded = lines(tmp_path / "goes_on" / "groups.jsonl")
    assert [n for line in recorded for n in line["groups"]] == list(range(16))
