"""One step on a recorded batch, by roles on 1, 2, 3 and 4 ranks and cut in several ways."""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.tensor import DTensor

from roll_td import Dispatch, register
from roll_td.pipelines.answering import start_roles


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
            name=f"actor_on_{world}_{number}",
            device_mapping=list(range(4 - world, 4)),
            world_size=world,
            training=replace(train.training, **cut),
            worker_cls=worker_cls,
        )
        for world in (1, 2, 3, 4)
        for number, cut in enumerate(cuts)
    ]
    return start_roles(pipeline, *roles)


def check_same(actors, one_step):
    """The numbers of one_step(actor), and the gradients, are those of the first actor to 1e-5;
    there is something to be equal. Returns these numbers, and the worst error."""
    worst, wanted, gradients = 0.0, None, None
    for actor in actors:
        numbers, own = one_step(actor), actor.seen_gradients()
        if wanted is None:
            wanted, gradients = numbers, own
        errors = [abs(a - b) for a, b in zip(numbers, wanted, strict=True)]
        errors += [float((own[name] - g).abs().max()) for name, g in gradients.items()]
        worst = max(worst, *errors)
        assert max(errors) < 1e-5, f"{actor.name}: off by {max(errors)}"
    norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    assert norm > 1e-2
    return wanted, worst
