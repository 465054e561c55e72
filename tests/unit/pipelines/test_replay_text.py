"""A recorded step of fine-tuning, done again in a job of threads, by a worker without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_td.config.load import load, resolved_yaml
from roll_td.config.replay import SFTReplayConfig, record_path, write_replay_config
from roll_td.pipelines.recording import Record
from roll_td.pipelines.replay_text import SFTReplayPipeline
from roll_td.placement import planned_places
from roll_td.runtime.inprocess import LocalJob
from tests.unit.pipelines.test_sft import run, write_rows


def recorded(folder: Path) -> Path:
    """The folder of a run of two ranks, two steps and two records."""
    cls = "roll_td.pipelines.sft.SFTPipeline"
    run_dir = folder / "exp"
    done = run(folder, 2, pipeline_cls=cls, max_steps=2, record_steps=1)
    (run_dir / "config.yaml").write_text(resolved_yaml(done.pipeline_config), encoding="utf-8")
    return run_dir


def replayed(run_dir: Path, step: int, sample: int | None = None) -> None:
    config = load(write_replay_config(str(run_dir), step, sample))
    assert isinstance(config, SFTReplayConfig)
    with LocalJob(planned_places(1, 1, 1), 1, 1):
        pipeline = SFTReplayPipeline(config)
        pipeline.run()
        pipeline.close()


def test_what_differs_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = recorded(tmp_path)
    record = Record.load(record_path(run_dir, 1))
    assert record.columns["sample_id"].tolist() == [2, 3]
    assert record.metrics == {"train": [{"rows": 2.0}]}
    replayed(run_dir, 0)
    out = capsys.readouterr().out
    assert "no difference" in out
    told = {tuple(line.split()[:2]) for line in out.splitlines()}
    wanted = [("inputs", "input_ids"), ("inputs", "lengths"), ("inputs", "labels")]
    assert {*wanted, ("rows", "loss"), ("rows", "tokens"), ("losses", "rows")} < told

    replayed(run_dir, 1)
    out = capsys.readouterr().out
    assert "no weights, so no rows and losses" in out and "no difference" in out
    assert "rows  " not in out


def test_rows_of_other_data_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = recorded(tmp_path)
    write_rows(tmp_path / "train.jsonl", ["5", "6", "7"])
    replayed(run_dir, 0, 1)
    out = capsys.readouterr().out
    assert "first difference: inputs, input_ids of sample 1, token 6: recorded 2" in out
    assert "text: '<bos><user>1+1<assistant>" in out and "losses" not in out
    write_rows(tmp_path / "train.jsonl", ["55", "66", "77"])
    replayed(run_dir, 0)
    shapes = "the step: recorded [2, 8], computed [2, 9]"
    assert f"first difference: inputs, input_ids of {shapes}" in capsys.readouterr().out
