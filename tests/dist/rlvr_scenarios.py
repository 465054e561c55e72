"""What the jobs of test_rlvr and test_ppo are made of: a reward, and pipelines that check a
recorded batch."""

from __future__ import annotations

from any_world import Recording, check_same, on_any_world

from roll_td.algorithms.aggregation import denominators
from roll_td.config.rlvr import RLVRConfig
from roll_td.pipelines.rlvr import VALUED_BY, RLVRPipeline
from roll_td.workers.actor import ActorWorker
from roll_td.workers.critic import CriticWorker


def digits(response: str) -> float:
    """The share of a response that is digits."""
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


class RecordingActor(Recording, ActorWorker):
    """Learns, and keeps its gradients."""


class RecordingCritic(Recording, CriticWorker):
    """Learns, and keeps its gradients."""


class OnAnyWorld(RLVRPipeline):
    """One recorded rollout, one step on it by roles on 1, 2, 3 and 4 ranks, cut in three ways."""

    learner, worker_cls = "actor_train", "rlvr_scenarios.RecordingActor"

    def __init__(self, pipeline_config: RLVRConfig):
        super().__init__(pipeline_config)
        self.learners = on_any_world(
            self,
            getattr(pipeline_config, self.learner),
            self.worker_cls,
            {"micro_batch_size": 1},
            {"micro_batch_size": 5, "packing": False},
            {"max_tokens_per_micro_batch": 40},
        )

    def run(self):
        for step in self.steps(1):
            self.update_weights(step)
            batch = self.rollout()
            self.ask(batch)
            self.estimate(batch)
        losses, worst = check_same(self.learners, lambda learner: self.one_step(learner, batch))
        assert min(map(abs, losses)) > 1e-3
        print(f"RECORDED BATCH CHECKED, worst error {worst:.1e}", flush=True)

    def one_step(self, actor, batch):
        learnt = batch.select(sorted(set(batch.keys()) - {"finish_reason", "response", "word"}))
        learnt.plan = actor.plan_for(learnt, denominators(batch["response_mask"]))
        learnt.meta_info = {"temperature": self.temperature, "kl_coefficient": 0.2}
        return [float(actor.train_step(learnt).meta_info["metrics"]["loss"])]


class CriticOnAnyWorld(OnAnyWorld):
    """The same of the critic, two steps: its body learns once its head is not 0."""

    learner, worker_cls = "critic", "rlvr_scenarios.RecordingCritic"

    def one_step(self, critic, batch):
        learnt = batch.select(sorted(VALUED_BY))
        learnt.plan = critic.plan_for(learnt, denominators(batch["response_mask"]))
        steps = [critic.train_step(learnt).meta_info["metrics"] for _ in range(2)]
        assert len(critic.seen_gradients()) > 2
        return [float(metrics["loss"]) for metrics in steps]
