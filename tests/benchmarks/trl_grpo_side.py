"""The same rollout and update by TRL's GRPOTrainer, in a process of its own."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_side import STEPS, Clock

from roll_td.config.model import ModelConfig
from roll_td.models import load_model


def right(completions: list[Any], ground_truth: list[str], **_: object) -> list[float]:
    """1 for the sum after the last #."""
    texts = [turns[0]["content"] for turns in completions]
    sums = (text.rpartition("#")[2] if "#" in text else "" for text in texts)
    return [float(mine == true) for mine, true in zip(sums, ground_truth, strict=True)]


def main(path: str) -> None:
    """Make a trainer of what is at `path`; for each line read, print the seconds of a step."""
    given = json.loads(Path(path).read_text())
    completions = given["prompts"] * given["samples"]
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=STEPS, use_cpu=True, report_to=[],
        per_device_train_batch_size=completions, num_generations=given["samples"],
        max_completion_length=given["max_new_tokens"], temperature=1.0, beta=0.0,
        loss_type="dapo", epsilon=0.2, epsilon_high=0.28, learning_rate=1e-9, bf16=False,
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    clock = Clock()
    rows = [json.loads(line) for line in Path(given["data"]).read_text().splitlines()]
    for row in rows:
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    trainer = GRPOTrainer(
        model=load_model(ModelConfig(given["model"]), 0), reward_funcs=right, args=args,
        processing_class=AutoTokenizer.from_pretrained(given["model"]),
        train_dataset=Dataset.from_list(rows), callbacks=[clock],
    )  # fmt: skip
    for _ in sys.stdin:
        clock.taken.clear()
        trainer.train()
        taken = clock.taken[1:]
        print("SECONDS", sum(taken) / len(taken), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
