"""Learning from pairs in real jobs: it learns, on any world, and after any stop."""

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
)

PAIRS = Path(__file__).parents[2] / "configs" / "dpo" / "tiny"
STEPS = 24


def write_dpo(folder: Path, **given: Any) -> Path:
    """The shipped config with checkpoints every 4 steps; its runs lie in `folder`."""
    made = yaml.safe_load((PAIRS.parent / "tiny.yaml").read_text())
    made["model"]["tokenizer"] = str(TINY / "tokenizer")
    made["data"] |= {kind: str(PAIRS / f"{kind}.jsonl") for kind in ("train", "validation")}
    made |= {"output_dir": str(folder), "max_steps": STEPS, "save_steps": 4, "eval_steps": 6}
    path = folder / "dpo.yaml"
    path.write_text(yaml.safe_dump(made | {"batch_size": 16} | given))
    return path


@pytest.mark.timeout(600)
def test_killed_it_ends_as_if_it_had_never_been(tmp_path: Path) -> None:
    draws = random.Random(0)
    config = write_dpo(tmp_path, record_steps=20)
    finish(config, "whole")
    whole = result(tmp_path / "whole")
    told = replayed_without_difference(tmp_path / "whole", 20)
    of_rows = {("rows", name) for name in ("reference", "answers", "reward", "margin", "loss")}
    assert of_rows | {("losses", "reward_margin"), ("losses", "grad_norm")} < told
    assert [line["step"] for line in whole[1] if "loss" in line] == list(range(STEPS))
    kill_somewhere(config, "killed", "driver", draws, range(9, 15))
    finish_killed(config)
    assert result(tmp_path / "killed") == whole
    # what is kept on disk is what is computed step by step, up to rounding, twice over
    for name in ("cached", "taken"):
        out = finish(config, name, f"reference_cache={tmp_path / 'cache'}").out
        assert ("are taken from" in out) == (name == "taken")
    cached, taken = result(tmp_path / "cached"), result(tmp_path / "taken")
    assert cached == taken
    for line, wanted in zip(cached[1], whole[1], strict=True):
        assert line == pytest.approx(wanted, rel=2e-2, abs=2e-3)


@pytest.mark.timeout(300)
def test_the_shipped_config_learns_to_prefer(tmp_path: Path) -> None:
    given = {"max_steps": 60, "save_steps": None, "batch_size": 32, "eval_steps": 30}
    config = write_dpo(tmp_path, **given, **sampled())
    finish(config, "learns")
    metrics = read_metrics(tmp_path / "learns" / "metrics.jsonl")
    # measured: .95 and 1.21; by chance .5 and 0
    assert metrics["val/accuracy", 59] > 0.85 and metrics["val/reward_margin", 59] > 0.7
    assert metrics["loss", 0] == pytest.approx(0.693147, abs=1e-5), "policy is reference: ln 2"
    # what it answers itself is by weights that have moved
    assert metrics["weights/actor_infer/version", 60] == 61
    assert metrics["val/score", 0] != metrics["val/score", 60]
    assert metrics["val/chosen_reward", 59] > metrics["val/rejected_reward", 59]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("pipeline", "said", "given"),
    [
        ("OnAnyWorld", "RECORDED PAIRS CHECKED", {"batch_size": 7, "actor_train": [0, 1, 2, 3]}),
        ("Adapters", "ADAPTERS CHECKED", {"lora": {"rank": 4}, "actor_train": [0, 1]}),
    ],
)
def test_scenarios(pipeline: str, said: str, given: dict[str, Any], tmp_path: Path) -> None:
    given |= {"pipeline_cls": f"dpo_scenarios.{pipeline}"}
    given |= {"config_cls": "roll_td.config.dpo.DPOConfig"}
    training = {"learning_rate": 1.0e-2}
    devices, lora = given.pop("actor_train"), given.pop("lora", None)
    config = write_dpo(
        tmp_path, actor_train={"device_mapping": devices, "training": training}, **given
    )
    if lora is not None:
        made = yaml.safe_load(config.read_text())
        made["model"]["lora"] = lora
        config.write_text(yaml.safe_dump(made))
    ended = roll_td_run(config).finish(2 * START_S)
    assert ended.code == 0 and said in ended.out, ended.out
    print(ended.out.splitlines()[-1])
