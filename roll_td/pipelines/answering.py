"""What pipelines share that have prompts answered and the answers scored."""

from __future__ import annotations

from roll_td.config.base import WorkerConfig
from roll_td.config.model import GenerationConfig
from roll_td.metrics import Metric
from roll_td.pipelines.base import BasePipeline
from roll_td.protocol import DataProto
from roll_td.runtime.cluster import Cluster
from roll_td.runtime.refs import get


def start_roles(pipeline: BasePipeline, *roles: WorkerConfig) -> list[Cluster]:
    """The clusters of these roles, made and initialised, all at the same time."""
    specs = [(str(role.name), str(role.name), str(role.worker_cls), role) for role in roles]
    clusters = list(pipeline.create_clusters_parallel(specs).values())
    config = pipeline.pipeline_config
    get([cluster.initialize(config, blocking=False) for cluster in clusters])
    return clusters


def answers(
    actor_infer: Cluster,
    reward: Cluster,
    prompts: DataProto,
    generation: GenerationConfig,
    seed: int,
) -> tuple[DataProto, dict[str, Metric]]:
    """Answers to prompts that have a group_id, as GenerationWorker.generate gives them, with the
    columns of RewardWorker.compute_rewards; and what the rewards tell of them."""
    prompts.update({"sample_id": prompts["group_id"]})
    batch = actor_infer.generate(prompts, generation, seed)
    rewards = reward.compute_rewards(DataProto(None, batch.non_tensor_batch))
    batch.update(rewards)
    return batch, rewards.meta_info["metrics"]
