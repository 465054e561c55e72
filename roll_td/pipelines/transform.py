"""The smallest pipeline: a batch goes to the workers, doubled it comes back. A smoke test."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from roll_td.config.base import BaseConfig
from roll_td.config.transform import TransformConfig
from roll_td.metrics import Sum
from roll_td.pipelines.base import BasePipeline
from roll_td.protocol import DataProto
from roll_td.runtime.cluster import Cluster
from roll_td.runtime.dispatch import Dispatch, register
from roll_td.runtime.refs import get
from roll_td.runtime.worker import Worker


class TransformWorker(Worker):
    """Doubles numbers."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: BaseConfig) -> None:
        """Nothing to make."""
        super().initialize(pipeline_config)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def transform(self, data: DataProto) -> DataProto:
        """Add a column `output`, twice the column `input`; count the rows of this worker."""
        data.update({"output": data["input"] * 2})
        data.meta_info["metrics"] = {"rows": Sum(len(data))}
        return data


class TransformPipeline(BasePipeline):
    """Sends batches to the role `transform` and checks what comes back."""

    def __init__(self, pipeline_config: TransformConfig) -> None:
        super().__init__(pipeline_config)
        self.transform_cluster = Cluster(
            name=str(pipeline_config.transform.name),
            worker_cls=str(pipeline_config.transform.worker_cls),
            resource_manager=self.resource_manager,
            worker_config=pipeline_config.transform,
        )
        get(
            self.transform_cluster.initialize(
                pipeline_config=pipeline_config,
                blocking=False,
            )
        )

    def run(self) -> None:
        """One batch a step."""
        for batch in self.build_batches():
            output = self.transform_cluster.transform(batch)
            self.consume(batch, output)

    def build_batches(self) -> Iterator[DataProto]:
        """Random numbers (B, 4), a batch for each step."""
        for _ in self.steps(self.pipeline_config.steps):
            yield DataProto({"input": torch.rand(self.pipeline_config.batch_size, 4)})

    def consume(self, batch: DataProto, output: DataProto) -> None:
        """Raise ValueError unless the rows came back in order, doubled; log their metrics."""
        if not torch.equal(output["output"], batch["input"] * 2):
            raise ValueError(
                f"step {self.global_step}: {output} is not twice {batch}; "
                f"if {self.pipeline_config.transform.worker_cls} doubles, the transport is at fault"
            )
        self.log({**output.meta_info["metrics"], "output": output["output"].mean()})
