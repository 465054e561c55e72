"""What a step of GRPO costs: ours and TRL's GRPOTrainer, interleaved.

    python tests/benchmarks/grpo.py [--rounds N] [--model FOLDER]

Both on one device rank of one thread, with the quick start's model as fine-tuning leaves it (run
launch/quickstart before), its prompts and reward, 8 prompts of 8 samples of at most 34 tokens. Both
learn, so the learning rate is next to nothing. A step of ours is the whole of it: weights to
actor_infer, sampling, rewards, advantages, update. The framework's share is what is left of it
without what the strategies do (forward, backward, sampling, optimiser) and without the bytes of the
weights. A ratio is the median of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from beside import Beside
from starting import start_job

from roll_td import Dispatch, register
from roll_td.config.rlvr import RLVRConfig
from roll_td.pipelines.rlvr import RLVRPipeline
from roll_td.workers.actor import ActorWorker
from roll_td.workers.generation import GenerationWorker

ROOT = Path(__file__).parents[2]
PROMPTS, SAMPLES, MAX_NEW_TOKENS = 8, 8, 34


def timed(method):
    """`method` of a strategy, which adds its seconds to its `seconds`."""
    strategy = method.__self__

    def call(*args):
        began = time.perf_counter()
        result = method(*args)
        strategy.seconds += time.perf_counter() - began
        return result

    return call


class BenchActor(ActorWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config):
        super().initialize(pipeline_config)
        self.strategy.seconds = 0.0
        self.strategy.train_step = timed(self.strategy.train_step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def seconds(self):
        return self.strategy.seconds


class BenchGeneration(GenerationWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config):
        super().initialize(pipeline_config)
        self.strategy.seconds = 0.0
        self.strategy.generate = timed(self.strategy.generate)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def seconds(self):
        return self.strategy.seconds


class BenchPipeline(RLVRPipeline):
    def __init__(self, pipeline_config: RLVRConfig):
        super().__init__(pipeline_config)
        self.sent_s = 0.0

    def run(self) -> None:
        config = self.pipeline_config
        given = {
            "data": config.data.train, "model": config.model.path, "prompts": PROMPTS,
            "samples": SAMPLES, "max_new_tokens": MAX_NEW_TOKENS,
        }  # fmt: skip
        trl = Beside("trl_grpo_side.py", given, config.output_dir)
        taken: dict[str, list[float]] = {"ours": [], "trl": []}
        shares, weights, step = [], [], 0
        for i in range(-2, config.max_steps):
            for side in random.sample(list(taken), 2):
                if side == "trl":
                    seconds = trl.step()
                else:
                    before = self.actor_train.seconds() + self.actor_infer.seconds()
                    began = time.perf_counter()
                    self.one_step(step)
                    seconds = time.perf_counter() - began
                    inside = self.actor_train.seconds() + self.actor_infer.seconds() - before
                    step += 1
                if i >= 0:
                    taken[side].append(seconds)
                    if side == "ours":
                        shares.append(1 - (inside + self.sent_s) / seconds)
                        weights.append(self.sent_s)
        trl.end()
        ratio = statistics.median(t / o for t, o in zip(taken["trl"], taken["ours"], strict=True))
        times = "  ".join(f"{k} {statistics.median(v) * 1e3:.0f} ms" for k, v in taken.items())
        print(
            f"{times}  TRL/ours {ratio:.2f}  framework's share {statistics.median(shares):.1%}  "
            f"weights {statistics.median(weights) * 1e3:.1f} ms",
            flush=True,
        )

    def one_step(self, step: int) -> None:
        """As `run` of RLVRPipeline has it."""
        self.global_step = step
        self.update_weights(step)
        sent = self.metrics[-2]
        self.sent_s = next(v for k, v in sent.items() if k.startswith("time/weights_"))
        batch = self.rollout()
        self.compute_log_probs(batch)
        self.metrics.append(self.estimator.estimate(batch))
        self.update_policy(batch)
        self.log(self.metrics)
        self.metrics = []


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
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
            "batch_size": PROMPTS, "max_steps": given.rounds,
            "actor_train": role | {"worker_cls": f"{here.stem}.BenchActor", "training": {
                "learning_rate": 1e-9, "max_tokens_per_micro_batch": 8192}},
            "actor_infer": role | {"worker_cls": f"{here.stem}.BenchGeneration", "generation": {
                "num_return_sequences": SAMPLES, "max_new_tokens": MAX_NEW_TOKENS}},
        }  # fmt: skip
        return start_job(config, 3)


if __name__ == "__main__":
    sys.exit(main())
