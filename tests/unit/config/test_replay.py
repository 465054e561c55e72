"""The config of a replay: that of the run, on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_td.config.base import role_sections
from roll_td.config.load import load, resolved_yaml
from roll_td.config.replay import (
    DistillReplayConfig,
    DPOReplayConfig,
    OnPolicyReplayConfig,
    SFTReplayConfig,
    record_path,
    write_replay_config,
)
from roll_td.config.rlvr import RLVRConfig

ROOT = Path(__file__).parents[3]


def run_of(folder: Path, *overrides: str) -> str:
    """A folder of a run of the shipped config with a record of step 3."""
    config = load(ROOT / "configs" / "rlvr" / "ppo.yaml", overrides)
    (folder / "config.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    record_path(folder, 3).parent.mkdir()
    record_path(folder, 3).touch()
    return str(folder)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (
            "num_nodes=2",
            "num_gpus_per_node=4",
            "actor_train.device_mapping=0-3",
            "actor_train.strategy_args.strategy_name=fsdp2_train",
            "actor_train.strategy_args.strategy_config={fsdp_size: 2}",
            "actor_infer.device_mapping=4-7",
            "actor_infer.num_gpus_per_worker=2",
            "actor_infer.strategy_args={strategy_name: vllm}",
            "critic.device_mapping=0-3",
            "scheduling.async_generation_ratio=1",
        ),
    ],
    ids=["as shipped", "on many devices, ahead of training"],
)
def test_any_run_fits_on_one_rank(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    made = load(write_replay_config(run_of(tmp_path, *overrides), 3, None))
    assert isinstance(made, RLVRConfig)
    roles = (made.actor_train, made.actor_infer, made.critic)
    assert [role.device_mapping for role in roles if role is not None] == [[0]] * 3
    assert (made.num_nodes, made.num_gpus_per_node) == (1, 1)
    assert made.scheduling.async_generation_ratio == 0


def test_teachers_and_judges_stand_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load(
        ROOT / "configs" / "onpolicy_distill" / "tiny.yaml",
        [
            "teachers.default.device_mapping=0-3",
            "data.keep={a: a}",
            "rewards.default={name: llm_judge, settings: {role: j, template: '{response}'}}",
            "judges.j.device_mapping=4-5",
        ],
    )
    (tmp_path / "config.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    record_path(tmp_path, 3).parent.mkdir()
    record_path(tmp_path, 3).touch()
    made = load(write_replay_config(str(tmp_path), 3, None))
    assert isinstance(made, OnPolicyReplayConfig) and made.replay.step == 3
    roles = [made.teachers["default"], made.judges["j"]]
    assert [role.device_mapping for role in roles] == [[0]] * 2 and made.num_gpus_per_node == 1


@pytest.mark.parametrize(
    ("name", "cls", "overrides"),
    [
        (
            "sft",
            SFTReplayConfig,
            [
                "prompts={train: configs/sft/tiny/train.jsonl, messages_key: messages}",
                "rewards.default={name: format, settings: {pattern: a}}",
                "actor_train.device_mapping=0-3",
            ],
        ),
        ("dpo", DPOReplayConfig, ["reference_cache=cache", "reference.device_mapping=2-5"]),
        (
            "distill",
            DistillReplayConfig,
            ["student.device_mapping=0-3", "teacher.device_mapping=0-3"],
        ),
    ],
)
def test_training_on_a_data_set_too_without_what_it_is_tried_on(
    name: str,
    cls: type[Any],
    overrides: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    config = load(ROOT / "configs" / name / "tiny.yaml", overrides)
    (tmp_path / "config.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    record_path(tmp_path, 3).parent.mkdir()
    record_path(tmp_path, 3).touch()
    made = load(write_replay_config(str(tmp_path), 3, None))
    assert isinstance(made, cls) and made.prompts is None and made.actor_infer is None
    roles = role_sections(vars(made)).values()
    assert [(role.device_mapping, role.world_size) for role in roles] == [([0], 1)] * len(roles)
    assert getattr(made, "reference_cache", None) is None and made.record_steps is None


def test_what_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"is no folder of a run: it has no config\.yaml"):
        write_replay_config(str(tmp_path), 3, None)
    monkeypatch.chdir(ROOT)
    run = run_of(tmp_path)
    with pytest.raises(ValueError, match="no record of step 4: there are 3; see record_steps"):
        write_replay_config(run, 4, None)
