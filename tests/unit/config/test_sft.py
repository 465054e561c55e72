"""SFTConfig: what it derives and refuses; the shipped config; the spec's shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_td.cli import check
from roll_td.config.load import load
from roll_td.config.schema import ConfigError, read
from roll_td.config.sft import SFTConfig

ROOT = Path(__file__).parents[3]


def config(**given: Any) -> SFTConfig:
    data = {"model": {"path": "my-model"}, "data": {"train": "my.jsonl"}} | given
    reading = read(SFTConfig, data)
    if reading.value is None:
        raise ConfigError(reading.problems)
    return reading.value


def test_a_model_and_a_file_are_enough() -> None:
    made = config()
    role = made.actor_train
    assert (role.name, role.device_mapping, role.world_size) == ("actor_train", [0], 1)
    assert role.worker_cls == "roll_td.workers.sft.SFTWorker"
    assert role.strategy_args is not None and role.strategy_args.strategy_name == "fsdp2_train"
    assert (made.num_gpus_per_node, made.num_cpu_ranks_per_node) == (1, 1)
    assert (made.resume, made.save_steps, made.keep_checkpoints) == ("auto", None, None)


def test_a_role_on_cpu_ranks_and_one_of_the_users_own() -> None:
    role = config(actor_train={"world_size": 2, "worker_cls": "mine.MyWorker"}).actor_train
    assert (role.device_mapping, role.world_size, role.worker_cls) == (None, 2, "mine.MyWorker")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": {}}, "data.train: is missing; set it"),
        ({"model": {}}, "model: is missing; set model.path, or model.config for random weights"),
        ({"model": {"config": {"model_type": "qwen3"}}}, "model.tokenizer: is missing: a model"),
        ({"data": {"train": "a.jsonl", "prompt_key": "q"}}, "data.response_key: is missing"),
        ({"max_steps": 5, "epochs": 1}, "epochs=1.0: is given beside max_steps: a run has one"),
        ({"epochs": 0}, "epochs=0.0: must be above 0"),
        ({"batch_size": 0}, "batch_size=0: must be a whole number of at least 1"),
        ({"eval_steps": 0}, "eval_steps=0: must be"),
        ({"save_steps": 0}, "save_steps=0: must be"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0: must be"),
        ({"upload_timeout_s": 0}, "upload_timeout_s=0.0: must be above 0 seconds"),
        ({"resume": ""}, "resume='': is empty; set auto, none or"),
        (
            {"actor_train": {"strategy_args": {"strategy_name": "hf_infer"}}},
            "actor_train.strategy_args.strategy_name='hf_infer': is a strategy that can't train",
        ),
        ({"learning_rate": 1}, "or actor_train.training.learning_rate"),
        ({"trackers": {"wandb": {"mode": "offline"}}}, "trackers.wandb.project: is missing"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**given)
    assert message in str(caught.value)


def test_several_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config(batch_size=0, save_steps=0, model={})
    assert len(caught.value.problems) == 3


def test_the_shipped_config_checks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    report = check("configs/sft/tiny.yaml", [])
    assert not report.problems and not report.warnings
    assert report.size is not None and report.size.ranks_per_node == 3
    more = check("configs/sft/tiny.yaml", ["actor_train.device_mapping=0-3"])
    assert more.size is not None and more.size.ranks_per_node == 5


def test_the_specs_shapes_are_read(tmp_path: Path) -> None:
    spec = """
pipeline_cls: roll_td.pipelines.sft.SFTPipeline
model: {path: my-model}
data: {train: my.jsonl}
actor_train:
  name: student
  worker_cls: roll_td.workers.sft.SFTWorker
  device_mapping: list(range(0, 4))
  num_gpus_per_worker: 1
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config:
      fsdp_size: 4
"""
    (tmp_path / "exp.yaml").write_text(spec)
    made = load(tmp_path / "exp.yaml")
    assert isinstance(made, SFTConfig)
    role = made.actor_train
    assert (role.name, role.device_mapping, role.world_size) == ("student", [0, 1, 2, 3], 4)
    assert role.strategy_args is not None and role.strategy_args.settings.fsdp_size == 4


def test_what_is_missing_hides_no_mistyped_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    report = check("configs/sft/sft.yaml", ["model.pth=x", "actor_train.training.learning_rate=a"])
    assert [problem.key for problem in report.problems] == [
        "model.pth",
        "actor_train.training.learning_rate",
        "data.train",
        "model.path",
    ]


def test_files_and_packages_are_looked_for_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll_td.config.model.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    given = ["model.path=./no.gguf", "data.train=no.jsonl", "model.lora.rank=4"]
    report = check(str(ROOT / "configs/sft/sft.yaml"), given)
    assert {(p.key, p.fix) for p in report.problems if "pip" in p.fix} == {
        ("model.lora", "pip install 'roll-td[lora]'"),
        ("model.path", "pip install 'roll-td[gguf]'"),
    }
    assert {p.key for p in report.problems if "there" in p.rule} == {"data.train", "model.path"}
