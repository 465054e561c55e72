"""Who is asked of which rows, and what becomes of the answers; roles are stood in for."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_td.config.algorithm import AlgorithmConfig
from roll_td.config.onpolicy_distill import OnPolicyDistillConfig
from roll_td.config.schema import read
from roll_td.pipelines.estimating import Estimator
from roll_td.pipelines.onpolicy_distill import OnPolicyDistillPipeline, check_widths
from roll_td.pipelines.recording import Recorder
from roll_td.protocol import DataProto
from roll_td.runtime.refs import Reply

LOG: list[str] = []
"""What the roles were asked, and when answers were taken, in order."""


class Role:
    """Says the same of each token."""

    def __init__(self, name: str, says: float) -> None:
        self.name, self.says, self.seen = name, says, list[int]()

    def compute_log_probs(
        self, tokens: DataProto, column: str, temperature: float, blocking: bool
    ) -> Reply:
        assert temperature == 0.5 and not blocking
        LOG.append(f"ask {self.name}")
        self.seen += tokens["input_ids"][:, 0].tolist()
        shape = tokens["input_ids"].shape

        def answer() -> Any:
            LOG.append(f"take {self.name}")
            yield DataProto({column: torch.full(shape, self.says)})

        return Reply(answer())


def pipeline(says: dict[str, float], **config: Any) -> Any:
    made: Any = object.__new__(OnPolicyDistillPipeline)
    algorithm = read(AlgorithmConfig, config.pop("algorithm", {})).value
    assert algorithm is not None
    settings = {"teacher_key": "domain", "teacher_coefficient": 2.0, "teacher_gamma": 0.0}
    made.pipeline_config = SimpleNamespace(
        **settings | config, teachers=says, algorithm=algorithm, offload=False, compares_old=True
    )
    made.estimator = Estimator(algorithm, 4)
    made.temperature, made.metrics, made.reference, made.critic = 0.5, [], None, None
    made.recorder, made.settling_s = Recorder(Path(), None), 0.0
    made.actor_train = Role("student", -1.0)
    made.teachers = {tag: Role(tag, value) for tag, value in says.items()}
    return made


def batch(**more: Any) -> DataProto:
    mask = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 0, 1]]).bool()
    columns = {
        "input_ids": torch.arange(4)[:, None].expand(4, 3).contiguous(),
        "lengths": torch.full((4,), 3),
        "group_id": torch.tensor([0, 0, 1, 1]),
        "response_mask": mask,
    }
    objects = {"domain": ["b", "a", "c", "b"], "finish_reason": ["stop"] * 4}
    return DataProto(columns | more, objects)


def test_each_row_goes_to_its_teacher_and_all_are_asked_before_any_answers() -> None:
    made, rows = pipeline({"a": -2.0, "default": -3.0, "b": -4.0, "idle": -5.0}), batch()
    LOG.clear()
    made.ask(rows)
    seen = {tag: teacher.seen for tag, teacher in made.teachers.items()}
    assert seen == {"a": [1], "default": [2], "b": [0, 3], "idle": []}
    assert rows["teacher_log_probs"][:, 1].tolist() == [-4, -2, -3, -4]
    assert rows["old_log_probs"].tolist() == [[-1.0] * 3] * 4
    asked = [entry for entry in LOG if entry.startswith("ask")]
    assert LOG[: len(asked)] == asked and len(asked) == 4
    made = pipeline({"default": -2.0})
    made.ask(unkept := batch().select(["input_ids", "lengths", "response_mask"]))
    assert unkept["teacher_log_probs"].tolist() == [[-2.0] * 3] * 4


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_without_rewards_the_advantage_is_what_teachers_say_alone(gamma: float) -> None:
    made, rows = pipeline({"b": -1.5, "default": -0.5}, teacher_gamma=gamma), batch()
    made.estimator.shape(rows)
    made.ask(rows)
    made.estimate(rows)
    # twice teacher - student; with gamma 1 that of the next token too
    first = -1.0 * (1 + gamma)
    wanted = [[0, first, -1], [0, 1, 0], [0, 1 + gamma, 1], [0, 0, -1]]
    assert rows["advantages"].tolist() == wanted
    told = made.metrics[0] | made.metrics[1]
    assert told.pop("time/teachers_s") >= 0 and told.pop("time/log_probs_s", 0) >= 0
    made.metrics = [m for m in made.metrics if "teacher/reverse_kl" in m]
    assert made.metrics[0] == {
        "teacher/reverse_kl": 0.0,
        "teacher/without_answer": 0,
        "teacher/b/reverse_kl": 0.5,
        "teacher/default/reverse_kl": -0.5,
    }


def test_rewards_add_to_what_teachers_say() -> None:
    made = pipeline({"default": -1.5}, algorithm={"advantage": {"name": "rloo"}})
    rows = batch(scores=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    made.estimator.shape(rows)
    made.ask(rows)
    made.estimate(rows)
    assert rows["advantages"].tolist() == [[0, 0, 0], [0, -2, 0], [0, -1, -1], [0, 0, -1]]


@pytest.mark.parametrize("failure", [math.nan, -math.inf])
def test_j06_rows_that_a_teacher_has_no_answer_to_are_masked_and_counted(failure: float) -> None:
    made = pipeline({"b": failure, "default": -0.5}, algorithm={"advantage": {"name": "rloo"}})
    rows = batch(scores=torch.tensor([1.0, 0.0, 1.0, 0.5]))
    made.estimator.shape(rows)
    made.ask(rows)
    made.estimate(rows)
    assert rows["response_mask"].any(-1).tolist() == [False, True, True, False]
    # nor do their scores count: those of the others have nothing to be compared with
    assert rows["advantages"].tolist() == [[0] * 3, [0, 1, 0], [0, 1, 1], [0] * 3]
    (told,) = [m for m in made.metrics if "teacher/reverse_kl" in m]
    assert told["teacher/without_answer"] == 2 and told["teacher/reverse_kl"] == -0.5


def test_a_student_can_not_say_what_a_teacher_has_no_logits_for() -> None:
    check_widths(101, {"a": 101, "b": 128})
    message = "the student has logits for 104 tokens and teacher b for 101"
    with pytest.raises(ValueError, match=message):
        check_widths(104, {"a": 128, "b": 101})


def test_a_row_without_a_teacher_is_found_at_the_start() -> None:
    made = pipeline({"a": -1.0}, rewards={})
    teachers = OnPolicyDistillConfig.check_teachers
    made.pipeline_config.check_teachers = lambda values: teachers(made.pipeline_config, values)
    with pytest.raises(ValueError, match="domain='b' has no teacher: there are a"):
        made.check_data(batch())
