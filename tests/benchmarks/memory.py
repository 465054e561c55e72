"""The memory estimate of `roll-td check` against what a step takes on this CPU, each in a process
of its own.

    python tests/benchmarks/memory.py [--rounds N] [NAME …]

Measured is the most resident memory of a process from the making of the strategy on, above what it
had after its imports and a call of a small model. tensors: with MALLOC_MMAP_THRESHOLD_, so that
what is freed goes back at once. first call, second: as the C library is set up, which then keeps
what was freed, in pieces that do not all fit what comes next. In brackets estimate / measured;
medians of the rounds. least: the estimate without the allocator's share, to be held against
tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from roll_td.config.base import WorkerConfig
from roll_td.config.classes import import_class, import_object
from roll_td.config.memory import Load, RoleMemory
from roll_td.config.model_size import model_size
from roll_td.config.schema import read
from roll_td.distributed.topology import rank_infos
from roll_td.models import load_model
from roll_td.plan import default_plan, local
from roll_td.platform import keep_freed_memory
from roll_td.protocol import DataProto
from roll_td.strategies.base import StrategyContext

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}
"""42 M parameters."""
TRAIN = {"strategy_args": {"strategy_name": "fsdp2_train"}}
INFER = {"strategy_args": {"strategy_name": "fsdp2_infer"}}
GENERATE = {
    "strategy_args": {"strategy_name": "hf_infer", "strategy_config": {"batch_size": 32}},
}


def setting(
    role: Mapping[str, Any],
    rows: int,
    length: int,
    ranks: int = 1,
    new: int = 0,
    fields: Mapping[str, Any] = MODEL,
    **model: Any,
) -> dict[str, Any]:
    """rows of `length` tokens on each of `ranks`; `new` tokens are generated after each."""
    role = {**role, "world_size": ranks, "model": {"config": fields, **model}}
    role["generation"] = {"max_new_tokens": max(new, 1)}
    return {"role": role, "rows": rows, "length": length, "new": new}


SETTINGS = {
    "4 x 256": setting({**TRAIN, "training": {"micro_batch_size": 4}}, 4, 256),
    "twice 2 x 256": setting({**TRAIN, "training": {"micro_batch_size": 2}}, 4, 256),
    "checkpointing, 4 x 256": setting(
        {**TRAIN, "training": {"micro_batch_size": 4, "gradient_checkpointing": True}}, 4, 256
    ),
    "LoRA, 4 x 256": setting(
        {**TRAIN, "training": {"micro_batch_size": 4}}, 4, 256, lora={"rank": 16}
    ),
    "bfloat16, 4 x 256": setting(
        {**TRAIN, "training": {"micro_batch_size": 4, "compute_dtype": "bfloat16"}}, 4, 256
    ),
    "2 ranks, 2 x 256": setting({**TRAIN, "training": {"micro_batch_size": 2}}, 2, 256, ranks=2),
    "log-probs, 8 x 256": setting({**INFER, "training": {"micro_batch_size": 8}}, 8, 256),
    "generating, 32 x (64 + 64)": setting(GENERATE, 64, 64, new=64),
}


def role_of(what: Mapping[str, Any]) -> WorkerConfig:
    reading = read(WorkerConfig, {"name": "role", **what["role"]})
    assert reading.value is not None, reading.problems
    return reading.value


def estimate(what: Mapping[str, Any]) -> RoleMemory:
    role = role_of(what)
    assert role.model and role.strategy_args and role.strategy_args.row.memory and role.world_size
    prompt, rows = what["length"], what["rows"] * role.world_size
    load = Load(prompt, prompt + what["new"], rows)
    function = import_object(role.strategy_args.row.memory)
    memory: RoleMemory = function(role, role.model, model_size(role.model), load)
    return memory


def resident_mb(name: str) -> float:
    """VmRSS: now; VmHWM: the most since forget_peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {name}; run this on Linux")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def calls(what: Mapping[str, Any], mesh: DeviceMesh) -> Iterator[None]:
    """Make the strategy and call it twice, as a worker does."""
    role, rank = role_of(what), dist.get_rank()
    assert role.model and role.strategy_args and role.world_size
    context = StrategyContext(
        role="role",
        config=role,
        model=role.model,
        rank_info=rank_infos(import_object(role.strategy_args.row.topology)(role))[rank],
        groups={"world": mesh.get_group()},
        mesh=mesh,
        device=torch.device("cpu"),
        seed=0,
    )
    strategy: Any = import_class(role.strategy_args.row.cls)(context)
    strategy.initialize(load_model)
    rows, length = what["rows"], what["length"]
    ids = torch.randint(role.model.config["vocab_size"], (rows, length))
    lengths = torch.full((rows,), length)
    lengths[::8] -= 1  # uneven rows need a mask while responses are sampled
    batch = DataProto.from_single_dict({"input_ids": ids, "lengths": lengths, "labels": ids})
    size, ranks = role.training.micro_batch_size, role.world_size
    batch.plan = local(default_plan(rows * ranks, ranks, size, {"tokens": rows * ranks}), 0)

    def loss(data: DataProto, output: Any) -> Any:
        total = strategy.op_compute_language_loss(output, data["labels"])
        return total / data.plan.denominators["tokens"], {}

    def log_probs(data: DataProto, output: Any) -> Any:
        return {"log_probs": strategy.op_compute_log_probs(output, data["input_ids"])}

    for _ in range(2):
        if what["new"]:
            strategy.generate(batch, role.generation, 0)
        elif role.strategy_args.row.trains:
            strategy.train_step(batch, loss)
        else:
            strategy.forward_step(batch, log_probs)
        yield


