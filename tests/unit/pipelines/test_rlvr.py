"""What the pipeline draws, keeps and learns from; its roles are stood in for."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_td.config.algorithm import AlgorithmConfig
from roll_td.config.model import GenerationConfig
from roll_td.config.schema import read
from roll_td.metrics import Sum
from roll_td.pipelines.estimating import Estimator
from roll_td.pipelines.recording import Recorder
from roll_td.pipelines.rlvr import VALUED_BY, RLVRPipeline
from roll_td.plan import default_plan
from roll_td.protocol import DataProto
from roll_td.runtime.refs import Reply


class Stream:
    """Prompts that are nothing but their group_id."""

    def draw(self, position: int, count: int) -> DataProto:
        return DataProto({"group_id": torch.arange(position, position + count)})


class Learner:
    """Keeps what it is to learn from."""

    def __init__(self) -> None:
        self.learnt: list[DataProto] = []

    def plan_for(self, data: DataProto, denominators: dict[str, float]) -> Any:
        return default_plan(len(data), 1, None, denominators)

    def train_step(self, data: DataProto, blocking: bool) -> Reply:
        assert not blocking, "others may learn meanwhile"
        self.learnt.append(data)
        return Reply(iter([DataProto(meta_info={"metrics": {"loss": Sum(1)}})]))


def pipeline(algorithm: dict[str, Any], **config: Any) -> Any:
    made: Any = object.__new__(RLVRPipeline)
    settings = read(AlgorithmConfig, algorithm).value
    assert settings is not None
    defaults = {"batch_size": 2, "max_refills": 0, "mini_batches": 1, "ppo_epochs": 1, "seed": 1}
    defaults |= {"critic_warmup_steps": 0}
    made.pipeline_config = SimpleNamespace(**defaults | config, algorithm=settings, offload=False)
    made.estimator = Estimator(settings, 4)
    made.generation, made.temperature = GenerationConfig(), 0.5
    made.train_data, made.position, made.metrics = Stream(), 0, []
    made.under_way, made.settling_s, made.logged = deque(), 0.0, []
    made.log = lambda metrics, step: made.logged.append((step, metrics))
    made.recorder = Recorder(Path(), None)
    made.scheduler = None
    made.actor_train, made.critic, made.reward, made.global_step = Learner(), None, object(), 0
    made.actor_infer = object()
    made.scheduler = None
    return made


def answering(scores: dict[int, tuple[float, float]]) -> Any:
    """Two answers to each prompt, with the scores that its group_id has."""

    def answers(prompts: DataProto, generation: object, seed: int) -> tuple[DataProto, dict]:
        batch = prompts.repeat(2)
        rows, found = len(batch), [scores[group] for group in prompts["group_id"].tolist()]
        batch.update(
            {
                "scores": torch.tensor(found).flatten(),
                "response_mask": torch.ones(rows, 3, dtype=torch.bool),
                "input_ids": torch.ones(rows, 3, dtype=torch.int64),
                "lengths": torch.full((rows,), 3),
                "infer_log_probs": torch.zeros(rows, 3),
            }
        )
        batch.update(DataProto(None, {"finish_reason": ["stop"] * rows}))
        return batch, {}

    return answers


DULL, SHARP = (1.0, 1.0), (0.0, 1.0)
DROP = {"scores": {"drop_without_signal": True}}


@pytest.mark.parametrize(
    ("prompts", "refills", "kept", "position"),
    [
        ([SHARP, SHARP], 3, [0, 1], 2),  # enough at once
        ([DULL, SHARP, SHARP, SHARP], 3, [1, 2], 3),  # prompt 3 is drawn again in the next step
        ([DULL, SHARP, DULL, SHARP], 3, [1, 3], 4),
        ([DULL, DULL, DULL, DULL, SHARP, DULL], 2, [4], 6),  # the limit
    ],
)
def test_prompts_are_drawn_until_enough_have_a_signal(prompts, refills, kept, position) -> None:
    made = pipeline(DROP, max_refills=refills)
    made.answers = answering(dict(enumerate(prompts)))
    batch = made.rollout()
    assert batch["group_id"].tolist() == [g for g in kept for _ in range(2)]
    assert made.position == position
    made.settle()
    sampled = sum(m["reward/groups_with_signal"].count for m in made.metrics if len(m) > 3)
    assert sampled == len(prompts)


def test_without_any_signal_the_step_is_one_in_which_nothing_counts() -> None:
    made = pipeline(DROP, max_refills=1)
    made.answers = answering(dict(enumerate([DULL] * 4)))
    batch = made.rollout()
    assert len(batch) == 4 and not batch["response_mask"].any()
    made.estimator.estimate(batch)
    made.learn(batch)
    made.settle()
    (learnt,) = made.actor_train.learnt
    assert len(learnt) == 1 and not learnt["response_mask"].any()
    assert learnt.plan.denominators == {"tokens": 0.0, "rows": 0.0}


def test_rows_without_signal_are_not_computed_but_counted() -> None:
    made = pipeline({})
    made.answers = answering({0: DULL, 1: SHARP})
    batch = made.rollout()
    made.estimator.estimate(batch)
    made.learn(batch)
    made.settle()
    (learnt,) = made.actor_train.learnt
    assert len(learnt) == 2 and learnt["advantages"].abs().min() > 0
    assert learnt.plan.denominators == {"tokens": 12.0, "rows": 4.0}
    assert learnt.meta_info == {"temperature": 0.5, "kl_coefficient": 0.0}
    assert "finish_reason" not in learnt and "old_log_probs" not in learnt


def test_the_driver_goes_on_while_roles_learn_and_get_weights() -> None:
    made, done = pipeline({}), []
    made.answers = answering({0: SHARP, 1: SHARP})
    made.begin_model_update = lambda step: lambda: done.append(step) or {"weights": Sum(1)}
    made.global_step = 4
    batch = made.rollout()
    made.estimator.estimate(batch)
    made.learn(batch)
    made.update_weights(5)
    assert len(made.actor_train.learnt) == 1 and not made.logged and not done
    made.global_step = 5
    made.settle()
    made.settle()
    ((step, metrics),) = made.logged
    names = {name for one in metrics for name in one}
    assert step == 4 and {"actor/loss", "response/length", "time/train_s"} <= names
    # the update is of the next step, and so are its metrics
    assert done == [5] and {"weights": 1} in made.metrics


def test_each_row_is_in_one_mini_batch_of_each_epoch() -> None:
    made = pipeline({}, mini_batches=3, ppo_epochs=2, batch_size=4)
    made.answers = answering(dict.fromkeys(range(4), SHARP))
    batch = made.rollout()
    batch.update({"input_ids": torch.arange(8)[:, None].expand(8, 3).contiguous()})
    made.estimator.estimate(batch)
    torch.manual_seed(0)
    made.learn(batch)
    made.settle()
    rows = [learnt["input_ids"][:, 0].tolist() for learnt in made.actor_train.learnt]
    assert [len(own) for own in rows] == [3, 3, 2] * 2
    epochs = [[row for own in half for row in own] for half in (rows[:3], rows[3:])]
    assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 2
    assert epochs[0] != epochs[1], "each in an order of its own"
    assert made.logged[0][1][-1] == {"actor/loss": 6}


def test_a_critic_learns_rows_that_teach_the_actor_nothing_and_before_it() -> None:
    gae = {"name": "gae", "settings": {"lam": 1}}
    made = pipeline({"advantage": gae}, critic_warmup_steps=2, mini_batches=2)
    made.critic = Learner()
    made.answers = answering({0: DULL, 1: SHARP})
    batch = made.rollout()
    # of the second answer to prompt 0 the critic knew all, so its advantage is 0
    batch.update({"values": torch.tensor([[0.0], [1.0], [0.5], [0.5]]).expand(4, 3).contiguous()})
    batch.update({"input_ids": torch.arange(4)[:, None].expand(4, 3).contiguous()})
    made.estimate(batch)
    # of returns 1 1 0 1 the variance is 3/16, of what they are more than expected, 1 0 -½ ½, 5/16
    assert made.metrics[-1] == {"critic/explained_variance": pytest.approx(1 - 5 / 3)}
    for step in (0, 1, 2):
        made.global_step = step
        made.learn(batch)
        made.settle()
    rows = [
        [p["input_ids"][:, 0].tolist() for p in of.learnt] for of in (made.critic, made.actor_train)
    ]
    pairs = [sorted(rows[0][i] + rows[0][i + 1]) for i in (0, 2, 4)]
    assert pairs == [[0, 1, 2, 3]] * 3
    assert sorted(rows[1][0] + rows[1][1]) == [0, 2, 3], "after the warm-up, and what matters"
    # both learn the same mini-batches
    assert [[row for row in part if row != 1] for part in rows[0][4:]] == rows[1]
    assert all(set(p.keys()) == VALUED_BY for p in made.critic.learnt)
    assert [p.plan.denominators["tokens"] for p in made.critic.learnt] == [6.0] * 6
    assert made.logged[2][1][-2:] == [{"critic/loss": 2}, {"actor/loss": 2}]
