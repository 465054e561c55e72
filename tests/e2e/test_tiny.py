"""The shipped configs that learn within a minute on two CPU processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll_td.trackers import read_metrics

ROOT = Path(__file__).parents[2]
OUTSIDE = ("SLURM_", "TORCHELASTIC", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_")


def metrics(folder: Path, config: str, *overrides: str) -> dict[tuple[str, int], float]:
    """Run a config from the checkout; what its run in `folder` tells, by name and step."""
    name = config.replace("/", "-")
    ended = subprocess.run(
        [sys.executable, "-m", "roll_td.cli", "run", f"configs/{config}.yaml",
         f"output_dir={folder}", f"exp_name={name}", "save_steps=null", *overrides],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith(OUTSIDE)},
        capture_output=True,
        text=True,
        timeout=400,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return read_metrics(folder / name / "metrics.jsonl")


@pytest.mark.long
@pytest.mark.timeout(450)
def test_ppo_with_a_critic_learns_a_task_from_nothing(tmp_path: Path) -> None:
    told = metrics(tmp_path, "rlvr/ppo")
    assert told["val/pass@1", 0] <= 0.1 and told["val/pass@1", 80] >= 0.7
    explained = [told["critic/explained_variance", step] for step in range(80)]
    assert explained[0] == 0 and max(explained) >= 0.5


@pytest.mark.long
@pytest.mark.timeout(600)
def test_on_policy_distillation_comes_near_its_teacher(tmp_path: Path) -> None:
    model = tmp_path / "model"
    metrics(tmp_path, "sft/tiny", f"export_dir={model}")
    told = metrics(tmp_path, "onpolicy_distill/tiny", f"teachers.default.model.path={model}")
    apart = [told["val/teacher/reverse_kl", step] for step in (0, 50, 100)]
    assert apart[0] > 2 and apart[1] < 0.6 and 0 < apart[2] < 0.3
