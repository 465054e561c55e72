"""A job that is stopped goes on as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.harness import roll_td_run, write_config

ROLE = {"worker_cls": "drawing.DrawingWorker", "device_mapping": [0, 1]}


def metric_lines(run: Path) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


@pytest.mark.timeout(120)
def test_d09_every_stream_of_draws_goes_on(tmp_path: Path) -> None:  # D09
    config = write_config(tmp_path, "drawing.Drawing", a=ROLE, save_steps=2)
    assert roll_td_run(config, "exp_name=whole").finish(50).code == 0
    assert roll_td_run(config, "exp_name=cut", "dies_at=3").finish(50).code != 0
    resumed = roll_td_run(config, "exp_name=cut").finish(50)
    assert resumed.code == 0, resumed.out
    assert "cut/checkpoints/step_2" in resumed.out
    lines = metric_lines(tmp_path / "runs" / "cut")
    assert lines == metric_lines(tmp_path / "runs" / "whole")
    drawn = [value for line in lines for key, value in line.items() if key != "step"]
    assert len(set(drawn)) == len(drawn) == 36, "no two streams are alike"
