"""Records of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from roll_td.cli import main
from roll_td.config.algorithm import AlgorithmConfig
from roll_td.config.replay import record_path, write_replay_config
from roll_td.metrics import Mean
from roll_td.pipelines.estimating import Estimator
from roll_td.pipelines.recording import Record, Recorder, RolloutRecord
from roll_td.protocol import DataProto


def batch() -> DataProto:
    tensors = {
        "sample_id": torch.tensor([5, 3]),
        "response_mask": torch.tensor([[True, False], [True, True]]),
    }
    return DataProto(tensors, {"response": ["a", "b"], "tests": [["x"], None]})


def test_what_is_recorded_is_read_again(tmp_path: Path) -> None:
    recorder, own = Recorder(tmp_path, 2), batch()
    estimator = Estimator(AlgorithmConfig(), 4)
    for step in range(4):
        recorder.begin(own, estimator)
        own.update({"response_mask": own["response_mask"] & torch.tensor([[True], [False]])})
        done = DataProto(meta_info={"metrics": {"loss": Mean(0.5, 3)}})
        recorder.end(step, own, [own[[1]], own[[0]]], {"actor": [done]}, 0.25)
        own = batch()
    assert [path.name for path in sorted((tmp_path / "records").iterdir())] == [
        "step_0.pt",
        "step_2.pt",
    ]
    read = RolloutRecord.load(record_path(tmp_path, 2))
    assert (read.step, read.kl_coefficient, read.parts) == (2, 0.25, [[3], [5]])
    assert read.metrics == {"actor": [{"loss": 0.5}]} and read.estimator == estimator.state_dict()
    assert read.sampled_mask.tolist() == [[True, False], [True, True]]
    again = read.batch
    assert again["response_mask"].tolist() == [[True, False], [False, False]]
    assert again["tests"].tolist() == [["x"], None] and again["response"].tolist() == ["a", "b"]


def test_an_answer_that_is_not_in_a_step_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = torch.tensor([40, 12, 13, 14, 15, 41])
    record = Record(9, {"sample_id": ids}, {})
    record.check_sample(40)
    run = run_of(tmp_path)
    record.save(record_path(run, 9))
    assert main(["replay", str(run), "--step", "9", "--sample", "16"]) == 1
    told = "step 9 has no row of sample_id 16: it has 6, from 12 to 41, the nearest 12, 13, 14, 15"
    assert told in capsys.readouterr().err


def test_nothing_is_recorded_unless_asked_for(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, None)
    recorder.begin(batch(), Estimator(AlgorithmConfig(), 4))
    recorder.end(0, batch(), [], {}, 0.0)
    assert not list(tmp_path.iterdir())


RLVR = "roll_td.pipelines.rlvr.RLVRPipeline"


def run_of(folder: Path, **config: Any) -> Path:
    roles = {
        "actor_train": {"worker_cls": "a.B", "device_mapping": [0, 1, 2], "world_size": 3},
        "reward": {"worker_cls": "a.C", "device_mapping": None, "world_size": 2},
    }
    for role in roles.values():
        role["strategy_args"] = None
    given = {"pipeline_cls": RLVR, "num_nodes": 2, **roles, **config}
    (folder / "config.yaml").write_text(yaml.safe_dump(given))
    (folder / "records").mkdir(exist_ok=True)
    for step in (0, 10, 9):
        (folder / "records" / f"step_{step}.pt").touch()
    return folder


def test_the_config_of_a_replay_has_every_role_on_one_rank(tmp_path: Path) -> None:
    path = write_replay_config(str(run_of(tmp_path)), 9, 4)
    made = yaml.safe_load(path.read_text())
    assert path == tmp_path / "replay" / "step_9.yaml"
    assert made["replay"] == {"run_dir": str(tmp_path), "step": 9, "sample": 4}
    assert (made["actor_train"]["device_mapping"], made["actor_train"]["world_size"]) == ([0], 1)
    assert (made["reward"]["device_mapping"], made["reward"]["world_size"]) == (None, 1)
    assert (made["num_nodes"], made["num_cpu_ranks_per_node"]) == (1, 0)


def test_what_can_not_be_replayed_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="is no folder of a run: it has no config"):
        write_replay_config(str(tmp_path), 0, None)
    run_of(tmp_path)
    with pytest.raises(ValueError, match=r"no record of step 3: there are 0, 9, 10; see record_st"):
        write_replay_config(str(tmp_path), 3, None)
    assert main(["replay", str(tmp_path), "--step", "3"]) == 1
    assert "has no record of step 3" in capsys.readouterr().err
    run_of(tmp_path, pipeline_cls="my.Own")
    with pytest.raises(
        ValueError, match=r"is of my\.Own: what is replayed is roll_td.*RLVRPipeline, roll"
    ):
        write_replay_config(str(tmp_path), 0, None)
