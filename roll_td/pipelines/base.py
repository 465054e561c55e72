"""BasePipeline: what every pipeline has. It runs on the driver and calls Clusters."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_td.config.base import BaseConfig, WorkerConfig
from roll_td.config.load import resolved_yaml
from roll_td.metrics import merge_metrics
from roll_td.runtime.cluster import Cluster, ResourceManager
from roll_td.runtime.driver import Driver, current_driver
from roll_td.runtime.seeding import seed_command
from roll_td.runtime.trace import TraceWriter
from roll_td.trackers import JsonlTracker, TerminalTracker, Tracker

Metrics = Mapping[str, float]
ClusterSpec = tuple[str, str, "str | type", WorkerConfig]
"""Key in the dict returned, name of the role, Worker class (or its dotted path), config."""


class BasePipeline(ABC):
    """Made and run once in a job. A subclass makes its Clusters in `__init__`.

    The run directory has config.yaml (secrets masked), metrics.jsonl, and under trace/ a file of
    each start, which Perfetto reads.
    """

    def __init__(self, pipeline_config: BaseConfig) -> None:
        self._driver = current_driver()
        seed_command(pipeline_config.seed, "driver", 0, 0, "run", 0)
        self.pipeline_config: Any = pipeline_config  # the subclass knows its class
        self.resource_manager = ResourceManager(
            pipeline_config.num_nodes, pipeline_config.num_gpus_per_node or 0
        )
        self.global_step = 0
        self.run_dir = Path(pipeline_config.output_dir) / (pipeline_config.exp_name or "run")
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "config.yaml").write_text(resolved_yaml(pipeline_config), encoding="utf-8")
        self.trackers: dict[str, Tracker] = {
            "jsonl": JsonlTracker(self.run_dir / "metrics.jsonl"),
            "terminal": TerminalTracker(sys.stderr),
        }
        self._trace = self._driver.trace = _new_trace(self.run_dir / "trace", self._driver)

    @abstractmethod
    def run(self) -> None:
        """The whole of the work; the job ends when it returns."""

    def steps(self, n: int) -> Iterator[int]:
        """The steps from global_step to n; in the loop's body global_step is the current one."""
        self.trackers["terminal"] = TerminalTracker(sys.stderr, n)
        for step in range(self.global_step, n):
            self._set_step(step)
            yield step
            self._set_step(step + 1)

    def log(self, metrics: Metrics | Sequence[Metrics], step: int | None = None) -> None:
        """Give metrics to the trackers, under global_step or the step given.

        A list of metrics (one per worker, say) is merged first, each key by its type: Mean, Sum,
        Min, Max, Last; a bare number is a Mean.
        """
        parts = [metrics] if isinstance(metrics, Mapping) else metrics
        merged = merge_metrics(parts)
        for tracker in self.trackers.values():
            tracker.log(merged, self.global_step if step is None else step)

    def create_clusters_parallel(self, specs: Sequence[ClusterSpec]) -> dict[str, Cluster]:
        """Clusters whose workers are made at the same time; returns when all are."""
        clusters = {
            key: Cluster(name, worker_cls, self.resource_manager, config, blocking=False)
            for key, name, worker_cls, config in specs
        }
        for cluster in clusters.values():
            cluster.wait_built()
        return clusters

    def close(self) -> None:
        """Wait for what still runs, then close trackers and trace. Called after `run`."""
        self._driver.drain()
        for tracker in self.trackers.values():
            tracker.close()
        self._driver.trace = None
        self._trace.close()

    def _set_step(self, step: int) -> None:
        self.global_step = self._driver.step = step


def _new_trace(folder: Path, driver: Driver) -> TraceWriter:
    """A trace file named after the time in seconds, its tracks named as the driver fills them."""
    now = time.time()
    trace = TraceWriter(folder / f"{now:.3f}.json", now)
    for rank, place in enumerate(driver.places):
        trace.process(rank, f"rank {rank} on {place.host}")
        trace.thread(rank, 1, "commands")
    trace.thread(driver.layout.driver_rank, 0, "calls of the driver")
    return trace
