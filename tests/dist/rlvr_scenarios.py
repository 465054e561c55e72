"""What the jobs of test_rlvr are made of: a reward, and a pipeline that checks a recorded batch."""

from __future__ import annotations

from any_world import Recording, check_same, on_any_world

from roll_td.algorithms.aggregation import denominators
from roll_td.config.rlvr import RLVRConfig
from roll_td.pipelines.rlvr import RLVRPipeline
from roll_td.workers.actor import ActorWorker


def digits(response: str) -> float:
    """The share of a response that is digits."""
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


class RecordingActor(Recording, ActorWorker):
    """Learns, and keeps its gradients."""


class OnAnyWorld(RLVRPipeline):
    """One recorded rollout, one step on it by roles on 1, 2, 3 and 4 ranks, cut in three ways."""

    def __init__(self, pipeline_config: RLVRConfig):
        super().__init__(pipeline_config)
        self.actors = on_any_world(
            self,
            pipeline_config.actor_train,
            "rlvr_scenarios.RecordingActor",
            {"micro_batch_size": 1},
            {"micro_batch_size": 5, "packing": False},
            {"max_tokens_per_micro_batch": 40},
        )

    def run(self):
        for step in self.steps(1):
            self.update_weights(step)
            batch = self.rollout()
            self.compute_log_probs(batch)
            self.estimator.estimate(batch)
        (loss,), worst = check_same(self.actors, lambda actor: self.one_step(actor, batch))
        assert abs(loss) > 1e-3
        print(f"RECORDED BATCH CHECKED, worst error {worst:.1e}", flush=True)

    def one_step(self, actor, batch):
        learnt = batch.select(sorted(set(batch.keys()) - {"finish_reason", "response", "word"}))
        learnt.plan = actor.plan_for(learnt, denominators(batch["response_mask"]))
        learnt.meta_info = {"temperature": self.temperature, "kl_coefficient": 0.2}
        return [float(actor.train_step(learnt).meta_info["metrics"]["loss"])]
