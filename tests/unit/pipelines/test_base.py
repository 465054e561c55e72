"""BasePipeline in a job of threads: run directory, steps, metrics, seeds, trace."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from roll_td import (
    BaseConfig,
    BasePipeline,
    Cluster,
    Dispatch,
    Max,
    Mean,
    Sum,
    Worker,
    WorkerConfig,
    register,
)
from roll_td.placement import planned_places
from roll_td.runtime.inprocess import LocalJob
from roll_td.trackers import read_metrics


class Steps(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def draw(self) -> float:
        return torch.rand(1).item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def config(self) -> Any:
        assert self.pipeline_config is not None
        return self.pipeline_config.exp_name, self.worker_config.name


@dataclass
class Secrets:
    api_key: str = "S3CRET"
    url: str = "https://user:S3CRET@host/x"
    num_tokens: int = 7


@dataclass
class Config(BaseConfig):
    a: WorkerConfig = field(default_factory=lambda: WorkerConfig(device_mapping=[0]))
    b: WorkerConfig = field(default_factory=lambda: WorkerConfig(device_mapping=[0, 1]))
    tracker: Secrets = field(default_factory=Secrets)


class Pipeline(BasePipeline):
    def run(self) -> None: ...


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    with LocalJob(planned_places(1, 2, 1), 1, 2):
        yield Config(output_dir=str(tmp_path), exp_name="exp", num_gpus_per_node=2)


def test_a_run_directory_with_config_metrics_and_trace(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = Pipeline(config)
    made = pipeline.create_clusters_parallel(
        [("first", "a", Steps, config.a), ("second", "b", f"{__name__}.Steps", config.b)]
    )
    assert list(made) == ["first", "second"] and made["second"].world_size == 2
    made["second"].initialize(config)
    assert made["second"].config() == [("exp", "b")] * 2
    seen = []
    for step in pipeline.steps(3):
        seen.append((step, pipeline.global_step))
        made["first"].draw()
        parts = [{"n": Sum(1), "m": Mean(step, 1), "x": 4.0}, {"n": Sum(2), "m": Mean(3, 3)}]
        pipeline.log(parts)
    pipeline.log({"late": Max(1.5)}, step=1)
    assert seen == [(0, 0), (1, 1), (2, 2)] and pipeline.global_step == 3
    pipeline.close()
    folder = tmp_path / "exp"
    assert sorted(p.name for p in folder.iterdir()) == ["config.yaml", "metrics.jsonl", "trace"]
    metrics = read_metrics(folder / "metrics.jsonl")
    assert {k: v for k, v in metrics.items() if k[1] == 1} == {
        ("n", 1): 3.0, ("m", 1): 2.5, ("x", 1): 4.0, ("late", 1): 1.5
    }  # fmt: skip
    assert capsys.readouterr().err.splitlines()[0] == "step 0/3  n 3  m 2.25  x 4"
    (trace,) = (folder / "trace").iterdir()
    events = json.loads(trace.read_text())
    spans = [e["name"] for e in events if e["ph"] == "X"]
    assert spans.count("a.draw") == 3 and spans.count("b.config") == 2
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {f"rank {rank} on node0" for rank in range(3)}


def test_the_step_is_that_of_the_commands_draws(config: Config) -> None:
    pipeline = Pipeline(config)
    cluster = Cluster("a", Steps, pipeline.resource_manager, config.a)
    first = [cluster.draw()[0] for _ in pipeline.steps(4)]
    assert len(set(first)) == 4
    pipeline.global_step = 2
    assert [cluster.draw()[0] for _ in pipeline.steps(4)] != first[2:], "second calls of a step"
    assert list(pipeline.steps(4)) == [], "all steps are done"
    pipeline.close()


def test_the_driver_is_seeded_by_the_config(config: Config) -> None:
    def draws(seed: int) -> tuple[float, ...]:
        config.seed = seed
        pipeline = Pipeline(config)
        drawn = torch.rand(1).item(), float(np.random.rand()), random.random()
        pipeline.close()
        return drawn

    first = draws(1)
    assert draws(1) == first and not set(draws(2)) & set(first)


def test_c11_the_saved_config_shows_no_secret(config: Config, tmp_path: Path) -> None:  # C11
    pipeline = Pipeline(config)
    pipeline.log({"x": 1.0})
    pipeline.close()
    for path in (tmp_path / "exp").rglob("*"):
        assert path.is_dir() or "S3CRET" not in path.read_text()
    saved = yaml.safe_load((tmp_path / "exp" / "config.yaml").read_text())
    assert saved["tracker"] == {"api_key": "***", "url": "https://***@host/x", "num_tokens": 7}
    assert saved["b"]["device_mapping"] == [0, 1]


def test_a_second_start_adds_to_the_metrics_and_has_a_trace_of_its_own(
    config: Config, tmp_path: Path
) -> None:
    for start in range(2):
        pipeline = Pipeline(config)
        for step in pipeline.steps(3):
            pipeline.log({"x": float(10 * start + step)})
        pipeline.close()
        if start == 0:
            first = list((tmp_path / "exp" / "trace").iterdir())
    metrics = read_metrics(tmp_path / "exp" / "metrics.jsonl")
    assert metrics == {("x", step): 10.0 + step for step in range(3)}
    assert len(list((tmp_path / "exp" / "trace").iterdir())) == len(first) + 1


def test_a_pipeline_outside_a_job_and_one_without_run() -> None:
    with pytest.raises(ValueError, match="there is no job here"):
        Pipeline(Config())
    with pytest.raises(TypeError, match="abstract"):
        BasePipeline(Config())  # type: ignore[abstract]


def test_devices_that_the_job_does_not_have(config: Config) -> None:
    config.num_gpus_per_node = 4
    with pytest.raises(ValueError, match="this job has 1 nodes of 2 devices"):
        Pipeline(config)


def test_close_waits_for_what_runs(config: Config) -> None:
    pipeline = Pipeline(config)
    cluster = Cluster("b", Steps, pipeline.resource_manager, config.b)
    pending = [cluster.draw(blocking=False) for _ in range(5)]
    pipeline.close()
    assert all(refs.call.done.is_set() for refs in pending)
