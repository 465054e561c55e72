"""One step on a recorded batch, by roles on 1, 2, 3 and 4 ranks and cut in several ways."""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.tensor import DTensor

from roll_td import Dispatch, register
from roll_td.pipelines.answering import start_roles

WORLDS = 1, 2, 3, 4


class Recording:
    """Mixed into a Worker that trains: keeps the gradients of its last step."""

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


def on_any_world(pipeline, train, worker_cls, *cuts):
    """Clusters with the last 1 to 4 of 4 devices, and each of `cuts`, fields of the training."""
    roles = [
        replace(
            train,
            name=f"{train.name}_on_{world}_{number}",
            device_mapping=list(range(4 - world, 4)),
            world_size=world,
            training=replace(train.training, **cut),
            worker_cls=worker_cls,
        )
        for world in WORLDS
        for number, cut in enumerate(cuts)
    ]
    return start_roles(pipeline, *roles)


def each_world(learners, number):
    """Of on_any_world's clusters one of each world, no two that follow each other cut alike; another
    choice for another number."""
    cuts = len(learners) // len(WORLDS)
    return [learners[cuts * row + (row + number) % cuts] for row in range(len(WORLDS))]


def check_same(learners, one_step, *given):
    """The numbers of one_step(learner, *given), and the gradients, are those of the first learner
    to 1e-5, of numbers above 1 as a share; there is something to be equal. Returns these numbers,
    and the worst error."""
    worst, wanted, gradients = 0.0, None, None
    for learner in learners:
        numbers, own = one_step(learner, *given), learner.seen_gradients()
        if wanted is None:
            wanted, gradients = numbers, own
        errors = [abs(a - b) / max(1, abs(b)) for a, b in zip(numbers, wanted, strict=True)]
        errors += [float((own[name] - g).abs().max()) for name, g in gradients.items()]
        worst = max(worst, *errors)
        assert max(errors) < 1e-5, f"{learner.name}: off by {max(errors)}"
    norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    assert norm > 1e-2
    return wanted, worst


def check_different(told):
    """No two losses have told the same numbers: the settings of each have reached the workers."""
    seen = {tuple(round(number, 4) for number in numbers) for numbers in told}
    assert len(seen) == len(told), f"two losses are the same: {told}"
