"""Reinforcement learning with verifiable rewards: a policy learns from what its answers score."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from roll_td.algorithms.aggregation import denominators
from roll_td.algorithms.evaluation import explained_variance
from roll_td.config.base import role_sections
from roll_td.config.model import GenerationConfig
from roll_td.config.rewards import check_domains
from roll_td.config.rlvr import RLVRConfig
from roll_td.data.loader import load_data
from roll_td.metrics import Last, Metric, Sum, merge_metrics, under
from roll_td.models import load_tokenizer
from roll_td.pipelines import outcomes
from roll_td.pipelines.answering import answers, numbered, start_roles, start_scheduler
from roll_td.pipelines.base import BasePipeline
from roll_td.pipelines.estimating import Estimator
from roll_td.pipelines.recording import Recorder
from roll_td.pipelines.scoring import Scorer
from roll_td.pipelines.training import is_validation_due
from roll_td.protocol import DataProto
from roll_td.rollout.scheduler import Scheduler
from roll_td.runtime.cluster import Cluster
from roll_td.runtime.refs import Refs, get

LEARNT_FROM = {"input_ids", "lengths", "response_mask", "infer_log_probs", "ref_log_probs"}
"""Columns of the actor's train_step beside those that the policy loss names, where the batch has
them."""
VALUED_BY = {"input_ids", "lengths", "response_mask", "values", "returns"}
"""Columns of the critic's train_step."""


