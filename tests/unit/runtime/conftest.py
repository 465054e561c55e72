"""Jobs whose ranks are threads of the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from roll_td.config.base import WorkerConfig
from roll_td.placement import planned_places
from roll_td.runtime import cluster as clusters
from roll_td.runtime import driver as drivers
from roll_td.runtime.cluster import Cluster, ResourceManager
from roll_td.runtime.inprocess import LocalJob

MakeRole = Callable[..., Cluster]


@pytest.fixture(autouse=True)
def by_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large buffers go by the transport, as to a busy rank, although little would show it."""
    monkeypatch.setattr(drivers, "MESSAGE_BYTES", 0)
    monkeypatch.setattr(clusters, "ANSWERS_BYTES", 0)


@pytest.fixture
def job() -> Iterator[LocalJob]:
    """Four device ranks, and the driver on one of its own. A failure left over fails the test."""
    with LocalJob(planned_places(1, 4, 1), 1, 4) as running:
        yield running


@pytest.fixture
def role(job: LocalJob) -> MakeRole:
    """`role(WorkerClass, 2)` is a Cluster of two workers on the first devices of the job."""

    def make(worker_cls: type, workers: int = 2, name: str = "role", **config: Any) -> Cluster:
        config = {"device_mapping": list(range(workers))} | config
        worker_config = WorkerConfig(name=name, **config)
        return Cluster(name, worker_cls, ResourceManager(1, 4), worker_config)

    return make
