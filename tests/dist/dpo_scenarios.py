"""A pipeline that checks one recorded batch of pairs on any world, and adapters as reference."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from roll_td import Dispatch, register
from roll_td.config.dpo import DPOConfig
from roll_td.pipelines.answering import start_roles
from roll_td.pipelines.dpo import DPOPipeline, plan_over_pairs
from roll_td.workers.dpo import DPOWorker


class RecordingDPO(DPOWorker):
    """Keeps the gradients of its last step."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config):
        super().initialize(pipeline_config)
        self.strategy.optimizer.register_step_pre_hook(self._keep)

    def _keep(self, *_):
        weights = self.strategy.model.named_parameters()
        self.gradients = {
            name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
            for name, p in weights
            if p.grad is not None
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def seen_gradients(self):
        return self.gradients


class OnAnyWorld(DPOPipeline):
    """One batch, one step on it by roles on 1, 2, 3 and 4 ranks, cut in three ways."""

    def __init__(self, pipeline_config: DPOConfig):
        super().__init__(pipeline_config)
        train = pipeline_config.actor_train
        self.sizes = [
            (world, training)
            for world in (1, 2, 3, 4)
            for training in (
                replace(train.training, micro_batch_size=1),
                replace(train.training, micro_batch_size=3, packing=False),
                replace(train.training, max_tokens_per_micro_batch=30),
            )
        ]
        roles = [
            replace(
                train,
                name=f"actor_{number}",
                device_mapping=list(range(4 - world, 4)),
                world_size=world,
                training=training,
                worker_cls="dpo_scenarios.RecordingDPO",
            )
            for number, (world, training) in enumerate(self.sizes)
        ]
        self.actors = start_roles(self, *roles)

    def run(self):
        for step in self.steps(1):
            size = self.pipeline_config.batch_size
            batch = self.train_data.batch(step)
            self.add_reference(batch, "train", self.train_data.numbers(0, size))
            # as if the policy had moved: at the start all margins are 0
            batch.update({"reference": batch["reference"] + 3 * batch["is_chosen"].float()})
        worst, wanted = 0.0, None
        for actor, (world, training) in zip(self.actors, self.sizes, strict=True):
            batch.plan = plan_over_pairs(actor, batch)
            metrics = actor.train_step(batch).meta_info["metrics"]
            found = float(metrics["loss"]), float(metrics["reward_margin"]), actor.seen_gradients()
            wanted = wanted or found
            errors = [abs(found[0] - wanted[0]), abs(found[1] - wanted[1])]
            errors += [float((found[2][n] - g).abs().max()) for n, g in wanted[2].items()]
            worst = max(worst, *errors)
            assert max(errors) < 1e-5, f"{world} ranks, {training}: off by {max(errors)}"
        norm = sum(float(g.square().sum()) for g in wanted[2].values()) ** 0.5
        assert norm > 1e-2 and abs(wanted[1] + 0.3) < 1e-4, "there is something to be equal"
        print(f"RECORDED PAIRS CHECKED, worst error {worst:.1e}", flush=True)


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
