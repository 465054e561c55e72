"""The SFT pipeline in a job of threads, with a worker that has no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from roll_td import DataProto, Dispatch, Sum, Worker, register
from roll_td.config.schema import read
from roll_td.config.sft import SFTConfig
from roll_td.pipelines.sft import SFTPipeline
from roll_td.placement import planned_places
from roll_td.runtime.inprocess import LocalJob
from roll_td.trackers import read_metrics

TOKENIZER = str(Path(__file__).parents[3] / "configs" / "sft" / "tiny" / "tokenizer")


class NoModel(Worker):
    """A row's loss is what its answer says, once a token."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def train_step(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"rows": Sum(len(data))}})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def val_step(self, data: DataProto) -> DataProto:
        tokens = (data["labels"] != -100).sum(-1)
        answer = data["input_ids"][torch.arange(len(data)), data["lengths"] - 2] - 21
        return DataProto({"loss": answer * tokens.float(), "tokens": tokens})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def do_checkpoint(self, folder: str) -> None:
        (Path(folder) / str(self.rank)).touch()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None: ...

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)


def write_rows(path: Path, answers: list[str]) -> str:
    rows = [{"q": "1+1", "a": answer} for answer in answers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(folder: Path, world_size: int, **given: Any) -> SFTPipeline:
    data = {"train": write_rows(folder / "train.jsonl", ["0", "1", "2"])}
    config = read(
        SFTConfig,
        {
            "output_dir": str(folder),
            "exp_name": "exp",
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": TOKENIZER},
            "data": {"prompt_key": "q", "response_key": "a"} | data | given.pop("data", {}),
            "actor_train": {
                "worker_cls": f"{__name__}.NoModel",
                "device_mapping": list(range(world_size)),
            },
            "batch_size": 2,
        }
        | given,
    ).value
    assert config is not None
    with LocalJob(planned_places(1, world_size, 1), 1, world_size):
        pipeline = SFTPipeline(config)
        pipeline.run()
        pipeline.close()
    return pipeline


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_l02_each_validation_row_counts_once(world_size: int, tmp_path: Path) -> None:  # L02
    for size in range(1, 10):
        folder = tmp_path / str(size)
        folder.mkdir()
        answers = ["1", "0", "1", "0", "1", "11", "2", "3", "1"][:size]
        data = {"validation": write_rows(folder / "validation.jsonl", answers)}
        run(folder, world_size, data=data, max_steps=1)
        metrics = read_metrics(folder / "exp" / "metrics.jsonl")
        tokens = [len(answer) + 1 for answer in answers]  # and the end token
        total = sum(int(a[-1]) * t for a, t in zip(answers, tokens, strict=True))
        assert metrics["val/loss", 0] == total / sum(tokens)


def test_it_is_as_long_as_asked_and_validates_when_due(tmp_path: Path) -> None:
    data = {"validation": write_rows(tmp_path / "validation.jsonl", ["1"])}
    export = tmp_path / "model"
    given = {"epochs": 4.5, "eval_steps": 3, "data": data, "export_dir": str(export)}
    pipeline = run(tmp_path, 2, **given)
    assert pipeline.global_step == 7, "4.5 epochs of 3 rows, 2 a step"
    metrics = read_metrics(tmp_path / "exp" / "metrics.jsonl")
    assert [step for key, step in metrics if key == "rows"] == list(range(7))
    assert [step for key, step in metrics if key == "val/loss"] == [2, 5, 6]
    assert metrics["epoch", 2] == 2.0
    assert {p.name for p in (tmp_path / "exp" / "checkpoints").iterdir()} == {"step_7"}
    assert export.is_dir()


def test_one_epoch_unless_said_and_no_validation_without_data(tmp_path: Path) -> None:
    assert run(tmp_path, 1).global_step == 2
    metrics = read_metrics(tmp_path / "exp" / "metrics.jsonl")
    assert metrics["epoch", 1] == pytest.approx(4 / 3)
    assert {key for key, _ in metrics} == {"rows", "epoch", "time/step_s", "time/tokens_per_s"}
