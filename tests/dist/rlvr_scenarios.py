"""What the jobs of test_rlvr and test_ppo are made of: a reward, and a pipeline that checks a
recorded batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import get_args

import torch
from any_world import Recording, check_different, check_same, each_world, on_any_world

from roll_td.algorithms.aggregation import AGGREGATIONS, denominators
from roll_td.config.algorithm import KlConfig, WeightsConfig
from roll_td.config.function_settings import Level
from roll_td.config.functions import POLICY_LOSSES, PolicyLossArgs
from roll_td.config.rlvr import RLVRConfig
from roll_td.pipelines.rlvr import LEARNT_FROM, VALUED_BY, RLVRPipeline
from roll_td.workers.actor import ActorWorker
from roll_td.workers.critic import CriticWorker


def digits(response: str) -> float:
    """The share of a response that is digits."""
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


class RecordingActor(Recording, ActorWorker):
    """Learns, and keeps its gradients."""


class RecordingCritic(Recording, CriticWorker):
    """Learns, and keeps its gradients."""


CUTS = (
    {"micro_batch_size": 1},
    {"micro_batch_size": 5, "packing": False},
    {"max_tokens_per_micro_batch": 40},
)
WANTED = {"cispo": {"clip_high": 0.3}, "kimi15": {"tau": 0.1}}
"""Settings without a default."""
DIVISOR = 5.0


def algorithms(own):
    """What adds to a loss, with each estimator of a KL; then each loss that has a name, and each
    level of a ratio, alone, with each aggregation in turn. `own` has nothing but advantages and a
    KL in their rewards."""
    levels = get_args(Level)
    for estimator, level in zip(("k3", "k2", "k1"), levels, strict=False):
        yield replace(
            own,
            kl=KlConfig(0.2, estimator=estimator),
            entropy_coefficient=0.01,
            importance_weights=WeightsConfig(level=level),
            off_policy_threshold=0.2,
        )
    losses = [PolicyLossArgs(name, WANTED.get(name, {})) for name in POLICY_LOSSES]
    losses += [PolicyLossArgs("ppo", {"ratio_level": level}) for level in levels[1:]]
    losses += [
        PolicyLossArgs("ppo", {"dual_clip": 1.1}),
        PolicyLossArgs("kimi15", {"tau": 0.1, "level": "token"}),
    ]
    for loss, mode in zip(losses, cycle(AGGREGATIONS), strict=False):
        divisor = DIVISOR if mode == "constant" else None
        yield replace(own, policy_loss=loss, aggregation=mode, divisor=divisor)


class OnAnyWorld(RLVRPipeline):
    """One recorded rollout, and one step on it by each loss, by roles on 1, 2, 3 and 4 ranks, cut
    in three ways."""

    def __init__(self, pipeline_config: RLVRConfig):
        super().__init__(pipeline_config)
        config = pipeline_config
        actor, critic = "rlvr_scenarios.RecordingActor", "rlvr_scenarios.RecordingCritic"
        self.actors = on_any_world(self, config.actor_train, actor, *CUTS)
        self.critics = on_any_world(self, config.critic, critic, *CUTS)

    def run(self):
        for step in self.steps(1):
            self.update_weights(step)
            batch = self.rollout()
            self.ask(batch)
            self.estimate(batch)
        self.as_if_moved(batch)
        told, worst = [], 0.0
        for number, algorithm in enumerate(algorithms(self.pipeline_config.algorithm)):
            config = replace(self.pipeline_config, algorithm=algorithm)
            actors = each_world(self.actors, number) if number else self.actors
            numbers, error = check_same(actors, self.actor_step, config, batch)
            told.append(numbers)
            worst = max(worst, error)
        check_different(told)
        losses, error = check_same(self.critics, self.critic_steps, batch)
        assert min(map(abs, losses)) > 1e-3
        worst = max(worst, error)
        print(f"RECORDED BATCH CHECKED, {len(told)} losses, worst error {worst:.1e}", flush=True)

    def as_if_moved(self, batch):
        """Responses of several turns, sampled and valued by weights a little unlike those now."""
        random = torch.Generator().manual_seed(0)
        moved = torch.randn((2, *batch["response_mask"].shape), generator=random)
        batch.update(
            {
                "response_mask": batch["response_mask"]
                & (torch.arange(moved.shape[-1]) % 4 != 3),
                "old_log_probs": batch["old_log_probs"] + 0.3 * moved[0],
                "values": batch["values"] + moved[1],
            }
        )

    def actor_step(self, actor, config, batch):
        actor.initialize(config)
        names = LEARNT_FROM | {"old_log_probs", "advantages"}
        learnt = self.planned(actor, batch, names)
        learnt.meta_info = {"temperature": self.temperature, "kl_coefficient": 0.2}
        metrics = actor.train_step(learnt).meta_info["metrics"]
        return [float(metrics["loss"]), float(metrics["grad_norm"])]

    def critic_steps(self, critic, batch):
        """Two: its body learns once its head is not 0."""
        learnt = self.planned(critic, batch, VALUED_BY)
        steps = [critic.train_step(learnt).meta_info["metrics"] for _ in range(2)]
        assert len(critic.seen_gradients()) > 2
        assert all(0.2 < metrics["value_clip_fraction"] < 0.8 for metrics in steps)
        return [float(metrics[name]) for metrics in steps for name in ("loss", "grad_norm")]

    def planned(self, cluster, batch, names):
        learnt = batch.select(sorted(names))
        learnt.plan = cluster.plan_for(learnt, denominators(batch["response_mask"], divisor=DIVISOR))
        return learnt
