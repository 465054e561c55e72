"""What pipelines share that have prompts answered and the answers scored."""

from __future__ import annotations

import numpy as np
import torch

from roll_td.config.base import WorkerConfig
from roll_td.config.model import GenerationConfig
from roll_td.config.rlvr import RLVRConfig
from roll_td.data.rows import Rows
from roll_td.pipelines.base import BasePipeline
from roll_td.pipelines.estimating import Estimator
from roll_td.pipelines.scoring import Scorer
from roll_td.protocol import DataProto
from roll_td.rollout.scheduler import Scheduler, Source
from roll_td.runtime.cluster import Cluster
from roll_td.runtime.refs import Refs, get


def start_roles(pipeline: BasePipeline, *roles: WorkerConfig) -> list[Cluster]:
    """The clusters of these roles, made and initialised, all at the same time."""
    specs = [(str(role.name), str(role.name), str(role.worker_cls), role) for role in roles]
    clusters = list(pipeline.create_clusters_parallel(specs).values())
    config = pipeline.pipeline_config
    get([cluster.initialize(config, blocking=False) for cluster in clusters])
    return clusters


def start_scheduler(
    config: RLVRConfig,
    actor_infer: Cluster,
    scorer: Scorer,
    prompts: Source,
    estimator: Estimator,
) -> Scheduler | None:
    """What has prompts answered one by one and scored, if config.scheduling says so."""
    if not config.scheduling.by_requests:
        return None
    return Scheduler(
        actor_infer,
        prompts,
        scorer,
        lambda rows: bool(estimator.shape(rows.clone()).any()),
        config.scheduling,
        config.actor_infer.generation,
        config.batch_size,
        config.max_refills,
        config.seed,
    )


def numbered(rows: Rows, first: int, count: int) -> DataProto:
    """So many prompts from this row on, with their numbers as group_id."""
    numbers = np.arange(first, first + count)
    prompts = rows.batch(numbers)
    prompts.update({"group_id": torch.from_numpy(numbers)})
    return prompts


def answers(
    actor_infer: Cluster, prompts: DataProto, generation: GenerationConfig, seed: int
) -> Refs:
    """A call under way: answers to prompts that have a group_id, as GenerationWorker.generate
    gives them."""
    prompts.update({"sample_id": prompts["group_id"]})
    asked: Refs = actor_infer.generate(prompts, generation, seed, blocking=False)
    return asked
