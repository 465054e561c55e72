"""Fine-tuning in real jobs: stopped at any moment, it ends as if it had never been."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dist.harness import Ended, Job, roll_td_run

TINY = Path(__file__).parents[2] / "configs" / "sft" / "tiny"
STEPS, DRIVER, WORKER = 24, 2, 1
ROUNDS = int(os.environ.get("ROLL_TD_KILL_ROUNDS", "1"))
"""Each has three kills. By hand: 10."""
START_S = 100
"""How long a job may take on a busy machine."""


def write_sft(folder: Path, **given: Any) -> Path:
    """A config of two ranks, with checkpoints every 4 steps; its runs lie in `folder`."""
    made = yaml.safe_load((TINY.parent / "tiny.yaml").read_text())
    made["model"]["tokenizer"] = str(TINY / "tokenizer")
    made["data"] |= {kind: str(TINY / f"{kind}.jsonl") for kind in ("train", "validation")}
    made |= {"output_dir": str(folder), "max_steps": STEPS, "save_steps": 4, "eval_steps": 6}
    made |= {"export_dir": None, "batch_size": 16}
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(made | given))
    return path


def answering() -> dict[str, Any]:
    """A config whose model learns to answer a word with its first letter, and is tried on words
    that it has not seen by four answers each, drawn by chance."""
    words = {"prompt_key": "prompt", "max_length": 16}
    folder = TINY.parents[1] / "rlvr" / "ppo"
    return {
        "data": {"train": f"{folder}/train.jsonl", "response_key": "ground_truth"} | words,
        "prompts": {"train": f"{folder}/held_out.jsonl", "keep": {"ground_truth": "ground_truth"}}
        | words,
        "rewards": {"default": {"name": "exact_match"}},
        "validation": {"generation": {"num_return_sequences": 4, "max_new_tokens": 3}},
        "batch_size": 64,
        "actor_train": {"device_mapping": [0, 1], "training": {"learning_rate": 6.0e-3}},
    }


def sampled() -> dict[str, Any]:
    """A config whose model is tried on words, by what share of its answers is digits."""
    given = answering()
    asked = {"generation": {"temperature": 1.0, "max_new_tokens": 6}}
    rewards = {"default": {"name": "rlvr_scenarios.digits"}}
    return {"prompts": given["prompts"], "rewards": rewards, "validation": asked}


def start(config: Path, name: str, *overrides: str) -> Job:
    return roll_td_run(
        config, f"exp_name={name}", f"export_dir={config.parent / name / 'model'}", *overrides
    )


def finish(config: Path, name: str, *overrides: str) -> Ended:
    ended = start(config, name, *overrides).finish(START_S)
    assert ended.code == 0, ended.out
    return ended


def finish_killed(config: Path) -> None:
    """Let the run `killed` end from its checkpoint, which may be the one of its last step."""
    out = finish(config, "killed").out
    assert "going on from" in out or "nothing to do" in out


def result(folder: Path) -> tuple[bytes, list[dict[str, float]]]:
    """The exported weights, and the metrics line by line, timings apart."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = [
        {k: v for k, v in json.loads(line).items() if not k.startswith("time")} for line in lines
    ]
    return (folder / "model" / "model.safetensors").read_bytes(), metrics


def kill_rank(job: Job, rank: int) -> None:
    """SIGKILL to a rank of a job, as the launcher has numbered it."""
    for pid in job.processes():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment:
                os.kill(pid, signal.SIGKILL)
                return
    raise AssertionError(f"no rank {rank}: {job.out}")


def wait_for_checkpoint(job: Job, folder: Path, since_ns: int) -> None:
    """Wait until a checkpoint is being written; one that a killed run has left does not count."""
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(FileNotFoundError):  # it has got its name meanwhile
            if any(p.stat().st_ctime_ns > since_ns for p in folder.glob("step_*.partial")):
                return
        assert time.monotonic() < deadline and job.process.poll() is None, job.out
        time.sleep(0.002)


def kill_somewhere(config: Path, name: str, kind: str, draws: random.Random, steps: range) -> None:
    """Start or resume a run and kill its driver or a worker, in one of `steps`, or either of them
    during a checkpoint."""
    since_ns = time.time_ns()
    job = start(config, name)
    if kind == "checkpoint":
        wait_for_checkpoint(job, config.parent / name / "checkpoints", since_ns)
    else:
        job.wait_for(f"step {draws.choice(steps)}/", START_S)
    time.sleep(draws.uniform(0, 0.1))
    kill_rank(job, {"driver": DRIVER, "worker": WORKER}.get(kind, draws.choice([DRIVER, WORKER])))
    assert job.finish(START_S).code != 0


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))  # of a checkpoint's 600,000
from roll_td.cli import main
sys.exit(main())
"""


def fill_disk(config: Path, name: str) -> None:
    """Resume a run whose next checkpoint finds no room."""
    ended = Job(["-c", LIMITED, "run", str(config), f"exp_name={name}"]).finish(START_S)
    assert ended.code == 1
    assert "actor_train.write_checkpoint failed (worker " in ended.cause
    assert "MB are free there" in ended.cause.splitlines()[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_killed_at_any_moment_and_out_of_disk_it_ends_as_if_it_had_never_been(
    seed: int, tmp_path: Path
) -> None:
    draws = random.Random(seed)
    config = write_sft(tmp_path, **answering())
    finish(config, "whole")
    weights, metrics = result(tmp_path / "whole")
    assert [line["step"] for line in metrics if "loss" in line] == list(range(STEPS))
    right = {line["step"]: line["val/pass@1"] for line in metrics if "val/pass@1" in line}
    assert sorted(right) == [0, 6, 12, 18, 24]
    assert right[0] < 0.05 and right[12] < right[24] and right[24] > 0.7
    kinds = {"driver": range(4, 9), "worker": range(9, 15), "checkpoint": range(0)}
    for kind, steps in kinds.items():
        kill_somewhere(config, "killed", kind, draws, steps)
    fill_disk(config, "killed")
    ended = finish(config, "killed")
    assert "going on from" in ended.out and ".partial does not count" in ended.out
    folder = tmp_path / "killed" / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"step_20", "step_24"}
    assert result(tmp_path / "killed") == (weights, metrics)
