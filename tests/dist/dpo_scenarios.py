"""A pipeline that checks one recorded batch of pairs on any world, and adapters as reference."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args, get_type_hints

import torch
from any_world import Recording, check_different, check_same, each_world, on_any_world

from roll_td.config.dpo import DPOConfig
from roll_td.config.functions import PREFERENCE_LOSSES, PreferenceLossArgs
from roll_td.pipelines.dpo import DPOPipeline, plan_over_pairs
from roll_td.workers.dpo import DPOWorker


class RecordingDPO(Recording, DPOWorker):
    """Learns, and keeps its gradients."""


CUTS = (
    {"micro_batch_size": 1},
    {"micro_batch_size": 3, "packing": False},
    {"max_tokens_per_micro_batch": 30},
)


def losses():
    """Each loss that has a name, of sums and of means; then a smoothed one, and one without a
    reference."""
    for name in PREFERENCE_LOSSES:
        for over in get_args(get_type_hints(DPOConfig)["over"]):
            yield {"loss": PreferenceLossArgs(name), "over": over}
    yield {"loss": PreferenceLossArgs("sigmoid", {"label_smoothing": 0.2}), "over": "sum"}
    yield {"loss": PreferenceLossArgs(), "over": "sum", "reference_free": True}


class OnAnyWorld(DPOPipeline):
    """One batch, and one step on it by each loss, by roles on 1, 2, 3 and 4 ranks, cut in three
    ways."""

    def __init__(self, pipeline_config: DPOConfig):
        super().__init__(pipeline_config)
        train = pipeline_config.actor_train
        self.actors = on_any_world(self, train, "dpo_scenarios.RecordingDPO", *CUTS)

    def run(self):
        told, worst, size = [], 0.0, self.pipeline_config.batch_size
        role = self.pipeline_config.reference
        # as if the policy had moved: at the start all margins are 0
        moved = 3 * torch.randn(2 * size, generator=torch.Generator().manual_seed(0))
        for number, given in enumerate(losses()):
            is_free = given.get("reference_free", False)
            config = replace(self.pipeline_config, reference=None if is_free else role, **given)
            self.pipeline_config = config
            self.reference.initialize(config)
            batch = self.train_data.batch(0)
            self.add_reference(batch, "train", self.train_data.numbers(0, size))
            if not is_free:
                batch.update({"reference": batch["reference"] + moved})
            actors = each_world(self.actors, number) if number else self.actors
            numbers, error = check_same(actors, self.one_step, config, batch)
            told.append(numbers)
            worst = max(worst, error)
        check_different(told)
        print(f"RECORDED PAIRS CHECKED, {len(told)} losses, worst error {worst:.1e}", flush=True)

    def one_step(self, actor, config, batch):
        actor.initialize(config)
        batch.plan = plan_over_pairs(actor, batch)
        metrics = actor.train_step(batch).meta_info["metrics"]
        return [float(metrics[name]) for name in ("loss", "reward_margin", "grad_norm")]


class Adapters(DPOPipeline):
    """Without its adapters the policy stays the reference, whatever it learns."""

    def run(self):
        batch = self.train_data.batch(0)
        before = self.ask_reference(batch)
        assert self.reference is None
        for step in self.steps(5):
            self.train_step(step, self.train_data.batch(step))
        after, policy = self.ask_reference(batch), self.trained.compute_answers(batch)
        assert torch.equal(before, after), (before - after).abs().max()
        moved = float((policy["answers"] - after).abs().max())
        assert moved > 0.1, moved
        print(f"ADAPTERS CHECKED, the policy moved by {moved:.2f}", flush=True)
