"""The shipped fine-tuning, from the command line: what it leaves is what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll_td.trackers import read_metrics

ROOT = Path(__file__).parents[2]
TINY = "configs/sft/tiny.yaml"
OUTSIDE = ("SLURM_", "TORCHELASTIC", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_")
Run = Callable[..., Path]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("sft")

    def start(name: str, *overrides: str) -> Path:
        """Run configs/sft/tiny.yaml from the checkout; gives the run's folder."""
        places = (f"exp_name={name}", f"output_dir={folder}", f"export_dir={folder / name}/model")
        constant = "actor_train.training.lr_schedule=constant"
        ended = subprocess.run(
            [sys.executable, "-m", "roll_td.cli", "run", TINY, *places, constant, *overrides],
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if not k.startswith(OUTSIDE)},
            capture_output=True,
            text=True,
            timeout=140,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return folder / name

    return start


@pytest.fixture(scope="module")
def whole(run: Run) -> Path:
    return run("whole", "trackers.tensorboard.folder=events")


def numbers(run: Path) -> dict[tuple[str, int], float]:
    metrics = read_metrics(run / "metrics.jsonl")
    return {key: value for key, value in metrics.items() if not key[0].startswith("time/")}


def test_it_learns_and_leaves_metrics_checkpoints_and_events(whole: Path) -> None:
    metrics = numbers(whole)
    assert [step for key, step in metrics if key == "loss"] == list(range(40))
    assert metrics["loss", 0] > 4 and metrics["loss", 39] < 2 and metrics["val/loss", 39] < 2
    assert {path.name for path in (whole / "checkpoints").iterdir()} == {"step_30", "step_40"}
    assert len(list((whole / "events").glob("events.*"))) == 1


def test_transformers_loads_what_was_exported_and_finds_the_same_loss(whole: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    total, tokens = 0.0, 0
    for line in (ROOT / "configs/sft/tiny/validation.jsonl").read_text().splitlines():
        made = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_assistant_tokens_mask=True, return_dict=True
        )
        ids, is_answer = torch.tensor(made["input_ids"]), torch.tensor(made["assistant_masks"])
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        own = log_probs[torch.arange(len(ids) - 1), ids[1:]]
        total -= (own * is_answer[1:]).sum().item()
        tokens += int(is_answer[1:].sum())
    assert numbers(whole)["val/loss", 39] == pytest.approx(total / tokens, rel=1e-5)


def test_it_goes_on_with_another_number_of_ranks(run: Run, whole: Path) -> None:
    run("moved", "max_steps=20")
    moved = run("moved", "actor_train.device_mapping=[0]")
    assert numbers(moved) == pytest.approx(numbers(whole), rel=1e-3)
    weights, wanted = (load_file(f / "model" / "model.safetensors") for f in (moved, whole))
    assert weights.keys() == wanted.keys()
    assert all(torch.allclose(weights[name], wanted[name], atol=1e-3) for name in wanted)
