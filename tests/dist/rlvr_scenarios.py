"""What the jobs of test_rlvr are made of: a reward, and a pipeline that checks a recorded batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from roll_td import Dispatch, register
from roll_td.algorithms.aggregation import denominators
from roll_td.config.rlvr import RLVRConfig
from roll_td.pipelines.rlvr import RLVRPipeline
from roll_td.workers.actor import ActorWorker


def digits(response: str) -> float:
    """The share of a response that is digits."""
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


class RecordingActor(ActorWorker):
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
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def seen_gradients(self):
        return self.gradients


class OnAnyWorld(RLVRPipeline):
    """One recorded rollout, one step on it by roles on 1, 2, 3 and 4 ranks, cut in three ways."""

    def __init__(self, pipeline_config: RLVRConfig):
        super().__init__(pipeline_config)
        train = pipeline_config.actor_train
        self.sizes = [
            (world, training)
            for world in (1, 2, 3, 4)
            for training in (
                replace(train.training, micro_batch_size=1),
                replace(train.training, micro_batch_size=5, packing=False),
                replace(train.training, max_tokens_per_micro_batch=40),
            )
        ]
        roles = [
            replace(
                train,
                name=f"actor_{number}",
                device_mapping=list(range(4 - world, 4)),
                world_size=world,
                training=training,
                worker_cls="rlvr_scenarios.RecordingActor",
            )
            for number, (world, training) in enumerate(self.sizes)
        ]
        made = self.create_clusters_parallel([(r.name, r.name, r.worker_cls, r) for r in roles])
        self.actors = list(made.values())
        for actor in self.actors:
            actor.initialize(pipeline_config)

    def run(self):
        for step in self.steps(1):
            self.update_weights(step)
            batch = self.rollout()
            self.compute_log_probs(batch)
            self.estimator.estimate(batch)
        worst, wanted = 0.0, None
        for actor, (world, training) in zip(self.actors, self.sizes, strict=True):
            loss, gradients = self.one_step(actor, batch)
            wanted = wanted or (loss, gradients)
            errors = [abs(loss - wanted[0])]
            errors += [float((gradients[n] - g).abs().max()) for n, g in wanted[1].items()]
            worst = max(worst, *errors)
            assert max(errors) < 1e-5, f"{world} ranks, {training}: off by {max(errors)}"
        norm = sum(float(g.square().sum()) for g in wanted[1].values()) ** 0.5
        assert norm > 1e-2 and abs(wanted[0]) > 1e-3, "there is something to be equal"
        print(f"RECORDED BATCH CHECKED, worst error {worst:.1e}", flush=True)

    def one_step(self, actor, batch):
        learnt = batch.select(sorted(set(batch.keys()) - {"finish_reason", "response", "word"}))
        learnt.plan = actor.plan_for(learnt, denominators(batch["response_mask"]))
        learnt.meta_info = {"temperature": self.temperature, "kl_coefficient": 0.2}
        metrics = actor.train_step(learnt).meta_info["metrics"]
        return float(metrics["loss"]), actor.seen_gradients()