def small(what: Mapping[str, Any]) -> dict[str, Any]:
    """The same with a model of few weights: after it all is imported and libraries have started."""
    fields = what["role"]["model"]["config"] | {"vocab_size": 64, "hidden_size": 64}
    fields |= {"intermediate_size": 64, "num_hidden_layers": 2}
    model = {**what["role"]["model"], "config": fields}
    new = min(what["new"], 2)
    role = {**what["role"], "model": model, "generation": {"max_new_tokens": max(new, 1)}}
    return {"role": role, "rows": 1, "length": 8, "new": new}


def measure(what: Mapping[str, Any], rank: int, file: str) -> list[float]:
    """MB, in this process: up to the end of the first call, and of the second."""
    torch.set_num_threads(1)
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        keep_freed_memory()  # as each rank does
    ranks = what["role"]["world_size"]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("dp",))
    for _ in calls(small(what), mesh):
        pass
    forget_peak()
    before = resident_mb("VmRSS")
    taken = [resident_mb("VmHWM") - before for _ in calls(what, mesh)]
    dist.destroy_process_group()
    return taken


def measured_mb(what: Mapping[str, Any], **environment: str) -> list[float]:
    """As measure; of the processes of a role the one that took the most."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, "--one", json.dumps(what)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), f"{folder}/store"],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | environment,
            )
            for rank in range(what["role"]["world_size"])
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), outputs
    taken: list[list[float]] = [json.loads(output.splitlines()[-1]) for output in outputs]
    return max(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        what, rank, file = arguments.one
        print(json.dumps(measure(json.loads(what), int(rank), file)))
        return
    heads = f"{'least':>8} {'estimate':>8} {'tensors':>15} {'first call':>15} {'second':>15}"
    print(f"{'MB':28} {heads}")
    for name in arguments.names:
        what, rounds = SETTINGS[name], range(arguments.rounds)
        wanted = estimate(what)
        tensors = [measured_mb(what, MALLOC_MMAP_THRESHOLD_="65536")[-1] for _ in rounds]
        plain = [measured_mb(what) for _ in rounds]
        columns = [tensors, *zip(*plain, strict=True)]
        taken = [statistics.median(column) for column in columns]
        cells = " ".join(f"{mb:8.0f} ({wanted.peak_mb / mb:.2f})" for mb in taken)
        least = wanted.peak_mb - wanted.allocator_mb
        print(f"{name:28} {least:8.0f} {wanted.peak_mb:8.0f} {cells}", flush=True)


if __name__ == "__main__":
    main()
