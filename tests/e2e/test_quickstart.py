"""The README's first command, apart from the installation, as it is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OUTSIDE = ("SLURM_", "TORCHELASTIC", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_")


def start(folder: Path) -> str:
    """What the script prints, run in a folder that has what it needs of the checkout."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(OUTSIDE)}
    path = f"{Path(sys.executable).parent}:{env['PATH']}"
    ended = subprocess.run(
        ["bash", str(folder / "launch" / "quickstart")],
        env=env | {"PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.mark.timeout(1200)
def test_the_quick_start_learns_to_add_and_goes_on_where_it_was(tmp_path: Path) -> None:
    for name in ("launch", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "launch" / "install").write_text("#!/bin/sh\n")  # the tests have installed it
    first = start(tmp_path)
    lines = (tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()
    scores = {
        line["step"]: line["val/score"] for line in map(json.loads, lines) if "val/score" in line
    }
    assert list(scores) == [0, 20, 40, 60, 80]
    assert 0.2 <= scores[0] <= 0.4 and scores[80] >= 0.8
    trained = [line for line in map(json.loads, lines) if "actor/loss" in line]
    assert len(trained) == 80 and all(line["actor/ratio"] == 1 for line in trained)
    assert max(line["actor/log_prob_gap_max"] for line in trained) < 1e-3
    assert "runs/quickstart/report.html" in first
    assert "<svg" in (tmp_path / "runs/quickstart/report.html").read_text()
    again = start(tmp_path)
    assert again.count("nothing to do") == 2
    assert (tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines() == lines
