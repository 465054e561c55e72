"""What a training step costs: ours, a bare PyTorch loop and TRL's SFTTrainer, interleaved.

    python tests/benchmarks/sft.py [--rounds N]

All sides run on one rank of one job, with the same model (the quick start's, 434,048 parameters)
and the same rows. `ours` is the time of the driver's call; `inside` that of the strategy in it, so
what is left is the framework's share. `even` rows have one length; `uneven` ones have 16 to 512
tokens, and TRL and the bare loop pad them. A ratio is the median of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from beside import Beside
from starting import start_job

from roll_td import (
    BaseConfig,
    BasePipeline,
    Cluster,
    DataProto,
    Dispatch,
    WorkerConfig,
    register,
)
from roll_td.config.model import ModelConfig
from roll_td.models import load_model
from roll_td.workers.sft import SFTWorker

MODEL = {
    "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 384, "vocab_size": 57,
    "tie_word_embeddings": True,
}  # fmt: skip
ROWS = 32


def batch(uneven: bool) -> DataProto:
    torch.manual_seed(0)
    lengths = torch.randint(16, 513, (ROWS,)) if uneven else torch.full((ROWS,), 128)
    ids = torch.randint(1, 57, (ROWS, int(lengths.max())))
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    labels = ids.masked_fill(~real, -100)
    return DataProto({"input_ids": ids * real, "labels": labels, "lengths": lengths})


class BenchWorker(SFTWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config):
        super().initialize(pipeline_config)
        self.model = load_model(pipeline_config.model, 0).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, betas=(0.9, 0.95))

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def ours(self, data):
        began = time.perf_counter()
        self.train_step(data)
        return time.perf_counter() - began

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def bare(self, data):
        """Micro-batches of as many rows, padded, as a loop is usually written."""
        began, size = time.perf_counter(), self.worker_config.training.micro_batch_size
        tokens = (data["labels"][:, 1:] != -100).sum()
        for start in range(0, len(data), size):
            rows = slice(start, start + size)
            ids, labels = data["input_ids"][rows], data["labels"][rows]
            mask = (torch.arange(ids.shape[1]) < data["lengths"][rows][:, None]).long()
            logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), reduction="sum"
            )
            (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began


def trl_of(data: DataProto, micro_batch_size: int, folder: str) -> Beside:
    """TRL's side, with the same rows."""
    lengths = data["lengths"].tolist()
    rows = [ids[:n].tolist() for ids, n in zip(data["input_ids"], lengths, strict=True)]
    return Beside("trl_side.py", [MODEL, rows, micro_batch_size], folder)


@dataclass
class BenchConfig(BaseConfig):
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: WorkerConfig = field(default_factory=WorkerConfig)
    rounds: int = 15
    uneven: bool = False


class BenchPipeline(BasePipeline):
    def __init__(self, pipeline_config: BenchConfig):
        super().__init__(pipeline_config)
        role = pipeline_config.actor
        self.actor = Cluster("actor", role.worker_cls, self.resource_manager, role)
        self.actor.initialize(pipeline_config)

    def run(self) -> None:
        data, taken = batch(self.pipeline_config.uneven), {s: [] for s in ("ours", "bare", "trl")}
        size = self.pipeline_config.actor.training.micro_batch_size
        trl = trl_of(data, size, self.pipeline_config.output_dir)
        inside: list[float] = []
        for i in range(-2, self.pipeline_config.rounds):
            for side in random.sample(list(taken), 3):
                began = time.perf_counter()
                (seconds,) = [trl.step()] if side == "trl" else getattr(self.actor, side)(data)
                whole = time.perf_counter() - began
                if i >= 0:
                    taken[side].append(whole if side == "ours" else seconds)
                    inside += [seconds] if side == "ours" else []
        trl.end()
        ours = taken["ours"]
        ratios: dict[str, Any] = {
            side: statistics.median(x / y for x, y in zip(taken[side], ours, strict=True))
            for side in ("bare", "trl")
        }
        share = statistics.median(1 - x / y for x, y in zip(inside, ours, strict=True))
        name = "uneven" if self.pipeline_config.uneven else "even"
        times = "  ".join(f"{k} {statistics.median(v) * 1e3:.1f} ms" for k, v in taken.items())
        print(
            f"{name:7} {times}  bare/ours {ratios['bare']:.2f}  TRL/ours {ratios['trl']:.2f}  "
            f"framework's share {share:.1%}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    here = Path(__file__).resolve()
    code = 0
    for uneven in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            config = {
                "pipeline_cls": f"{here.stem}.BenchPipeline", "output_dir": folder,
                "model": {"config": MODEL}, "rounds": rounds, "uneven": uneven,
                "actor": {"worker_cls": f"{here.stem}.BenchWorker", "device_mapping": [0],
                          "strategy_args": {"strategy_name": "fsdp2_train"}},
            }  # fmt: skip
            code |= start_job(config, 2)
    return code


if __name__ == "__main__":
    sys.exit(main())
