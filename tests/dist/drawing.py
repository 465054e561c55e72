"""A pipeline without a model whose every number is drawn, to be stopped and resumed."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from roll_td import BaseConfig, BasePipeline, Cluster, Dispatch, Worker, WorkerConfig, register
from roll_td.checkpoint.random_state import load_random_state, save_random_state


class DrawingWorker(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def draw(self) -> float:
        """Each rank draws another number of times."""
        drawn = [torch.rand(1).item() + random.random() for _ in range(self.rank + 1)]
        return sum(drawn) + float(np.random.rand())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def do_checkpoint(self, folder: str) -> None:
        save_random_state(Path(folder) / f"random_{self.rank}.json")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        load_random_state(Path(folder) / f"random_{self.rank}.json")


@dataclass
class DrawingConfig(BaseConfig):
    a: WorkerConfig = field(default_factory=WorkerConfig)
    steps: int = 6
    dies_at: int | None = None


class Drawing(BasePipeline):
    def __init__(self, pipeline_config: DrawingConfig) -> None:
        super().__init__(pipeline_config)
        self.cluster = Cluster(
            "a", "drawing.DrawingWorker", self.resource_manager, pipeline_config.a
        )
        self.cluster.initialize(pipeline_config)
        self.set_checkpoint_clusters(self.cluster)

    def run(self) -> None:
        for step in self.steps(self.pipeline_config.steps):
            if step == self.pipeline_config.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            for repeat in range(2):
                drawn = self.cluster.draw()
                own = torch.rand(1).item() + random.gauss(0, 1) + float(np.random.randn())
                values = {"rank 0": drawn[0], "rank 1": drawn[1], "driver": own}
                self.log({f"{name}, {repeat}": value for name, value in values.items()})
            self.do_checkpoint(step)
