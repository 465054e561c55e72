"""Checkpoints and resuming of a pipeline in a job of threads: as if nothing had happened.

The threads share one random state, so nothing is drawn here.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from roll_td import (
    BaseConfig,
    BasePipeline,
    Cluster,
    Dispatch,
    Worker,
    WorkerConfig,
    WorkerError,
    register,
    register_request,
)
from roll_td.checkpoint import store
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
    worker_cls: type[Worker] = Model

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model = Cluster("a", self.worker_cls, self.resource_manager, config.a)
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


class Slow(Model):
    """Writes beside the run, when it may."""

    may_write = threading.Event()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def do_checkpoint(self, folder: str) -> None:
        self.staged = self.weight

    @register_request
    def write_checkpoint(self, folder: str) -> None:
        assert self.may_write.wait(30)
        self.write(Path(folder) / f"{self.rank}.json")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.staged))


class SlowPipeline(Pipeline):
    """Lets the first checkpoint be written once a step more is done."""

    worker_cls = Slow

    def run(self) -> None:
        for step in self.steps(3):
            self.did.append(step)
            self.model.train(float(step + 1))
            if step == 1:
                assert {path.name for path in (self.run_dir / "checkpoints").iterdir()} == {
                    "step_1.partial"
                }
                Slow.may_write.set()
            self.do_checkpoint(step)
            if step == 1:  # it has waited for the one before
                assert (self.run_dir / "checkpoints" / "step_1").is_dir()


def slow(folder: Path, **given: Any) -> SlowPipeline:
    config = Config(output_dir=str(folder), exp_name="exp", num_gpus_per_node=2, **given)
    return SlowPipeline(config)


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    event = threading.Event()
    monkeypatch.setattr(Slow, "may_write", event)
    return event


def test_steps_go_on_while_a_checkpoint_is_written(
    tmp_path: Path, may_write: threading.Event
) -> None:
    pipeline = slow(tmp_path, save_steps=1)
    pipeline.run()
    pipeline.close()  # waits for the last
    found = saved(tmp_path)
    assert sorted(found) == [1, 2, 3]
    assert found[1] == [1.0, 2.0]  # as it was then, not as it was written
    assert found[2] == [2.9, 4.8]


def test_a_synchronous_one_is_complete_at_once(tmp_path: Path, may_write: threading.Event) -> None:
    may_write.set()
    pipeline = slow(tmp_path, save_steps=1, asynchronous_checkpoints=False)
    pipeline.did.append(pipeline.model.train(1.0)[0])
    pipeline.do_checkpoint(0)
    assert sorted(saved(tmp_path)) == [1]
    pipeline.close()


def no_space(*_: object) -> None:
    raise OSError("no space left")


@pytest.mark.parametrize(
    ("broken", "name", "message"),
    [
        (Slow, "write", r"a\.write_checkpoint failed .*no space left"),
        (store, "sync_tree", r"the driver failed .*no space left"),
    ],
)
def test_what_fails_while_writing_ends_the_job(
    broken: object,
    name: str,
    message: str,
    tmp_path: Path,
    may_write: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broken, name, no_space)
    may_write.set()
    with pytest.raises(WorkerError, match=message), LocalJob(planned_places(1, 2, 1), 1, 2):
        pipeline = slow(tmp_path, save_steps=1)
        for _ in range(1000):
            pipeline.do_checkpoint(0)
            pipeline.model.train(1.0)
    for open_file in [*pipeline.trackers.values(), pipeline._trace]:
        open_file.close()
    assert [path.name for path in (tmp_path / "exp" / "checkpoints").iterdir()] == [
        "step_1.partial"
    ]
