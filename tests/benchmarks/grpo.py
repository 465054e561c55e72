"""What a step of GRPO costs: ours and TRL's GRPOTrainer, interleaved.

    python tests/benchmarks/grpo.py [--rounds N] [--model FOLDER] [--prompts N]

Both on one device rank of one thread, with the quick start's model as fine-tuning leaves it (run
launch/quickstart before), its prompts and reward, 8 prompts (the quick start's own step has 32) of
8 samples of at most 34 tokens. Both learn, so the learning rate is next to nothing. A step of ours
is the whole of it: weights to actor_infer, sampling, rewards, advantages, update. Of both the mean
of several steps in a row is taken. The framework's share, of driver, dispatch and logging, is what
is left of it without the time in methods of workers (sampling, rewards, forward, backward,
optimiser) and without the bytes of the weights. A ratio is the median of the ratios of the rounds.
Of the tokens of these answers about half begin as those of another one, and are computed once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from beside import Beside
from starting import start_job

from roll_td import Dispatch, register
from roll_td.config.rlvr import RLVRConfig
from roll_td.pipelines.rlvr import RLVRPipeline
from roll_td.workers.actor import ActorWorker
from roll_td.workers.generation import GenerationWorker
from roll_td.workers.reward import RewardWorker

ROOT = Path(__file__).parents[2]
SAMPLES, MAX_NEW_TOKENS = 8, 34
STEPS = 8
"""In a row: while a step learns the driver is on its way to the next."""
SENT = "time/weights_"


class Timed:
    """A worker that knows how long its methods have taken."""

    seconds_taken = 0.0

    def timed(self, method, *args):
        began = time.perf_counter()
        result = method(*args)
        self.seconds_taken += time.perf_counter() - began
        return result

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def seconds(self):
        return self.seconds_taken


class BenchActor(Timed, ActorWorker):
    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, prefetch=True)
    def train_step(self, data):
        return self.timed(super().train_step, data)


class BenchGeneration(Timed, GenerationWorker):
    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, prefetch=True)
    def generate(self, data, generation, seed):
        return self.timed(super().generate, data, generation, seed)


class BenchReward(Timed, RewardWorker):
    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def compute_rewards(self, data):
        return self.timed(super().compute_rewards, data)


class BenchPipeline(RLVRPipeline):
    def __init__(self, pipeline_config: RLVRConfig):
        super().__init__(pipeline_config)
        self.sent_s = 0.0

    def run(self) -> None:
        config = self.pipeline_config
        given = {
            "data": config.data.train, "model": config.model.path, "prompts": config.batch_size,
            "samples": SAMPLES, "max_new_tokens": MAX_NEW_TOKENS,
        }  # fmt: skip
        trl = Beside("trl_grpo_side.py", given, config.output_dir)
        taken: dict[str, list[float]] = {"ours": [], "trl": []}
        shares, weights = [], []
        for i in range(-2, config.max_steps):
            for side in random.sample(list(taken), 2):
                if side == "trl":
                    seconds = trl.step()
                else:
                    before, self.sent_s = self.inside(), 0.0
                    began = time.perf_counter()
                    self.some_steps()
                    seconds = (time.perf_counter() - began) / STEPS
                    inside = (self.inside() - before + self.sent_s) / STEPS
                if i >= 0:
                    taken[side].append(seconds)
                    if side == "ours":
                        shares.append(1 - inside / seconds)
                        weights.append(self.sent_s / STEPS)
        trl.end()
        ratio = statistics.median(t / o for t, o in zip(taken["trl"], taken["ours"], strict=True))
        times = "  ".join(f"{k} {statistics.median(v) * 1e3:.0f} ms" for k, v in taken.items())
        print(
            f"{times}  TRL/ours {ratio:.2f}  framework's share {statistics.median(shares):.1%}  "
            f"weights {statistics.median(weights) * 1e3:.1f} ms",
            flush=True,
        )

    def inside(self) -> float:
        """Seconds in methods of workers so far; none runs beside another."""
        return sum(role.seconds() for role in (self.actor_train, self.actor_infer, self.reward))

    def some_steps(self) -> None:
        """As `run` of RLVRPipeline has it."""
        for _ in range(STEPS):
            self.update_weights(self.global_step)
            batch = self.rollout()
            self.ask(batch)
            self.estimate(batch)
            self.learn(batch)
            self.global_step += 1
        self.settle()

    def log(self, metrics: Any, step: int | None = None) -> None:
        """Also note the seconds that weights took."""
        self.sent_s += sum(v for one in metrics for k, v in one.items() if k.startswith(SENT))
        super().log(metrics, step)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--model", default=str(ROOT / "runs" / "quickstart-sft" / "model"))
    given = parser.parse_args()
    here = Path(__file__).resolve()
    with tempfile.TemporaryDirectory() as folder:
        role = {"device_mapping": [0]}
        config = {
            "pipeline_cls": f"{here.stem}.BenchPipeline", "output_dir": folder,
            "model": {"path": given.model},
            "data": {"train": str(ROOT / "runs" / "quickstart-data" / "prompts.jsonl"),
                     "prompt_key": "prompt", "keep": {"ground_truth": "ground_truth"}},
            "rewards": {"default": {"name": "exact_match", "settings": {"after": "#"}}},
            "batch_size": given.prompts, "max_steps": given.rounds,
            "actor_train": role | {"worker_cls": f"{here.stem}.BenchActor", "training": {
                "learning_rate": 1e-9, "max_tokens_per_micro_batch": 8192}},
            "actor_infer": role | {"worker_cls": f"{here.stem}.BenchGeneration", "generation": {
                "num_return_sequences": SAMPLES, "max_new_tokens": MAX_NEW_TOKENS}},
            "reward": {"worker_cls": f"{here.stem}.BenchReward"},
        }  # fmt: skip
        return start_job(config, 3)


if __name__ == "__main__":
    sys.exit(main())