class RLVRPipeline(BasePipeline):
    """Roles: actor_train, actor_infer, reward; reference with a KL; critic with an advantage that
    needs one. A step is a rollout of batch_size prompts and the updates from it."""

    shown = (
        "reward/mean", "response/length", "actor/loss", "actor/kl", "actor/grad_norm",
        "time/rollout_s", "time/train_s", "val/score", "val/pass@1",
    )  # fmt: skip

    def __init__(self, pipeline_config: RLVRConfig) -> None:
        super().__init__(pipeline_config)
        config = pipeline_config
        tokenizer = load_tokenizer(config.model)
        data = load_data(config.data, tokenizer, "prompts", config.batch_size, config.seed)
        self.train_data, self.validation_data = data.train, data.validation
        self.check_data(data.train.kept)
        self.generation = config.actor_infer.generation
        self.temperature = self.generation.temperature or 1.0
        self.estimator = Estimator(config.algorithm, self.generation.max_new_tokens)
        self.recorder = Recorder(self.run_dir, config.record_steps)
        self.position = 0
        self.metrics: list[dict[str, Metric]] = []
        self.under_way: deque[Callable[[], None]] = deque()
        self.settling_s = 0.0
        roles = role_sections(vars(config))
        self.roles = dict(zip(roles, start_roles(self, *roles.values()), strict=True))
        self.actor_train, self.actor_infer = self.roles["actor_train"], self.roles["actor_infer"]
        self.reward, self.reference, self.critic = map(
            self.roles.get, ("reward", "reference", "critic")
        )
        if self.reward is not None:
            self.reward.check_golds(data.train.kept, blocking=False)  # it logs what it finds
        judges = {name: self.roles[f"judges.{name}"] for name in config.judges}
        self.scorer = Scorer(config, self.reward, judges)
        self.scheduler = start_scheduler(
            config, self.actor_infer, self.scorer, data.train, self.estimator
        )
        self.set_model_update_pair(self.actor_train, self.actor_infer, config=config.model_update)
        learners = [self.actor_train] if self.critic is None else [self.actor_train, self.critic]
        self.set_checkpoint_clusters(*learners)

    def check_data(self, kept: DataProto) -> None:
        """ConfigError if a row, of which these columns are kept, has nobody to judge it."""
        if self.pipeline_config.rewards and "domain" in kept:
            check_domains(self.pipeline_config.rewards, kept["domain"])

    def run(self) -> None:
        """Roll out, estimate, update, step for step; validate and save in between."""
        config = self.pipeline_config
        for step in self.steps(config.max_steps):
            self.update_weights(step)
            if step == 0 and self.validation_data is not None:
                self.log(self.validate())
            batch = self.rollout()
            self.ask(batch)
            self.estimate(batch)
            self.learn(batch)
            if self.validation_data is not None and is_validation_due(config, step):
                self.update_weights(step + 1)
                self.log(self.validate(), step + 1)
            self.do_checkpoint(step)
        if config.export_dir is not None:
            with self.on_device(self.actor_train):
                self.actor_train.export(config.export_dir)

    def rollout(self) -> DataProto:
        """Scored answers to batch_size prompts, shaped; with max_refills to as many as it takes to
        have batch_size with signal. The next step goes on after the last prompt that is used."""
        if self.scheduler is not None:
            return self.scheduled(self.scheduler)
        config, found, groups = self.pipeline_config, [], 0
        with self.timing("rollout"):
            for _ in range(1 + config.max_refills):
                prompts = self.train_data.draw(self.position, config.batch_size)
                self.position += config.batch_size
                batch, rewards = self.answers(prompts, self.generation, config.seed)
                self.metrics.append(rewards)
                self.tell(batch)
                signal = self.estimator.shape(batch)
                found.append(batch[signal] if config.max_refills else batch)
                groups += len(set(found[-1]["group_id"].tolist()))
                if groups >= config.batch_size:
                    break
            # without any signal, what was sampled last is trained on: nothing of it counts
            batch = DataProto.concat(found) if groups else batch
            if groups > config.batch_size:
                names = sorted(set(batch["group_id"].tolist()))[: config.batch_size]
                batch = batch[torch.isin(batch["group_id"], torch.tensor(names))]
                self.position = names[-1] + 1
        return batch

    def scheduled(self, scheduler: Scheduler) -> DataProto:
        """A rollout whose answers may have been made while the steps before learnt."""
        with self.timing("rollout"):
            left = self.pipeline_config.max_steps - self.global_step
            batch, looked_at, self.position = scheduler.batch(self.position, left)
        self.metrics += scheduler.metrics(batch)
        self.tell(looked_at)
        self.estimator.shape(batch)
        return batch

    def tell(self, batch: DataProto) -> None:
        """Have metrics of a rollout made by `settle`, when ranks have work."""
        as_sampled = batch.select(outcomes.COLUMNS & set(batch.keys()))
        self.under_way.append(lambda: self.metrics.append(outcomes.rollout_metrics(as_sampled)))

    def answers(
        self, prompts: DataProto, generation: GenerationConfig, seed: int
    ) -> tuple[DataProto, dict[str, Metric]]:
        """Answers to prompts that have a group_id, with scores float32 (B · n); and what the
        rewards tell of them."""
        with self.on_device(self.actor_infer):
            asked = answers(self.actor_infer, prompts, generation, seed)
        self.settle()
        batch: DataProto = asked.get()
        with self.on_device(*self.scorer.judges):
            return batch, self.scorer(batch)

    def ask(self, batch: DataProto) -> None:
        """Add what roles say of the answers, each at the same time if it has ranks of its own:
        old_log_probs where the update can't tell them itself, ref_log_probs, values."""
        tokens, asked = batch.select(["input_ids", "lengths"]), []
        with self.timing("log_probs"):
            if self.pipeline_config.compares_old:
                asked.append(self.log_probs(self.actor_train, tokens, "old_log_probs"))
            if self.reference is not None:
                asked.append(self.log_probs(self.reference, tokens, "ref_log_probs"))
            if self.critic is not None:
                with self.on_device(self.critic):
                    asked.append(self.critic.compute_values(tokens, blocking=False))
            for columns in get(asked):
                batch.update(columns)

    def log_probs(self, cluster: Cluster, tokens: DataProto, column: str) -> Refs:
        """A call under way: log-probs of tokens at the sampling temperature, float32 (B, T)."""
        with self.on_device(cluster):
            refs: Refs = cluster.compute_log_probs(tokens, column, self.temperature, blocking=False)
        return refs

    def estimate(self, batch: DataProto) -> None:
        """Add advantages, and returns for the critic."""
        self.recorder.begin(batch, self.estimator)
        self.metrics.append(under("actor", self.estimator.estimate(batch)))
        if self.critic is not None:
            names = "values", "returns", "response_mask"
            explained = explained_variance(*(batch[name] for name in names))
            self.metrics.append({"critic/explained_variance": Last(explained)})

    def learn(self, batch: DataProto) -> None:
        """Have actor and critic learn from the batch ppo_epochs times, each time in mini_batches
        optimiser steps; with ranks of their own at the same time. `settle` waits for it."""
        config, began_s = self.pipeline_config, time.monotonic()
        parts = [part for _ in range(config.ppo_epochs) for part in self.mini_batches(batch)]
        learning = {}
        if self.critic is not None:
            learning["critic"] = self.train(self.critic, map(self.for_critic, parts))
        if self.global_step >= config.critic_warmup_steps:
            learning["actor"] = self.train(self.actor_train, map(self.for_actor, parts))
        self.under_way.append(
            partial(self.learnt_from, self.global_step, began_s, batch, parts, learning)
        )

    def learnt_from(
        self,
        step: int,
        began_s: float,
        batch: DataProto,
        parts: list[DataProto],
        learning: Mapping[str, list[Refs]],
    ) -> None:
        """Wait until roles have learnt from parts of a step's batch, and log the step."""
        learnt = {name: get(steps) for name, steps in learning.items()}
        self.metrics.append({"time/train_s": Sum(time.monotonic() - began_s)})
        self.recorder.end(step, batch, parts, learnt, self.estimator.kl_coefficient)
        for name, steps in learnt.items():
            merged = merge_metrics([done.meta_info["metrics"] for done in steps])
            self.metrics.append(under(name, merged))
            if "kl" in merged:
                self.estimator.adapt(merged["kl"])
        self.log(self.metrics, step)
        self.metrics = []

    def settle(self) -> None:
        """Wait for what `learn` and `update_weights` have left under way: ranks go from one to the
        other, and on to the answers of the next step, without waiting for the driver."""
        began_s = time.monotonic()
        while self.under_way:
            self.under_way.popleft()()
        self.settling_s += time.monotonic() - began_s

    def train(self, cluster: Cluster, parts: Iterable[DataProto]) -> list[Refs]:
        """Calls under way: an optimiser step on each part."""
        with self.on_device(cluster):
            return [cluster.train_step(part, blocking=False) for part in parts]

    def for_actor(self, part: DataProto) -> DataProto:
        """What the actor learns of a mini-batch."""
        names, matters = LEARNT_FROM | self.estimator.loss_columns, self.estimator.matters(part)
        learnt = self.learnt(self.actor_train, part, matters, names)
        learnt.meta_info = {
            "temperature": self.temperature,
            "kl_coefficient": self.estimator.kl_coefficient,
        }
        return learnt

    def for_critic(self, part: DataProto) -> DataProto:
        """What the critic learns of a mini-batch."""
        assert self.critic is not None, "learn asks"
        return self.learnt(self.critic, part, part["response_mask"].any(-1), VALUED_BY)

    def learnt(
        self, cluster: Cluster, part: DataProto, matters: Tensor, names: set[str]
    ) -> DataProto:
        """Columns of the rows that matter, bool (B), planned for the cluster with denominators of
        all rows. Where none matters one is left: it is an optimiser step all the same."""
        counts = denominators(part["response_mask"], divisor=self.pipeline_config.algorithm.divisor)
        known = part.select(names & set(part.keys()))
        learnt = known[matters] if matters.any() else known[:1]
        learnt.plan = cluster.plan_for(learnt, counts)
        return learnt

    def mini_batches(self, batch: DataProto) -> Iterator[DataProto]:
        """The batch in mini_batches parts, in an order of the moment if there are several."""
        count = self.pipeline_config.mini_batches
        if count == 1:
            return iter([batch])
        batch = batch.reorder(torch.randperm(len(batch)))
        return (part for part in batch.chunk(count) if len(part))

    def validate(self) -> dict[str, Metric]:
        """What answers to all of the validation data score."""
        return outcomes.validation_metrics(
            self.validation_answers(), self.pipeline_config.validation
        )

    def validation_answers(self) -> DataProto:
        """Answers to all of the validation data."""
        assert self.validation_data is not None, "is_validation_due says no"
        config = self.pipeline_config
        prompts = numbered(self.validation_data, 0, len(self.validation_data))
        # other random numbers than the rollout's, the same each time
        batch, _ = self.answers(prompts, config.validation.generation, config.seed + 1)
        return batch

    def update_weights(self, step: int) -> None:
        """Weights of actor_train to actor_infer, if those of `step` are not there yet; `settle`
        waits for it. Engines rest meanwhile, and until then go on."""
        if self.scheduler is not None:
            self.settle()
        rest = self.scheduler.updating(step + 1) if self.scheduler is not None else nullcontext()
        with rest:
            with self.on_device(self.actor_train, self.actor_infer):
                self.under_way.append(partial(self.updated, self.begin_model_update(step)))
            if self.scheduler is not None:
                self.settle()

    def updated(self, end: Callable[[], dict[str, Metric]]) -> None:
        """Wait until an update has come to its end."""
        began_s = time.monotonic()
        self.metrics.append(end())
        self.metrics.append({"time/model_update_s": Sum(time.monotonic() - began_s)})

    @contextmanager
    def on_device(self, *clusters: Cluster) -> Iterator[None]:
        """With offload: the models of these roles are on their devices for the calls that are made
        inside, and not after."""
        if self.pipeline_config.offload:
            for cluster in clusters:
                cluster.load_states(blocking=False)
        yield
        if self.pipeline_config.offload:
            for cluster in clusters:
                cluster.offload_states(blocking=False)

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        """Log the seconds inside, but for those of `settle`, as time/<stage>_s of the step."""
        began_s = time.monotonic() - self.settling_s
        yield
        seconds = time.monotonic() - self.settling_s - began_s
        self.metrics.append({f"time/{stage}_s": Sum(seconds)})

    def close(self) -> None:
        """Also end the engines."""
        if self.scheduler is not None:
            self.scheduler.close()
        super().close()

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream of prompts, and what the estimator keeps."""
        return {"position": self.position, "estimator": self.estimator.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict gave."""
        self.position = state["position"]
        self.estimator.load_state_dict(state["estimator"])
