"""A weight update of 300 MB, 2 source ranks to 1 other, against bare gathers and broadcasts.

    python tests/benchmarks/weights.py [--rounds N] [--bucket-mb MB …] [--bf16]

Both sides run on the same ranks of one job, by turns. `bare` gathers the same shards, weight by
weight, into memory that is there already, and broadcasts as many bytes in as many pieces, from the
same owners, without waiting for one before the next; nothing is planned, packed, cast or loaded. A
ratio above 1 says that the update is faster; it is the median of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from starting import start_job

from roll_td import BaseConfig, BasePipeline, WorkerConfig
from roll_td.config.model import ModelConfig
from roll_td.config.model_update import ModelUpdateConfig
from roll_td.runtime.together import Here, call_together
from roll_td.runtime.transport import Group
from roll_td.strategies import states
from roll_td.weights.plan import UpdatePlan
from roll_td.weights.update import Pair
from roll_td.workers.base import ModelWorker

# as SmolLM2-135M, with 14 of its 30 layers: 309 MB
MODEL = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 14, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
    "tie_word_embeddings": True,
}  # fmt: skip


class BenchWorker(ModelWorker):
    pass


def bare(here: Here, plan: UpdatePlan, groups: Mapping[int, Group]) -> float:
    """Seconds that the collectives of an update take by themselves on this rank."""
    source = here.workers.get(plan.source)
    shards: dict[str, torch.Tensor] = {}
    if source is not None:
        named = states.named(source.strategy.model)
        shards = {name: states.local(weight).view(-1) for name, weight in named}
    whole = torch.zeros(2 * max(map(len, shards.values()), default=0))
    buffer, works = torch.zeros(plan.bucket_bytes, dtype=torch.uint8), []
    began = time.monotonic()
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            if source is not None and piece.start == 0:
                shard = shards[piece.name]
                into = whole[: 2 * len(shard)]
                dist.all_gather_single(into, shard, group=source.groups["world"])
        if source is None or bucket.owner == here.rank:
            data, group = buffer[: bucket.nbytes], groups[bucket.owner]
            works.append(here.transport.broadcast(data, bucket.owner, group))
    for work in works:
        work.wait()
    return time.monotonic() - began


@dataclass
class BenchConfig(BaseConfig):
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: WorkerConfig = field(default_factory=WorkerConfig)
    infer: WorkerConfig = field(default_factory=WorkerConfig)
    rounds: int = 15
    bucket_mb: list[float] = field(default_factory=list)


class BenchPipeline(BasePipeline):
    def __init__(self, pipeline_config: BenchConfig):
        super().__init__(pipeline_config)
        roles = [pipeline_config.actor, pipeline_config.infer]
        made = self.create_clusters_parallel([(r.name, r.name, ModelWorker, r) for r in roles])
        self.actor, self.infer = made["actor"], made["infer"]
        for cluster in (self.actor, self.infer):
            cluster.initialize(pipeline_config)

    def run(self) -> None:
        pairs = {
            size: Pair(self.actor, self.infer, ModelUpdateConfig(bucket_mb=size))
            for size in self.pipeline_config.bucket_mb
        }
        taken: dict[tuple[float, str], list[float]] = {}
        for i in range(-2, self.pipeline_config.rounds):
            for size in random.sample(list(pairs), len(pairs)):
                for side in random.sample(["ours", "bare"], 2):
                    seconds = self.seconds(pairs[size], side, i)
                    taken.setdefault((size, side), []).extend([seconds] if i >= 0 else [])
        for size, pair in pairs.items():
            ours, theirs = taken[size, "ours"], taken[size, "bare"]
            ratio = statistics.median(x / y for x, y in zip(theirs, ours, strict=True))
            times = [statistics.median(side) * 1e3 for side in (ours, theirs)]
            print(
                f"{pair.plan.nbytes / 1e6:.0f} MB, bucket_mb {size:g} ({len(pair.plan.buckets)} "
                f"buckets): ours {times[0]:.0f} ms  bare {times[1]:.0f} ms  bare/ours {ratio:.2f}  "
                f"{pair.plan.nbytes / times[0] / 1e3:.0f} MB/s",
                flush=True,
            )

    def seconds(self, pair: Pair, side: str, number: int) -> float:
        if side == "ours":
            return pair.update(number + 3)["time/weights_infer_s"]
        clusters = [self.actor, self.infer]
        return max(call_together(clusters, "weights.bare", plan=pair.plan, groups=pair._groups))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[ModelUpdateConfig.bucket_mb])
    parser.add_argument("--bf16", action="store_true", help="the target's weights")
    given = parser.parse_args()
    here = Path(__file__).resolve()

    def role(strategy: str, devices: list[int], **more: object) -> dict[str, object]:
        return {"device_mapping": devices, "strategy_args": {"strategy_name": strategy}, **more}

    low = {"model": {"config": MODEL, "dtype": "bfloat16"}} if given.bf16 else {}
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "pipeline_cls": f"{here.stem}.BenchPipeline", "output_dir": folder,
            "model": {"config": MODEL}, "rounds": given.rounds, "bucket_mb": given.bucket_mb,
            "actor": role("fsdp2_train", [0, 1]), "infer": role("hf_infer", [2], **low),
        }  # fmt: skip
        return start_job(config, 4)


if __name__ == "__main__":
    sys.exit(main())
