"""The rollout scheduler, mostly on engines whose token times are known (mock_infer), in real jobs.

    python tests/benchmarks/rollout.py uneven|ahead|real [--rounds N]

uneven: lengths with a tail of ten times the mean, 3 engines of 8 places. A ratio is the makespan
through the bound max(work / places, longest answer); 1 can't be beaten. `new` prompts were never
seen, so that nobody can tell which to begin first, and a long one that begins late ends late;
`seen` ones were, and the longest begin first. `ahead`: new ones, a batch ahead of what is learnt
from, so that the places which are free at the end of one batch go to the next; of four batches
between one before and one after.

ahead: RLVR on a rank that trains and one that answers, each 2 s a step, by turns (ratio 0) and
with answers a step ahead (ratio 1). A ratio is steps per hour through those by turns.

real: tokens per second of hf_infer on the quick start's model, 64 at once on one engine; by the
scheduler through by the blocking call, interleaved. CPU seconds of the engine's rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from generation import QUICK_START
from starting import start_job

from roll_td import BaseConfig, BasePipeline, DataProto, Dispatch, WorkerConfig, register
from roll_td.config.model import ModelConfig
from roll_td.config.scheduling import SchedulingConfig
from roll_td.metrics import merge_metrics
from roll_td.pipelines.answering import start_roles
from roll_td.pipelines.rlvr import RLVRPipeline
from roll_td.rollout.scheduler import Scheduler
from roll_td.workers.actor import ActorWorker
from roll_td.workers.generation import GenerationWorker

ENGINES, PLACES, TOKEN_S = 3, 8, 0.01
AHEAD = 4
"""Batches."""
LONGEST, SHORTEST, TAIL = 500, 12, 1.25
"""Of the answers: with this exponent of their Pareto distribution the mean is 50 tokens."""
TOKENIZER = "configs/sft/tiny/tokenizer"


@dataclass
class BenchConfig(BaseConfig):
    model: ModelConfig = field(default_factory=lambda: ModelConfig(tokenizer=TOKENIZER))
    infer: WorkerConfig = field(default_factory=WorkerConfig)
    prompts: int = 200
    rounds: int = 5


class Prompts:
    """So many prompts of one token each, again and again."""

    def __init__(self, count: int) -> None:
        self.count = count

    def draw(self, position: int, count: int) -> DataProto:
        places = torch.arange(position, position + count)
        ids = (places % self.count)[:, None]
        return DataProto({"input_ids": ids, "lengths": torch.ones_like(places), "group_id": places})


def score(rows: DataProto) -> dict[str, Any]:
    rows.update({"scores": torch.zeros(len(rows))})
    return {}


class Uneven(BasePipeline):
    """Each batch is all prompts, the first of them new to the scheduler."""

    def __init__(self, pipeline_config: BenchConfig):
        super().__init__(pipeline_config)
        (self.infer,) = start_roles(self, pipeline_config.infer)

    def run(self) -> None:
        config = self.pipeline_config
        found: dict[str, list[tuple[float, float]]] = {"new": [], "seen": [], "ahead": []}
        for number in range(config.rounds):
            scheduler = self.scheduler(number, Prompts(config.prompts), deterministic=False)
            for batch, kind in enumerate(("new", "seen")):
                with scheduler.updating(0):  # a rest, without new weights
                    pass
                found[kind].append(self.measure(f"round {number} {kind}", scheduler, batch, 1, 9))
            scheduler.close()
            endless = Prompts((AHEAD + 2) * config.prompts)
            scheduler = self.scheduler(number, endless, async_generation_ratio=1.0)
            scheduler.metrics(scheduler.batch(0, AHEAD + 2)[0])
            what = f"round {number} ahead"
            found["ahead"].append(self.measure(what, scheduler, 1, AHEAD, AHEAD + 1))
            scheduler.close()
        for kind, results in found.items():
            ratios = [ratio for ratio, _ in results]
            idle = statistics.median(idle for _, idle in results)
            print(f"{kind}: makespan through bound {statistics.median(ratios):.3f}, worst "
                  f"{max(ratios):.3f}; engines idle {idle:.1%}", flush=True)  # fmt: skip

    def scheduler(self, seed: int, prompts: Prompts, **how: Any) -> Scheduler:
        config = self.pipeline_config
        return Scheduler(
            self.infer, prompts, score, lambda rows: True,
            SchedulingConfig(in_flight_per_engine=PLACES, **how),
            config.infer.generation, config.prompts, 0, seed,
        )  # fmt: skip

    def measure(
        self, what: str, scheduler: Scheduler, first: int, count: int, left: int
    ) -> tuple[float, float]:
        """Makespan of so many batches through its bound, and the share of time without work."""
        began_s, tokens, idle = time.monotonic(), [], []
        for number in range(count):
            position = (first + number) * self.pipeline_config.prompts
            batch, _, _ = scheduler.batch(position, left - number)
            tokens += batch["response_mask"].sum(-1).tolist()
            idle.append(merge_metrics(scheduler.metrics(batch))["rollout/idle"])
        taken_s = time.monotonic() - began_s
        bound_s = max(sum(tokens) / ENGINES / PLACES, max(tokens)) * TOKEN_S
        tail = max(tokens) / statistics.mean(tokens)
        print(f"{what}: {len(tokens)} answers, tail {tail:.1f} means, bound {bound_s:.2f} s, "
              f"ratio {taken_s / bound_s:.3f}, idle {statistics.mean(idle):.1%}",
              flush=True)  # fmt: skip
        return taken_s / bound_s, statistics.mean(idle)


def uneven(folder: str, rounds: int) -> int:
    """The job of `uneven`."""
    mock = {
        "token_s": TOKEN_S, "slots": PLACES, "tail": TAIL, "min_tokens": SHORTEST,
        "max_tokens": LONGEST, "lengths_of": "prompt",
    }  # fmt: skip
    infer = {
        "worker_cls": "roll_td.workers.generation.GenerationWorker",
        "device_mapping": list(range(ENGINES)),
        "strategy_args": {"strategy_name": "mock_infer", "strategy_config": mock},
        "generation": {"max_new_tokens": LONGEST + 1, "num_return_sequences": 2},
    }
    config = {"pipeline_cls": "rollout.Uneven", "output_dir": folder, "infer": infer}
    return start_job(config | {"rounds": rounds}, ENGINES + 1)


STEP_S, STEPS = 2.0, 8
ANSWERED = {"num_return_sequences": 4, "max_new_tokens": 101}


class SlowActor(ActorWorker):
    """A small model whose step takes STEP_S."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def train_step(self, data: DataProto) -> DataProto:
        began_s = time.monotonic()
        learnt = super().train_step(data)
        time.sleep(max(0.0, STEP_S - (time.monotonic() - began_s)))
        return learnt


