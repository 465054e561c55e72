"""A recorded step, done again in one process."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from roll_td.config.replay import record_path
from roll_td.pipelines.recording import RolloutRecord
from tests.dist.harness import Job
from tests.dist.test_rlvr import write_rlvr
from tests.dist.test_sft import START_S, finish
from tests.unit.rewards.namespaces import needs_namespaces

ALGORITHM = {
    "scores": {"length_weight": {"alpha": 0.1, "right_from": 0.2}, "mean": "running"},
    "advantage": {"name": "rloo"},
    "difficulty_weight": {"right_from": 0.2},
    "policy_loss": {"name": "kimi15", "settings": {"tau": 0.1}},
    "kl": {"coefficient": 0.1, "target": 0.01},
    "importance_weights": {"cap": 2.0, "level": "segment"},
}
CODE = {"name": "code", "weight": 0.1, "settings": {"part": "text"}}
STAGES = {"rewards", "scores", "advantages", "log-probs", "losses"}
"""Of RLVR."""
OF_TEXT = {"inputs", "rows", "losses"}
"""Of the others."""


def replayed(run: Path, step: int, *arguments: str) -> str:
    command = ["-m", "roll_td.cli", "replay", str(run), "--step", str(step), *arguments]
    ended = Job(command).finish(START_S)
    assert ended.code == 0, ended.out
    return ended.out


def rows(out: str) -> dict[tuple[str, str], str]:
    """(stage, column) → the rest of its line."""
    lines = [line.split(maxsplit=5) for line in out.splitlines()]
    return {(line[0], line[1]): line[-1] for line in lines if line and line[0] in STAGES | OF_TEXT}


def replayed_without_difference(run: Path, step: int) -> set[tuple[str, str]]:
    """The (stage, column) of what was compared of a step, and all of it was equal."""
    out = replayed(run, step)
    assert "no difference" in out and "no weights" not in out, out
    return set(rows(out))


@needs_namespaces
@pytest.mark.timeout(600)
def test_a_step_is_done_again_and_what_differs_is_found(tmp_path: Path) -> None:
    config = write_rlvr(
        tmp_path,
        max_steps=5,
        save_steps=1,
        keep_checkpoints=None,
        eval_steps=None,
        record_steps=2,
        algorithm=ALGORITHM,
        rewards={"default": [{"name": "rlvr_scenarios.digits"}, CODE]},
        max_refills=0,
    )
    data = yaml.safe_load(config.read_text())
    data["data"]["keep"]["ground_truth"] = "word"
    config.write_text(yaml.safe_dump(data))
    finish(config, "run")
    run = tmp_path / "run"
    recorded = sorted(path.name for path in (run / "records").iterdir())
    assert recorded == ["step_0.pt", "step_2.pt", "step_4.pt"]

    # trained on two ranks, done again on one
    out = replayed(run, 2)
    assert "no difference" in out and {stage for stage, _ in rows(out)} == STAGES
    for column in ("loss", "grad_norm", "kl", "nearness"):
        assert rows(out)["losses", f"actor/{column}"] == "equal"
    assert "no difference" in replayed(run, 0), "from the weights of the model"

    record = RolloutRecord.load(record_path(run, 2))
    sample = int(record.columns["sample_id"][1])
    out = replayed(run, 2, "--sample", str(sample))
    assert "no difference" in out and f"response: {record.columns['response'][1]!r}" in out

    row, token = next(map(tuple, record.columns["advantages"].nonzero().tolist()))
    wrong = {**record.columns, "advantages": record.columns["advantages"].clone()}
    wrong["advantages"][row, token] += 0.5
    replace(record, columns=wrong).save(record_path(run, 2))
    shutil.rmtree(run / "checkpoints" / "step_2")
    out = replayed(run, 2)
    name = f"sample {int(record.columns['sample_id'][row])}"
    assert f"first difference: advantages, advantages of {name}, token {token}: recorded" in out
    assert "no weights, so no log-probs and losses" in out
    assert {stage for stage, _ in rows(out)} == {"rewards", "scores", "advantages"}


@pytest.mark.timeout(300)
def test_a_step_that_was_answered_ahead_is_done_again(tmp_path: Path) -> None:
    config = write_rlvr(
        tmp_path,
        max_steps=2,
        save_steps=1,
        keep_checkpoints=None,
        eval_steps=None,
        record_steps=1,
        max_refills=0,
        algorithm={"importance_weights": {"cap": 2.0}},
        scheduling={"async_generation_ratio": 1.0},
        actor_train={"device_mapping": [0], "training": {"learning_rate": 1.0e-2}},
        actor_infer={
            "device_mapping": [1],
            "generation": {"num_return_sequences": 3, "max_new_tokens": 6},
        },
    )
    finish(config, "run")
    out = replayed(tmp_path / "run", 1)
    assert "no difference" in out, out
    (engine,) = [line.split() for line in out.splitlines() if "infer_log_probs" in line]
    assert engine[2] == "0", "the engine had the weights of the step before"
