"""What the ranks of a role write."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll_td import WorkerConfig
from roll_td.distributed.topology import Topology, rank_infos
from roll_td.runtime.worker import WorkerContext
from roll_td.workers.base import ModelWorker


class NoState:
    """A strategy without any."""

    def save_checkpoint(self, folder: Path) -> None: ...

    def load_checkpoint(self, folder: Path) -> None: ...


def test_a13_ranks_of_one_dp_rank_write_files_of_their_own(tmp_path: Path) -> None:  # A13
    workers = []
    for info in rank_infos(Topology(dp=2, tp=2)):
        worker: Any = object.__new__(ModelWorker)
        worker.context = replace(WorkerContext.alone(), rank=info.rank, rank_info=info)
        worker.__init__(WorkerConfig(world_size=4))
        worker.strategy = NoState()
        workers.append(worker)
    drawn = []
    for number, worker in enumerate(workers):
        random.seed(number)
        worker.do_checkpoint(str(tmp_path))
        drawn.append(random.random())
    assert len({worker.rank_info.dp_rank for worker in workers}) == 2
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 4
    for worker, wanted in zip(workers, drawn, strict=True):
        worker.load_checkpoint(str(tmp_path))
        assert random.random() == wanted, "each has its own"