def first_digit(response: str) -> float:
    return float(response[:1].isdigit())


class Ahead(RLVRPipeline):
    """Tells how long its steps took, the first two and the last aside."""

    def run(self) -> None:
        self.began_s: list[float] = []
        super().run()
        taken_s = (self.began_s[-1] - self.began_s[2]) / (len(self.began_s) - 3)
        (self.run_dir / "step_s").write_text(str(taken_s))

    def rollout(self) -> DataProto:
        self.began_s.append(time.monotonic())
        return super().rollout()


def ahead(folder: str, rounds: int) -> int:
    """The jobs of `ahead`."""
    data = Path(folder) / "train.jsonl"
    data.write_text("".join(json.dumps({"word": f"{n}a"}) + "\n" for n in range(100, 164)))
    mock = {"token_s": STEP_S / 100, "slots": 32, "min_tokens": 100, "max_tokens": 100}
    config = {
        "pipeline_cls": "rollout.Ahead",
        "config_cls": "roll_td.config.rlvr.RLVRConfig",
        "output_dir": folder,
        "model": {"config": QUICK_START | {"vocab_size": 101}, "tokenizer": TOKENIZER},
        "data": {"train": str(data), "prompt_key": "word", "keep": {"word": "word"}},
        "rewards": {"default": {"name": "rollout.first_digit"}},
        "batch_size": 8,
        "max_steps": STEPS,
        "actor_train": {"device_mapping": [0], "worker_cls": "rollout.SlowActor"},
        "actor_infer": {
            "device_mapping": [1],
            "strategy_args": {"strategy_name": "mock_infer", "strategy_config": mock},
            "generation": ANSWERED,
        },
    }
    step_s: dict[float, list[float]] = {0.0: [], 1.0: []}
    for number in range(rounds):
        for ratio, found in step_s.items():
            name = f"{ratio:g}_{number}"
            scheduling = {"async_generation_ratio": ratio}
            scheduling |= {} if ratio else {"deterministic": False}
            if code := start_job(config | {"exp_name": name, "scheduling": scheduling}, 3):
                return code
            found.append(float((Path(folder) / name / "step_s").read_text()))
        turns, ahead = step_s[0.0][-1], step_s[1.0][-1]
        print(f"round {number}: a step by turns {turns:.2f} s, ahead {ahead:.2f} s, "
              f"ratio {turns / ahead:.2f}", flush=True)  # fmt: skip
    ratios = [turns / ahead for turns, ahead in zip(*step_s.values(), strict=True)]
    print(f"ahead: steps per hour through those by turns {statistics.median(ratios):.2f}")
    return 0


