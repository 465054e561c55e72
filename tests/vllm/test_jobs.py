"""Engines in real jobs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml

from roll_td.config.model import ModelConfig
from roll_td.models import load_model
from tests.dist.harness import HERE as DIST
from tests.dist.harness import Ended, roll_td_run, write_config
from tests.dist.test_async import lines, spans, write_async
from tests.dist.test_rlvr import write_rlvr
from tests.dist.test_sft import result
from tests.vllm.conftest import ENGINE, FIELDS, HERE, NEEDS_VLLM, TOKENIZER, strong

pytestmark = NEEDS_VLLM
START_S = 280
"""How long a job may take on a busy machine."""


def finish(config: Path, *overrides: str) -> Ended:
    path = f"{DIST}:{HERE}:{HERE.parents[1]}"
    ended = roll_td_run(config, *overrides, PYTHONPATH=path).finish(START_S)
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
    assert "10 UPDATES CHECKED" in finish(config).out


@pytest.mark.timeout(300)
def test_an_engine_adds_adapters_that_come_alone(tmp_path: Path) -> None:
    """To a model that it has read itself, on a rank that trains them and on two others."""
    load_model(ModelConfig(config=FIELDS), 3).save_pretrained(tmp_path / "model")
    alone = ENGINE | {"max_model_len": 64, "lora": "adapters"}
    vllm = {"strategy_name": "vllm", "strategy_config": alone}
    roles = {
        "train": {"device_mapping": [0, 1], "strategy_args": {"strategy_name": "fsdp2_train"}},
        "shared": {"device_mapping": [1], "strategy_args": vllm},
        "apart": {"device_mapping": [2, 3], "num_gpus_per_worker": 2, "strategy_args": vllm},
    }
    for role in roles.values():
        role["worker_cls"] = "vllm_scenarios.Role"
    config = write_config(
        tmp_path,
        "vllm_scenarios.Adapters",
        roles=roles,
        model={
            "path": str(tmp_path / "model"),
            "tokenizer": TOKENIZER,
            "lora": {"rank": 2, "alpha": 64},
        },
    )
    assert "4 UPDATES CHECKED" in finish(config).out


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


@pytest.mark.long
@pytest.mark.timeout(600)
def test_adapters_learn_as_merged_ones_do_and_go_on_after_a_stop(tmp_path: Path) -> None:
    """Cut after two steps a run ends bit for bit as undisturbed."""
    sizes = {"head_dim": 32, "max_position_embeddings": 64}
    strong(ModelConfig(config=FIELDS | sizes), 3).save_pretrained(tmp_path / "base")
    base = {"path": str(tmp_path / "base"), "tokenizer": TOKENIZER}
    runs = {}

    def run(name: str, lora: str) -> None:
        config = write_rlvr(
            tmp_path,
            model=base | {"lora": {"rank": 2, "alpha": 64}},
            algorithm={"advantage": {"name": "grpo"}},
            max_refills=0,
            max_steps=4,
            save_steps=2,
            eval_steps=None,
            actor_train={"device_mapping": [0], "training": {"learning_rate": 1.0e-2}},
            actor_infer={
                "strategy_args": {
                    "strategy_name": "vllm",
                    "strategy_config": ENGINE | {"lora": lora},
                },
                "generation": {"num_return_sequences": 3, "max_new_tokens": 6},
            },
        )
        finish(config, f"exp_name={name}", f"export_dir={tmp_path / name / 'model'}")
        runs[name] = result(tmp_path / name)

    run("alone", "adapters")
    shutil.copytree(tmp_path / "alone", tmp_path / "cut")
    shutil.rmtree(max((tmp_path / "cut" / "checkpoints").glob("step_*")))
    shutil.rmtree(tmp_path / "cut" / "model")
    run("cut", "adapters")
    assert runs["cut"] == runs["alone"]
    run("merged", "merged")
    for own, wanted in zip(runs["alone"][1], runs["merged"][1], strict=True):
        size = "weights/actor_infer/megabytes"
        assert own.pop(size, 0) < wanted.pop(size, 1)
        assert own == pytest.approx(wanted, rel=1e-3, abs=1e-5)


def write_answers(
    folder: Path, strategy: str, scheduling: dict[str, Any], devices: int = 1, **sampled: Any
) -> Path:
    """It learns on rank 0 from answers of rank 1, which are in answers.jsonl. `devices`: of the
    engine."""
    folder.mkdir()
    engine = ENGINE if strategy == "vllm" else {}
    config = write_async(
        folder,
        scheduling,
        pipeline_cls="vllm_scenarios.Recorded",
        reference=None,
        algorithm={
            "scores": {"mean": "running", "std": "running"},
            "advantage": {"name": "reinforce"},
        },
        max_steps=4,
        save_steps=None,
        eval_steps=None,
        actor_train={
            "device_mapping": [0],
            "worker_cls": "vllm_scenarios.StrongActor",
            "training": {"learning_rate": 1.0e-3},
        },
        actor_infer={
            "device_mapping": list(range(1, 1 + devices)),
            "num_gpus_per_worker": devices,
            "strategy_args": {"strategy_name": strategy, "strategy_config": engine},
            "generation": {"max_new_tokens": 20} | sampled,
        },
    )
    given = yaml.safe_load(config.read_text())
    given["model"]["config"] |= {"head_dim": 32, "max_position_embeddings": 64}
    config.write_text(yaml.safe_dump(given))
    return config


@pytest.mark.long
@pytest.mark.timeout(400)
def test_one_by_one_its_answers_are_those_of_hf_infer(tmp_path: Path) -> None:
    """Greedy, over four updates, by an engine on two devices."""
    runs = []
    for strategy, scheduling, devices in (
        ("hf_infer", {}, 1),
        ("vllm", {"deterministic": False}, 2),
    ):
        folder = tmp_path / strategy
        config = write_answers(folder, strategy, scheduling, devices, temperature=0)
        finish(config, "exp_name=run")
        runs.append(lines(folder / "run" / "answers.jsonl"))
    seen = {str(line["tokens"]) for line in runs[0]}
    assert len(seen) > 8 and [line["versions"][0] for line in runs[0][::4]] == [1, 2, 3, 4]
    for wanted, line in zip(*runs, strict=True):
        assert line | {"log_probs": []} == wanted | {"log_probs": []}
        assert line["log_probs"] == pytest.approx(wanted["log_probs"], abs=1e-4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("in_flight", "devices"), [("keep", 2), ("abort", 1)])
def test_it_answers_while_it_trains(in_flight: str, devices: int, tmp_path: Path) -> None:
    scheduling = {"async_generation_ratio": 1.0, "in_flight": in_flight}
    folder = tmp_path / "ahead"
    config = write_answers(folder, "vllm", scheduling, devices, num_return_sequences=3)
    finish(config, "exp_name=run")
    answers = lines(folder / "run" / "answers.jsonl")
    assert [line["group"] for line in answers[::3]] == list(range(16))
    for line in answers:
        assert line["versions"] == sorted(line["versions"])
        assert set(line["versions"]) <= {line["step"], line["step"] + 1} - {0}
    metrics = [line for line in lines(folder / "run" / "metrics.jsonl") if "actor/loss" in line]
    assert [line["staleness/max"] for line in metrics] == [0, 1, 1, 1]
    names = ("actor_infer.engine", "actor_train.train_step")
    engine, train = (spans(folder / "run", name) for name in names)
    assert any(a[0] < b[1] and b[0] < a[1] for a in engine for b in train), "it waited"


@pytest.mark.timeout(400)
def test_an_engine_that_hangs_is_killed_and_others_take_over(tmp_path: Path) -> None:
    scheduling = {
        "deterministic": False,
        "request_timeout_s": 20.0,
        "on_engine_failure": "reroute",
    }
    folder = tmp_path / "hangs"
    config = write_answers(folder, "vllm", scheduling, num_return_sequences=3)
    given = yaml.safe_load(config.read_text())
    given["actor_infer"] |= {"device_mapping": [1, 2], "worker_cls": "vllm_scenarios.Hanging"}
    config.write_text(yaml.safe_dump(given))
    ended = finish(config, "exp_name=run")
    assert "worker 1 of actor_infer, rank 2" in ended.out and "others take over" in ended.out
    assert "request_timeout_s is 20" in ended.out
    answers = lines(folder / "run" / "answers.jsonl")
    assert [line["group"] for line in answers[::3]] == list(range(16))
    assert all(set(line["versions"]) == {line["step"] + 1} for line in answers)
