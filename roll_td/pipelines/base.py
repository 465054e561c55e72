"""BasePipeline: what every pipeline has. It runs on the driver and calls Clusters."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from roll_td.checkpoint.files import write_json
from roll_td.checkpoint.random_state import load_random_state, save_random_state
from roll_td.checkpoint.run import STATE, RunCheckpoints, changes
from roll_td.checkpoint.starts import count_start
from roll_td.config.base import BaseConfig, WorkerConfig
from roll_td.config.load import resolved_yaml
from roll_td.config.masking import masked
from roll_td.config.model_update import ModelUpdateConfig
from roll_td.metrics import Metric, merge_metrics
from roll_td.runtime.cluster import Cluster, ResourceManager
from roll_td.runtime.driver import Driver, current_driver
from roll_td.runtime.failure import Cause
from roll_td.runtime.notices import Stopped
from roll_td.runtime.refs import get
from roll_td.runtime.seeding import seed_command
from roll_td.runtime.trace import CALLS, COMMANDS, TraceWriter
from roll_td.trackers import Start, TerminalTracker, Tracker, open_trackers
from roll_td.weights.update import Pair

logger = logging.getLogger(__name__)

RANDOM = "random_driver.json"
"""The driver's random states in a checkpoint."""
Metrics = Mapping[str, float]
ClusterSpec = tuple[str, str, "str | type", WorkerConfig]
"""Key in the dict returned, name of the role, Worker class (or its dotted path), config."""


