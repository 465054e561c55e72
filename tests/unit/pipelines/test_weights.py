"""When weights are updated, what of it is in a checkpoint, and how a run goes on with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from roll_td import BaseConfig, BasePipeline, Cluster, Dispatch, WorkerConfig, register
from roll_td.config.model_update import ModelUpdateConfig
from roll_td.placement import planned_places
from roll_td.runtime.inprocess import LocalJob
from tests.unit.weights.test_update import Side


class Model(Side):
    """A side of an update that can be checkpointed."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def do_checkpoint(self, folder: str) -> None:
        state = self.strategy.model.state_dict(), self.strategy.weight_version
        torch.save(state, Path(folder) / f"{self.rank}.pt")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        weights, self.strategy.weight_version = torch.load(Path(folder) / f"{self.rank}.pt")
        self.strategy.model.load_state_dict(weights)


@dataclass
class Config(BaseConfig):
    actor: WorkerConfig = field(default_factory=lambda: WorkerConfig(device_mapping=[0, 1]))
    infer: WorkerConfig = field(default_factory=lambda: WorkerConfig(device_mapping=[1]))
    frequency: int = 1
    dies_at: int | None = None


class Pipeline(BasePipeline):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.actor = Cluster("actor", Model, self.resource_manager, config.actor)
        self.infer = Cluster("infer", Model, self.resource_manager, config.infer)
        self.actor.make(1.0)
        self.infer.make()
        update = ModelUpdateConfig(bucket_mb=0.001)
        self.set_model_update_pair(self.actor, self.infer, config.frequency, update)
        self.set_checkpoint_clusters(self.actor)
        self.seen: list[tuple[int, int, float]] = []

    def run(self) -> None:
        for step in self.steps(7):
            if step == self.pipeline_config.dies_at:
                return
            metrics = self.model_update(step)
            assert self.model_update(step) == {}, "these weights are there"
            (version,), (weights,) = self.infer.look("weight_version"), self.infer.weights()
            assert not metrics or metrics["weights/infer/version"] == version
            total = sum(weight.double().sum().item() for weight in weights.values())
            self.seen.append((step, version, total))
            self.actor.add(0.1 * (step + 1))
            self.do_checkpoint(step)


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    with LocalJob(planned_places(1, 2, 1), 1, 2):
        yield


def run(folder: Path, exp_name: str = "exp", **given: Any) -> list[tuple[int, int, float]]:
    """Step, version and sum of the weights that the target answered with in each."""
    config = Config(output_dir=str(folder), exp_name=exp_name, num_gpus_per_node=2, **given)
    pipeline = Pipeline(config)
    pipeline.run()
    pipeline.close()
    return pipeline.seen


@pytest.mark.parametrize(
    ("frequency", "versions"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 1, 1, 4, 4, 4, 7])]
)
def test_each_so_many_steps_the_target_gets_what_the_source_has(
    frequency: int, versions: list[int], tmp_path: Path
) -> None:
    seen = run(tmp_path, frequency=frequency)
    assert [version for _, version, _ in seen] == versions
    of_version = {version: total for _, version, total in seen}
    assert len(set(of_version.values())) == len(of_version)
    assert all(of_version[version] == total for _, version, total in seen)


@pytest.mark.parametrize(("frequency", "dies_at"), [(1, 4), (3, 3), (3, 4), (3, 5)])
def test_resumed_between_updates_the_target_has_its_old_weights(
    frequency: int, dies_at: int, tmp_path: Path
) -> None:
    whole = run(tmp_path, "whole", frequency=frequency)
    first = run(tmp_path, frequency=frequency, dies_at=dies_at, save_steps=1)
    assert first + run(tmp_path, frequency=frequency, save_steps=1) == whole
    saved = tmp_path / "exp" / "checkpoints" / f"step_{dies_at}"
    assert (saved / "infer").is_dir() is (dies_at % frequency > 0), "and only then"


@pytest.mark.parametrize("before", [1, 3])
def test_with_another_frequency_the_run_goes_on(before: int, tmp_path: Path) -> None:
    """From 1 to 3 there are no old weights to be had, so it begins with an update."""
    run(tmp_path, frequency=before, dies_at=4, save_steps=1)
    versions = [version for _, version, _ in run(tmp_path, frequency=4 - before)]
    assert versions == {1: [5, 5, 7], 3: [5, 6, 7]}[before]


class Forgetful(Side):
    pass


def test_pairs_that_can_not_be_are_refused(tmp_path: Path) -> None:
    pipeline = Pipeline(Config(output_dir=str(tmp_path), exp_name="x", num_gpus_per_node=2))
    other = Cluster("b", Forgetful, pipeline.resource_manager, WorkerConfig(device_mapping=[0]))
    other.make()
    with pytest.raises(ValueError, match="frequency=0: must be at least 1 step"):
        pipeline.set_model_update_pair(pipeline.actor, other, 0)
    with pytest.raises(ValueError, match="infer gets weights already; one source is enough"):
        pipeline.set_model_update_pair(other, pipeline.infer)
    with pytest.raises(ValueError, match="cluster b can't be checkpointed"):
        pipeline.set_model_update_pair(pipeline.actor, other, 2)
    pipeline.set_model_update_pair(pipeline.actor, other)
    assert {"weights/infer/version", "weights/b/version"} <= pipeline.model_update(0).keys()
    pipeline.close()
