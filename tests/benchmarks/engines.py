"""The `vllm` strategy on a model of 309 MB: tokens per second, and weight updates.

    python tests/benchmarks/engines.py [--rounds N] [--prompts N] [--tokens T]

tokens: Pipeline → Cluster → scheduler → engine against vLLM's own LLM.generate, each engine in one
process with one thread, on the same prompts and settings, by turns. A ratio is our tokens per
second through those of vLLM.

weights: from fsdp2_train on two ranks to the engine of a third, against the same gathers and
broadcasts alone (weights.bare) and then the engine's load of the same bytes alone. A ratio is the
time of these two through that of an update, in which they overlap.

Ratios are medians of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from beside import Beside
from rollout import TOKENIZER, score
from starting import start_job
from transformers import LlamaConfig
from weights import MODEL

from roll_td import BaseConfig, BasePipeline, DataProto, Dispatch, WorkerConfig, register
from roll_td.config.model import ModelConfig
from roll_td.config.model_update import ModelUpdateConfig
from roll_td.config.scheduling import SchedulingConfig
from roll_td.pipelines.answering import start_roles
from roll_td.rollout.scheduler import Scheduler
from roll_td.runtime.together import call_together
from roll_td.weights.update import Pair
from roll_td.workers.generation import GenerationWorker

PROMPT_TOKENS = 32
ENGINE = {
    "max_model_len": 256, "max_num_seqs": 64, "kv_cache_memory_bytes": 256 << 20,
    "enforce_eager": True, "block_size": 32, "enable_chunked_prefill": False,
}  # fmt: skip
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
"""Of vLLM's own engine, as ours has it."""


class LoadingWorker(GenerationWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_again(self) -> float:
        """Seconds that the engine takes for the weights that lie there."""
        began = time.monotonic()
        self.strategy._load_all()
        return time.monotonic() - began


@dataclass
class BenchConfig(BaseConfig):
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: WorkerConfig = field(default_factory=WorkerConfig)
    infer: WorkerConfig = field(default_factory=WorkerConfig)
    rounds: int = 5
    prompts: int = 16


class Prompts:
    """Random ones, each another."""

    def draw(self, position: int, count: int) -> DataProto:
        places = torch.arange(position, position + count)
        ids = [
            torch.randint(3, 49000, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(n))
            for n in places.tolist()
        ]
        lengths = torch.full_like(places, PROMPT_TOKENS)
        return DataProto({"input_ids": torch.stack(ids), "lengths": lengths, "group_id": places})


class BenchPipeline(BasePipeline):
    def __init__(self, pipeline_config: BenchConfig):
        super().__init__(pipeline_config)
        self.actor, self.infer = start_roles(self, pipeline_config.actor, pipeline_config.infer)

    def run(self) -> None:
        self.weights()
        self.tokens()

    def weights(self) -> None:
        pair = Pair(self.actor, self.infer, ModelUpdateConfig())
        clusters, mb = [self.actor, self.infer], pair.plan.nbytes / 1e6
        sides: dict[str, Callable[[int], float]] = {
            "ours": lambda i: pair.update(i + 2)["time/weights_infer_s"],
            "collectives": lambda i: max(
                call_together(clusters, "weights.bare", plan=pair.plan, groups=pair._groups)
            ),
            "load": lambda i: max(self.infer.load_again()),
        }
        taken = self.by_turns(sides)
        for name, seconds in taken.items():
            middle = statistics.median(seconds)
            rate = mb / middle
            print(f"weights: {mb:.0f} MB, {name} {middle:.2f} s, {rate:.0f} MB/s", flush=True)
        ratios = [(c + e) / o for o, c, e in zip(*taken.values(), strict=True)]
        print(f"weights: ratio {statistics.median(ratios):.2f}", flush=True)

    def tokens(self) -> None:
        config = self.pipeline_config
        generation, count = config.infer.generation, config.prompts
        rounds = [Prompts().draw(n * count, count) for n in range(config.rounds + 1)]
        folder = Path(config.output_dir)
        LlamaConfig(**MODEL, architectures=["LlamaForCausalLM"]).save_pretrained(folder / "model")
        os.environ.update(ENVIRONMENT)
        given = {
            "engine": ENGINE | {
                "model": str(folder / "model"), "skip_tokenizer_init": True, "dtype": "float32",
                "load_format": "dummy", "logprobs_mode": "processed_logprobs",
            },
            "prompts": [prompts["input_ids"].tolist() for prompts in rounds],
            "sampling": {
                "temperature": 1.0, "logprobs": 0, "flat_logprobs": True, "ignore_eos": True,
                "detokenize": False, "max_tokens": generation.max_new_tokens,
            },
            "tokens": count * generation.max_new_tokens,
        }  # fmt: skip
        beside = Beside("vllm_side.py", given, str(folder))
        scheduler = Scheduler(
            self.infer, Prompts(), score, lambda rows: True,
            SchedulingConfig(deterministic=False), generation, count, 0, seed=0,
        )  # fmt: skip

        def ours(i: int) -> float:
            began = time.monotonic()
            batch, _, _ = scheduler.batch((i + 1) * count, 1)
            seconds = time.monotonic() - began
            # one in thousands ends by itself
            assert int(batch["response_mask"].sum()) > 0.9 * given["tokens"]
            return seconds

        taken = self.by_turns({"ours": ours, "vllm": lambda i: beside.step()})
        beside.end()
        scheduler.close()
        for name, seconds in taken.items():
            rates = [given["tokens"] / s for s in seconds]
            print(f"tokens: {name} {statistics.median(rates):.0f} per second", flush=True)
        ratios = [theirs / own for own, theirs in zip(*taken.values(), strict=True)]
        shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"tokens: ratio {statistics.median(ratios):.3f} ({shown})", flush=True)

    def by_turns(self, sides: dict[str, Callable[[int], float]]) -> dict[str, list[float]]:
        """Seconds of each side, round for round; the first one doesn't count."""
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for i in range(-1, self.pipeline_config.rounds):
            for name in list(sides)[:: -1 if i % 2 else 1]:
                seconds = sides[name](i)
                if i >= 0:
                    taken[name].append(seconds)
        return taken


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()

    def role(strategy: str, devices: list[int], worker: str, **more: object) -> dict[str, object]:
        return {
            "device_mapping": devices, "worker_cls": worker,
            "strategy_args": {"strategy_name": strategy, **more},
        }  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        infer = role("vllm", [2], "engines.LoadingWorker", strategy_config=ENGINE)
        config = {
            "pipeline_cls": "engines.BenchPipeline", "output_dir": folder,
            "model": {"config": MODEL, "tokenizer": str(Path(TOKENIZER).resolve())},
            "actor": role("fsdp2_train", [0, 1], "roll_td.workers.base.ModelWorker"),
            "infer": infer | {"generation": {"max_new_tokens": given.tokens}},
            "rounds": given.rounds, "prompts": given.prompts,
        }  # fmt: skip
        return start_job(config, 4)


if __name__ == "__main__":
    sys.exit(main())
