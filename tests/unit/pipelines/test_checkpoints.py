"""Checkpoints and resuming of a pipeline in a job of threads: as if nothing had happened.

The threads share one random state, so nothing is drawn here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from roll_td import BaseConfig, BasePipeline, Cluster, Dispatch, Worker, WorkerConfig, register
from roll_td.checkpoint.store import fault_of
from roll_td.placement import planned_places
from roll_td.runtime.inprocess import LocalJob
from roll_td.trackers import read_metrics


class Model(Worker):
    """A weight that depends on all that was done to it, in order."""

    weight = 0.0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, given: float) -> float:
        self.weight = self.weight * 0.9 + given + self.rank
        return self.weight

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def do_checkpoint(self, folder: str) -> None:
        (Path(folder) / f"{self.rank}.json").write_text(json.dumps(self.weight))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        self.weight = json.loads((Path(folder) / f"{self.rank}.json").read_text())


class NoModel(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def do_checkpoint(self, folder: str) -> None: ...


@dataclass
class Config(BaseConfig):
    a: WorkerConfig = field(default_factory=lambda: WorkerConfig(device_mapping=[0, 1]))
    steps: int = 10
    dies_at: int | None = None
    rate: float = 1.0


class Killed(Exception):
    """Stands for an end without a word."""


class Pipeline(BasePipeline):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model = Cluster("a", Model, self.resource_manager, config.a)
        self.set_checkpoint_clusters(self.model)
        self.seen: list[float] = []
        self.did: list[int] = []

    def run(self) -> None:
        for step in self.steps(self.pipeline_config.steps):
            if step == self.pipeline_config.dies_at:
                raise Killed
            self.did.append(step)
            self.seen.append(float(step + 1))
            weights = self.model.train(sum(self.seen) / 7)
            self.log({"weight/0": weights[0], "weight/1": weights[1], "sum": sum(self.seen)})
            self.do_checkpoint(step)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    with LocalJob(planned_places(1, 2, 1), 1, 2):
        yield


def run(folder: Path, exp_name: str = "exp", **given: Any) -> Pipeline:
    config = Config(output_dir=str(folder), exp_name=exp_name, num_gpus_per_node=2, **given)
    pipeline = Pipeline(config)
    try:
        pipeline.run()
    except Killed:
        return pipeline
    finally:
        pipeline.close()
    return pipeline


def saved(folder: Path, exp_name: str = "exp") -> dict[int, list[float]]:
    """The weights in each complete checkpoint."""
    found = {}
    for path in (folder / exp_name / "checkpoints").iterdir():
        assert fault_of(path) is None
        weights = [json.loads((path / "a" / f"{rank}.json").read_text()) for rank in range(2)]
        found[int(path.name.removeprefix("step_"))] = weights
    return found


def test_d05_named_after_what_is_done_and_the_last_is_saved(tmp_path: Path) -> None:  # D05
    run(tmp_path, steps=11, save_steps=5)
    run(tmp_path, "five", steps=5)
    found = saved(tmp_path)
    assert sorted(found) == [5, 10, 11]
    assert found[5] == saved(tmp_path, "five")[5]
    state = json.loads((tmp_path / "exp" / "checkpoints" / "step_5" / "pipeline.json").read_text())
    assert state["content"]["global_step"] == 5


def test_d02_resumed_twice_it_goes_on_and_ends_as_if_never_stopped(tmp_path: Path) -> None:  # D02
    whole = run(tmp_path, "whole", save_steps=1)
    for dies_at, first in ((5, 0), (9, 5), (None, 9)):
        pipeline = run(tmp_path, save_steps=1, dies_at=dies_at)
        assert pipeline.did == list(range(first, 10 if dies_at is None else dies_at))
        assert pipeline.did[0] == first and len(pipeline.seen) == pipeline.global_step
    assert pipeline.seen == whole.seen and saved(tmp_path) == saved(tmp_path, "whole")
    assert metric_lines(tmp_path, "exp") == metric_lines(tmp_path, "whole")


def metric_lines(folder: Path, exp_name: str) -> list[dict[str, float]]:
    lines = (folder / exp_name / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


def test_l01_steps_done_twice_are_logged_once(tmp_path: Path) -> None:  # L01
    run(tmp_path, "whole")
    run(tmp_path, save_steps=4, dies_at=7)
    assert len(metric_lines(tmp_path, "exp")) == 7
    assert run(tmp_path, save_steps=4).did == [4, 5, 6, 7, 8, 9]
    assert metric_lines(tmp_path, "exp") == metric_lines(tmp_path, "whole")


def test_killed_before_its_first_checkpoint_it_begins_anew(tmp_path: Path) -> None:
    run(tmp_path, "whole")
    run(tmp_path, dies_at=7)
    assert run(tmp_path).did == list(range(10))
    assert metric_lines(tmp_path, "exp") == metric_lines(tmp_path, "whole")


def test_d04_the_last_step_is_known_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # D04
    caplog.set_level("INFO")
    run(tmp_path, save_steps=4, dies_at=8)
    assert run(tmp_path, save_steps=4).did == [8, 9]
    assert sorted(saved(tmp_path)) == [4, 8, 10]
    again = run(tmp_path, save_steps=4)
    assert again.did == [] and again.global_step == 10
    assert "exp has done 10 steps and is to do 10: nothing to do" in caplog.text
    assert run(tmp_path, steps=6).did == []
    assert "exp has done 10 steps and is to do 6: nothing to do" in caplog.text
    assert sorted(saved(tmp_path)) == [4, 8, 10]


def test_restored_also_when_nothing_is_to_be_done(tmp_path: Path) -> None:
    done = run(tmp_path)
    again = run(tmp_path)
    assert again.seen == done.seen
    assert again.model.train(0.0)[0] == saved(tmp_path)[10][0] * 0.9, "for what follows the loop"


def test_only_the_newest_stay(tmp_path: Path) -> None:
    run(tmp_path, save_steps=3, keep_checkpoints=2)
    assert sorted(saved(tmp_path)) == [9, 10]


def test_another_runs_checkpoint_is_a_place_to_start_from(tmp_path: Path) -> None:
    run(tmp_path, "whole", save_steps=4)
    path = str(tmp_path / "whole" / "checkpoints" / "step_8")
    before = shutil.copytree(tmp_path / "whole", tmp_path / "before")
    assert run(tmp_path, resume=path, keep_checkpoints=1).did == [8, 9]
    assert saved(tmp_path) == {10: saved(tmp_path, "whole")[10]}
    assert metric_lines(tmp_path, "exp") == metric_lines(tmp_path, "whole")[8:]
    assert sorted(saved(tmp_path, "whole")) == sorted(saved(before.parent, "before")) == [4, 8, 10]
    assert run(tmp_path, resume=path, steps=11).did == [10], "its own are newer"


def test_resume_none_does_not_mix_two_runs(tmp_path: Path) -> None:
    run(tmp_path, resume="none", steps=2)
    with pytest.raises(ValueError, match=r"resume=none, but this run has checkpoints up to .*_2"):
        run(tmp_path, resume="none")


def test_settings_that_differ_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, steps=2)
    run(tmp_path, steps=3, rate=2.0, resume="auto")
    assert "step_2: steps: 2 → 3, rate: 1.0 → 2.0\n" in caplog.text


def test_the_newest_one_torn_costs_only_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, "whole", save_steps=4)
    run(tmp_path, save_steps=4)
    torn = tmp_path / "exp" / "checkpoints" / "step_10" / "a" / "1.json"
    torn.write_text("0.")
    assert run(tmp_path, save_steps=4).did == [8, 9]
    assert "step_10 does not count as a checkpoint: its file a/1.json has 2 bytes" in caplog.text
    moved = list((tmp_path / "exp" / "checkpoints").glob("step_10.moved-*"))
    assert len(moved) == 1
    shutil.rmtree(moved[0])
    assert saved(tmp_path) == saved(tmp_path, "whole")
    assert metric_lines(tmp_path, "exp") == metric_lines(tmp_path, "whole")


@pytest.mark.parametrize("part", ["random_driver.json", "pipeline.json"])
def test_d10_a_damaged_part_is_loud(part: str, tmp_path: Path) -> None:  # D10
    run(tmp_path, save_steps=4, dies_at=5)
    path = tmp_path / "exp" / "checkpoints" / "step_4" / part
    text = path.read_text()
    at = text.index('"content"') + 300
    path.write_text(text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :])
    with pytest.raises(ValueError, match=rf"{part} is damaged"):
        run(tmp_path, save_steps=4)


def test_clusters_that_cannot_be_saved_are_refused(tmp_path: Path) -> None:
    pipeline = Pipeline(Config(output_dir=str(tmp_path), exp_name="x", num_gpus_per_node=2))
    other = Cluster("b", NoModel, pipeline.resource_manager, WorkerConfig(device_mapping=[0]))
    with pytest.raises(ValueError, match=r"cluster b can't be .* no load_checkpoint; register"):
        pipeline.set_checkpoint_clusters(pipeline.model, other)
    with pytest.raises(ValueError, match=r"named \['a', 'a'\]"):
        pipeline.set_checkpoint_clusters(pipeline.model, pipeline.model)
    pipeline.close()


def test_state_that_nobody_takes_over_is_an_error(tmp_path: Path) -> None:
    class Forgetful(Pipeline):
        load_state_dict = BasePipeline.load_state_dict

    run(tmp_path, steps=2)
    pipeline = Forgetful(Config(output_dir=str(tmp_path), exp_name="exp", num_gpus_per_node=2))
    with pytest.raises(ValueError, match=r"holds \['seen'\], which Forgetful does not take over"):
        pipeline.run()
    pipeline.close()


def test_metrics_of_the_run_are_all_there(tmp_path: Path) -> None:
    run(tmp_path, steps=3)
    found = read_metrics(tmp_path / "exp" / "metrics.jsonl")
    assert {step for key, step in found if key == "sum"} == {0, 1, 2}