class BasePipeline(ABC):
    """Made and run once in a job. A subclass makes its Clusters in `__init__`.

    The run directory has config.yaml (secrets masked), metrics.jsonl, checkpoints/step_N, and
    under trace/ a file of each start, which Perfetto reads; the nodes of a job share it. From the
    start on, global_step is the number of steps that are done; `steps` restores the rest of the
    checkpoint that is resumed.
    """

    shown: Collection[str] | None = None
    """Names of the metrics that the progress line has; None: all."""

    def __init__(self, pipeline_config: BaseConfig) -> None:
        self._driver = current_driver()
        seed_command(pipeline_config.seed, "driver", 0, 0, "run", 0)
        self.pipeline_config: Any = pipeline_config  # the subclass knows its class
        self.resource_manager = ResourceManager(
            pipeline_config.num_nodes, pipeline_config.num_gpus_per_node or 0
        )
        self.run_dir = pipeline_config.run_dir
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._settings: Any = masked(dataclasses.asdict(pipeline_config))
        self._checkpoints = RunCheckpoints(self.run_dir / "checkpoints", pipeline_config)
        (self.run_dir / "config.yaml").write_text(resolved_yaml(pipeline_config), encoding="utf-8")
        self._checkpoint_clusters: tuple[Cluster, ...] = ()
        self._update_pairs: list[tuple[Pair, int]] = []
        """Each with the steps between updates."""
        self._is_restored = self._checkpoints.start is None
        self._end: int | None = None
        self._is_asked = self._is_stopping = False
        """Whether this step has called do_checkpoint, and that has made the last one."""
        self.global_step = self._checkpoints.step
        self.trackers: dict[str, Tracker] = open_trackers(pipeline_config.trackers, self._start())
        self._trace = self._driver.trace = _new_trace(self.run_dir / "trace", self._driver)

    @abstractmethod
    def run(self) -> None:
        """The whole of the work; the job ends when it returns."""

    def steps(self, n: int) -> Iterator[int]:
        """The steps from global_step to n; in the loop's body global_step is the current one.

        Before the first, what the run goes on from is restored: the clusters given to
        set_checkpoint_clusters, load_state_dict, the driver's random states. After a notice of
        the launcher it raises Stopped at the end of the step, which ends the job.
        """
        self.trackers["terminal"] = TerminalTracker(sys.stderr, n, self.shown)
        self._end = n
        if not self._is_restored:
            self._restore(n)
        if self.global_step < n:
            count_start(self.run_dir, self.global_step, self._driver.restarts)
        for step in range(self.global_step, n):
            if self._driver.notices and not self._is_asked:
                self._stop()
            self._is_asked = False
            self._set_step(step)
            yield step
            self._set_step(step + 1)
            if self._is_stopping:
                self._stop()

    def set_checkpoint_clusters(self, *clusters: Cluster) -> None:
        """The clusters that checkpoints hold. Each has registered methods do_checkpoint(folder)
        and load_checkpoint(folder), which get the path of a folder of the cluster's own; and it
        may have a request write_checkpoint(folder), called when do_checkpoint has returned, which
        writes the rest while the run goes on.

        ValueError for a cluster that lacks one, or for two of the same name.
        """
        for cluster in clusters:
            _check_saves(cluster)
        names = [cluster.name for cluster in clusters]
        if len(set(names)) < len(names):
            raise ValueError(f"clusters to checkpoint are named {names}: give each its own name")
        self._checkpoint_clusters = clusters

    def set_model_update_pair(
        self,
        src_cluster: Cluster,
        tgt_cluster: Cluster,
        frequency: int = 1,
        config: ModelUpdateConfig | None = None,
    ) -> None:
        """Have model_update give the weights of one role to another, each `frequency` steps. Both
        have been initialised; `config` None is the default one.

        ValueError for a strategy that can't, for models that don't fit each other, for a target
        that has a source already, or, with frequency above 1, can't be checkpointed.
        """
        if frequency < 1:
            raise ValueError(f"frequency={frequency}: must be at least 1 step")
        if any(pair.target is tgt_cluster for pair, _ in self._update_pairs):
            raise ValueError(f"{tgt_cluster.name} gets weights already; one source is enough")
        if frequency > 1:
            _check_saves(tgt_cluster)
        pair = Pair(src_cluster, tgt_cluster, config or ModelUpdateConfig())
        self._update_pairs.append((pair, frequency))

    def model_update(self, global_step: int) -> dict[str, Metric]:
        """Update the targets of all pairs whose frequency divides `global_step`, and those that
        never were. What has the weights of this step already is left as it is.

        The weights' version is global_step + 1, so a target's tells how old they are in steps.
        Returns metrics: see Pair.update; none of those that are left.
        """
        return self.begin_model_update(global_step)()

    def begin_model_update(self, global_step: int) -> Callable[[], dict[str, Metric]]:
        """As model_update, but returns at once: a function that waits for the end."""
        ends, version = [], global_step + 1
        for pair, frequency in self._update_pairs:
            is_due = global_step % frequency == 0 or pair.version == 0
            if is_due and pair.version != version:
                ends.append(pair.begin(version))
        return lambda: {name: metric for end in ends for name, metric in end().items()}

    def do_checkpoint(self, global_step: int, is_last: bool | None = None) -> None:
        """Save the state after the step `global_step`, as checkpoints/step_N with N one more, if
        save_steps asks for it or the step is the last; None: it is the last of `steps`. After a
        notice of the launcher it is saved in any case.

        With asynchronous_checkpoints it returns when all that it needs has been copied, and is
        complete later: before the next one, and before the run ends.

        Called at the end of the loop's body: what is drawn or logged afterwards in the same step
        would be lost on resuming.
        """
        done = global_step + 1
        is_last = done == self._end if is_last is None else is_last
        # asked once: a notice that comes from here on is for the next step
        self._is_asked, self._is_stopping = True, bool(self._driver.notices)
        if not (is_last or self._is_stopping or self._checkpoints.is_due(done)):
            return
        self._checkpoints.wait()
        self.settle()
        with ExitStack() as saving:
            folder = saving.enter_context(self._checkpoints.saving(done))
            calls, writes = [], []
            # others get their weights again before they are asked
            kept = [pair for pair, n in self._update_pairs if pair.version and done % n]
            for cluster in self._checkpointed(kept):
                own = folder.absolute() / cluster.name
                own.mkdir()
                calls.append(cluster.do_checkpoint(str(own), blocking=False))
                if hasattr(cluster, "write_checkpoint"):
                    writes += [
                        partial(cluster.write_checkpoint, str(own), worker=i, blocking=False)
                        for i in range(cluster.world_size)
                    ]
            positions = {name: tracker.position() for name, tracker in self.trackers.items()}
            state = {
                "global_step": done,
                "config": self._settings,
                "trackers": positions,
                "weight_versions": {pair.target.name: pair.version for pair in kept},
                "pipeline": self.state_dict(),
            }
            write_json(folder / STATE, state)
            save_random_state(folder / RANDOM)
            get(calls)
            rest = partial(_finish, saving.pop_all(), writes)
        if self.pipeline_config.asynchronous_checkpoints and writes:
            self._checkpoints.finish(rest, self._fail)
        else:
            rest()

    def settle(self) -> None:  # noqa: B027  most leave nothing
        """Before the state is saved: a subclass waits here for what it has left under way."""

    def state_dict(self) -> dict[str, Any]:
        """What a subclass wants in its checkpoints beside global_step: plain data, as JSON has."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict gave; a subclass that has a state_dict defines this too."""
        if state:
            raise ValueError(
                f"the checkpoint holds {sorted(state)}, which {type(self).__name__} does not take "
                "over; define load_state_dict"
            )

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
        self._checkpoints.close()
        for tracker in self.trackers.values():
            tracker.close()
        self._driver.trace = None
        self._trace.close()

    def _start(self) -> Start:
        """Where trackers begin: another run's positions mean nothing in this one's files."""
        positions = self._checkpoints.state["trackers"] if self._checkpoints.is_own else None
        return Start(self.run_dir, self.run_dir.name, self._settings, self.global_step, positions)

    def _restore(self, n: int) -> None:
        start, state = self._checkpoints.start, self._checkpoints.state
        assert start is not None
        if self.global_step >= n:
            text = "%s has done %d steps and is to do %d: nothing to do"
            logger.info(text, self.run_dir, self.global_step, n)
        else:
            logger.info("going on from %s", start)
        if changed := changes(state["config"], self._settings):
            logger.warning("settings differ from those of %s: %s", start, ", ".join(changed))
        calls = []
        versions = state["weight_versions"]
        kept = [pair for pair, _ in self._update_pairs if pair.target.name in versions]
        for cluster in self._checkpointed(kept):
            own = start.absolute() / cluster.name
            if not own.is_dir():
                raise ValueError(
                    f"{start} has nothing of the role {cluster.name}; set resume=none "
                    "and another exp_name to begin anew"
                )
            calls.append(cluster.load_checkpoint(str(own), blocking=False))
        get(calls)
        for pair in kept:
            pair.version = versions[pair.target.name]
        self.load_state_dict(state["pipeline"])
        load_random_state(start / RANDOM)
        self._is_restored = True

    def _checkpointed(self, kept: Sequence[Pair]) -> list[Cluster]:
        """The clusters that are in a checkpoint with the targets of these pairs."""
        own = self._checkpoint_clusters
        return [*own, *(pair.target for pair in kept if pair.target not in own)]

    def _stop(self) -> NoReturn:
        names = ", then ".join(number.name for number in self._driver.notices)
        raise Stopped(f"stopped by {names} after {self.global_step} steps")

    def _fail(self, error: BaseException) -> None:
        self._driver.fail(Cause.of(error, "driver", self._driver.transport.rank))

    def _set_step(self, step: int) -> None:
        self.global_step = self._driver.step = step


def _finish(saving: ExitStack, writes: Sequence[Callable[[], Any]]) -> None:
    """Have all ranks write what they have staged, then mark the checkpoint as complete."""
    with saving:
        get([write() for write in writes])


def _check_saves(cluster: Cluster) -> None:
    missing = [m for m in ("do_checkpoint", "load_checkpoint") if not hasattr(cluster, m)]
    if missing:
        raise ValueError(
            f"the cluster {cluster.name} can't be checkpointed: its Worker has no "
            f"{' and no '.join(missing)}; register them, or derive it from ModelWorker"
        )


def _new_trace(folder: Path, driver: Driver) -> TraceWriter:
    """A trace file named after the time in seconds, its tracks named as the driver fills them."""
    now = time.time()
    trace = TraceWriter(folder / f"{now:.3f}.json", now)
    for rank, place in enumerate(driver.places):
        trace.process(rank, f"rank {rank} on {place.host}")
        trace.thread(rank, COMMANDS, "commands")
    trace.thread(driver.layout.driver_rank, CALLS, "calls of the driver")
    return trace