class Clocked(GenerationWorker):
    """Tells how much CPU time its rank has used."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def cpu_s(self) -> float:
        return time.process_time()


class Real(BasePipeline):
    """The same prompts by one call and by requests, by turns."""

    def __init__(self, pipeline_config: BenchConfig):
        super().__init__(pipeline_config)
        (self.infer,) = start_roles(self, pipeline_config.infer)

    def run(self) -> None:
        config = self.pipeline_config
        generation, count = config.infer.generation, config.prompts
        prompts = Prompts(50)
        scheduler = Scheduler(
            self.infer, prompts, score, lambda rows: True, SchedulingConfig(deterministic=False,
            in_flight_per_engine=80), generation, count, 0, seed=1,
        )  # fmt: skip
        ratios: list[tuple[float, float]] = []
        for number in range(-1, config.rounds):
            position = (number + 1) * count
            rates = []
            for by_requests in (False, True):
                began = time.monotonic(), self.infer.cpu_s()
                if by_requests:
                    batch, _, _ = scheduler.batch(position, 99)
                else:
                    asked = prompts.draw(position, count)
                    asked.update({"sample_id": asked["group_id"]})
                    batch = self.infer.generate(asked, generation, 1)
                tokens = int(batch["response_mask"].sum())
                wall_s, cpu_s = time.monotonic() - began[0], self.infer.cpu_s() - began[1]
                rates.append((tokens / wall_s, tokens / cpu_s))
            (wall, cpu), (wall_r, cpu_r) = rates
            print(f"round {number}: {tokens} tokens, by one call {wall:.0f} a second, {cpu:.0f} a "
                  f"CPU second, by requests {wall_r:.0f}, {cpu_r:.0f}", flush=True)  # fmt: skip
            ratios += [(wall_r / wall, cpu_r / cpu)] if number >= 0 else []
        for what, found in zip(("second", "CPU second"), zip(*ratios, strict=True), strict=True):
            print(f"real: tokens per {what}, by requests through by one call "
                  f"{statistics.median(found):.2f}", flush=True)  # fmt: skip
        scheduler.close()


def real(folder: str, rounds: int) -> int:
    """The job of `real`."""
    infer = {
        "worker_cls": "rollout.Clocked",
        "device_mapping": [0],
        "strategy_args": {"strategy_name": "hf_infer", "strategy_config": {"batch_size": 64}},
        "generation": {"max_new_tokens": 80, "num_return_sequences": 8},
    }
    model = {"config": QUICK_START, "tokenizer": TOKENIZER}
    config = {"pipeline_cls": "rollout.Real", "output_dir": folder, "infer": infer, "model": model}
    return start_job(config | {"rounds": rounds, "prompts": 40}, 2)


if __name__ == "__main__":
    jobs = {"uneven": uneven, "ahead": ahead, "real": real}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=jobs)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(jobs[given.what](folder, given.rounds))
