"""The DPO pipeline in a job of threads, with a worker that has no model."""

from __future__ import annotations

import json
import math
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_td import DataProto, Dispatch, Sum, Worker, register
from roll_td.config.base import WorkerConfig
from roll_td.config.dpo import DPOConfig
from roll_td.config.model import ModelConfig, TrainingConfig
from roll_td.config.replay import record_path
from roll_td.config.schema import ConfigError, read
from roll_td.pipelines.dpo import DPOPipeline, fingerprint, plan_over_pairs
from roll_td.pipelines.recording import Record
from roll_td.placement import planned_places
from roll_td.plan import default_plan, token_plan
from roll_td.runtime.inprocess import LocalJob
from roll_td.trackers import read_metrics

TOKENIZER = str(Path(__file__).parents[3] / "configs" / "sft" / "tiny" / "tokenizer")


class NoModel(Worker):
    """An answer is worth what its tokens are, summed; to a reference a tenth of that."""

    asked: list[int] = []  # noqa: RUF012  of all roles, rows a call

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def compute_answers(self, data: DataProto) -> DataProto:
        labels = data["labels"]
        worth = torch.where(labels == -100, 0, labels).sum(-1).float()
        if self.context.role == "reference":
            NoModel.asked.append(len(data))
            worth /= 10
        return DataProto({"answers": worth})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def train_step(self, data: DataProto) -> DataProto:
        labels = data["labels"]
        worth = torch.where(labels == -100, 0, labels).sum(-1).float()
        off = (data["reference"] - worth / 10).abs().max().item() if len(data) else 0.0
        apart = data["group_id"].unique(return_counts=True)[1].ne(2).sum().item()
        return DataProto(
            meta_info={"metrics": {"rows": Sum(len(data)), "off": Sum(off), "apart": Sum(apart)}}
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload_states(self) -> None:
        NoModel.asked.append(0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def do_checkpoint(self, folder: str) -> None: ...

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None: ...


def run(folder: Path, **given: Any) -> DPOPipeline:
    rows = [{"q": "x", "a": "1" * (n + 1), "b": "2"} for n in range(5)]
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    role = {"worker_cls": f"{__name__}.NoModel", "device_mapping": [0, 1]}
    reading = read(
        DPOConfig,
        {
            "output_dir": str(folder),
            "exp_name": "exp",
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": TOKENIZER},
            "data": {
                "train": str(folder / "train.jsonl"),
                "validation": str(folder / "validation.jsonl"),
                "prompt_key": "q",
                "chosen_key": "a",
                "rejected_key": "b",
            },
            "actor_train": role,
            "reference": role,
            "batch_size": 3,
            "max_steps": 3,
        }
        | given,
    )
    if reading.value is None:
        raise ConfigError(reading.problems)
    with LocalJob(planned_places(1, 2, 1), 1, 2):
        pipeline = DPOPipeline(reading.value)
        pipeline.run()
        pipeline.close()
    return pipeline


def test_each_pair_is_compared_with_its_own_reference_and_counts_once(tmp_path: Path) -> None:
    run(tmp_path)
    metrics = read_metrics(tmp_path / "exp" / "metrics.jsonl")
    assert [metrics["rows", step] for step in range(3)] == [6, 6, 6]
    assert [(metrics["off", step], metrics["apart", step]) for step in range(3)] == [(0, 0)] * 3
    # N21: tokens 1 is 22, 2 is 23, the end token 2; margins .9 times those of the policy
    margins = [0.9 * (22 * (n + 1) - 23) for n in range(5)]
    assert metrics["val/reward_margin", 2] == pytest.approx(0.1 * sum(margins) / 5, rel=1e-5)
    assert metrics["val/accuracy", 2] == 4 / 5
    losses = [math.log1p(math.exp(-0.1 * margin)) for margin in margins]
    assert metrics["val/loss", 2] == pytest.approx(sum(losses) / 5, rel=1e-5)


def test_a_record_has_rewards_margins_and_losses_of_pairs(tmp_path: Path) -> None:
    NoModel.asked.clear()
    run(tmp_path, record_steps=2)
    assert sorted(path.name for path in (tmp_path / "exp" / "records").iterdir()) == [
        "step_0.pt",
        "step_2.pt",
    ]
    assert sum(NoModel.asked) == 3 * 6 + 10, "recorded or not, the reference is asked once"
    columns = Record.load(record_path(tmp_path / "exp", 2)).columns
    assert columns["sample_id"].tolist() == [6, 6, 7, 7, 8, 8] == columns["group_id"].tolist()
    # N21, as above; of what it is worth the end token is 2
    ones = (columns["labels"] == 22).sum(-1).tolist()
    worth = [22 * count + 2 if count else 25 for count in ones]
    assert columns["answers"].tolist() == worth
    assert columns["reward"].tolist() == pytest.approx([0.09 * value for value in worth])
    margins = [0.09 * (worth[row] - 25) for row in (0, 2, 4) for _ in range(2)]
    assert columns["margin"].tolist() == pytest.approx(margins, rel=1e-5, abs=1e-6)
    losses = [math.log1p(math.exp(-margin)) for margin in margins]
    assert columns["loss"].tolist() == pytest.approx(losses, rel=1e-5)


def test_the_reference_is_asked_once_and_then_its_file(tmp_path: Path) -> None:
    NoModel.asked.clear()
    cache = {"reference_cache": str(tmp_path / "cache")}
    assert run(tmp_path, **cache).reference is not None
    # train and validation are the same rows: one file
    assert len(list((tmp_path / "cache").iterdir())) == 1 and sum(NoModel.asked) == 10
    assert NoModel.asked[-2:] == [0, 0], "then it goes from its devices"
    seen = read_metrics(tmp_path / "exp" / "metrics.jsonl")
    again = run(tmp_path, exp_name="again", **cache)
    assert again.reference is None and sum(NoModel.asked) == 10
    other = read_metrics(tmp_path / "again" / "metrics.jsonl")
    told = [key for key in seen if not key[0].startswith("time")]
    assert [seen[key] for key in told] == [other[key] for key in told]
    asked = sum(NoModel.asked)
    run(tmp_path, exp_name="plain")
    plain = read_metrics(tmp_path / "plain" / "metrics.jsonl")
    assert [seen[key] for key in told] == [plain[key] for key in told], "each has its own"
    assert sum(NoModel.asked) == asked + 3 * 6 + 10
    NoModel.asked.clear()
    run(tmp_path, exp_name="seed", seed=1, **cache)  # a random model is another one
    assert len(list((tmp_path / "cache").iterdir())) == 2 and sum(NoModel.asked) == 10


@pytest.mark.parametrize("max_tokens", [None, 20])
def test_a_plan_over_pairs_keeps_them_together_in_any_order(max_tokens: int | None) -> None:
    groups = torch.tensor([5, 9, 9, 5, 1, 2, 1, 2, 7, 7])
    lengths = torch.tensor([9, 1, 2, 9, 5, 5, 4, 4, 1, 1])
    asked = []

    def plan_for(data: DataProto, denominators: dict[str, float]):
        asked.append(data["lengths"].tolist())
        if max_tokens is None:
            return default_plan(len(data), 2, 1, denominators)
        return token_plan(data["lengths"].tolist(), 2, max_tokens, denominators)

    cluster: Any = SimpleNamespace(plan_for=plan_for)
    plan = plan_over_pairs(cluster, DataProto({"group_id": groups, "lengths": lengths}))
    plan.validate(10)
    assert asked == [[18, 3, 9, 9, 2]] and plan.denominators == {"pairs": 5.0}
    for micro in chain.from_iterable(plan.micro_batches):
        counts = groups[list(micro)].unique(return_counts=True)[1]
        assert counts.eq(2).all()
    if max_tokens is None:
        assert plan.micro_batches[1] == ((5, 7), (8, 9), (5, 7)) and plan.fillers == (0, 1)


def test_a_reference_whose_files_have_changed_is_another_one(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    role, folder = WorkerConfig(world_size=1), ModelConfig(path=str(tmp_path))
    low = WorkerConfig(world_size=1, training=TrainingConfig(compute_dtype="bfloat16"))
    seen = [
        fingerprint(folder, role, "sum", 1),
        fingerprint(folder, role, "mean", 1),
        fingerprint(folder, role, "sum", 2),
        fingerprint(folder, low, "sum", 1),
        fingerprint(ModelConfig(path="a-name-on-the-hub"), role, "sum", 1),
        fingerprint(ModelConfig(config={"model_type": "qwen3"}), role, "sum", 1),
    ]
    assert fingerprint(folder, role, "sum", 1) == seen[0]
    (tmp_path / "model.safetensors").write_bytes(b"12")
    assert len({*seen, fingerprint(folder, role, "sum", 1)}) == 7
