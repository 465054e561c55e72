"""The same work by TRL's SFTTrainer, in a process of its own: in a job it would take the ranks."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from roll_td.config.model import ModelConfig
from roll_td.models import load_model

STEPS = 3
"""Of one round; the first is not counted."""


class Clock(TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.taken.append(time.perf_counter() - self.began)


def main(path: str) -> None:
    """Make a trainer of what is at `path`; for each line read, print the seconds of a step."""
    fields, rows, micro_batch_size = json.loads(Path(path).read_text())
    args = SFTConfig(
        output_dir=tempfile.mkdtemp(), max_steps=STEPS, use_cpu=True, report_to=[],
        per_device_train_batch_size=micro_batch_size, bf16=False, max_length=None,
        gradient_accumulation_steps=len(rows) // micro_batch_size, learning_rate=1e-5,
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    clock = Clock()
    trainer = SFTTrainer(
        model=load_model(ModelConfig(config=fields), 0), args=args,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=AutoTokenizer.from_pretrained("configs/sft/tiny/tokenizer"),
        callbacks=[clock],
    )  # fmt: skip
    for _ in sys.stdin:
        clock.taken.clear()
        trainer.train()
        taken = clock.taken[1:]
        print("SECONDS", sum(taken) / len(taken), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
