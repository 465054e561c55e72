"""A pipeline that checks one recorded batch of pairs on any world, and adapters as reference."""

from __future__ import annotations

import torch
from any_world import Recording, check_same, on_any_world

from roll_td.config.dpo import DPOConfig
from roll_td.pipelines.dpo import DPOPipeline, plan_over_pairs
from roll_td.workers.dpo import DPOWorker


class RecordingDPO(Recording, DPOWorker):
    """Learns, and keeps its gradients."""


class OnAnyWorld(DPOPipeline):
    """One batch, one step on it by roles on 1, 2, 3 and 4 ranks, cut in three ways."""

    def __init__(self, pipeline_config: DPOConfig):
        super().__init__(pipeline_config)
        self.actors = on_any_world(
            self,
            pipeline_config.actor_train,
            "dpo_scenarios.RecordingDPO",
            {"micro_batch_size": 1},
            {"micro_batch_size": 3, "packing": False},
            {"max_tokens_per_micro_batch": 30},
        )

    def run(self):
        for step in self.steps(1):
            size = self.pipeline_config.batch_size
            batch = self.train_data.batch(step)
            self.add_reference(batch, "train", self.train_data.numbers(0, size))
            # as if the policy had moved: at the start all margins are 0
            batch.update({"reference": batch["reference"] + 3 * batch["is_chosen"].float()})
        (_, margin), worst = check_same(self.actors, lambda actor: self.one_step(actor, batch))
        assert abs(margin + 0.3) < 1e-4
        print(f"RECORDED PAIRS CHECKED, worst error {worst:.1e}", flush=True)

    def one_step(self, actor, batch):
        batch.plan = plan_over_pairs(actor, batch)
        metrics = actor.train_step(batch).meta_info["metrics"]
        return [float(metrics["loss"]), float(metrics["reward_margin"])]


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
