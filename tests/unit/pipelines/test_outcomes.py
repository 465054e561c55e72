"""What answers and their scores say."""

import math

import pytest
import torch

from roll_td.config.model import GenerationConfig
from roll_td.config.rlvr import ValidationConfig
from roll_td.pipelines.outcomes import rollout_metrics, validation_metrics
from roll_td.protocol import DataProto

NAN = math.nan


def answers(scores, groups, lengths, domains=None):
    objects = {"finish_reason": ["length" if n == 3 else "stop" for n in lengths]}
    if domains:
        objects["domain"] = domains
    mask = torch.arange(3) < torch.tensor(lengths)[:, None]
    columns = {"scores": torch.tensor(scores), "group_id": torch.tensor(groups)}
    return DataProto(columns | {"response_mask": mask}, objects)


def test_a_rollout():
    found = rollout_metrics(answers([1.0, 0.0, 0.5, NAN], [4, 4, 2, 2], [1, 2, 3, 3]))
    wanted = {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/groups_with_signal": 0.5,
        "reward/without_score": 1,
        "response/length": 2.25,
        "response/length_max": 3,
        "response/truncated": 0.5,
    }
    assert found == pytest.approx(wanted)
    assert found["reward/mean"].count == 3 and found["response/length"].count == 4


def test_n41_pass_at_k():
    # 3 of 8 right for one prompt, none of 8 for another, in mixed order
    config = ValidationConfig(GenerationConfig(num_return_sequences=8), [1, 2, 4])
    scores = [1.0, 0, 0, 1, 0, 0, 1, 0] + [0.0] * 8
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    rows = answers(scores, [9] * 8 + [3] * 8, [1] * 16).reorder(order)
    found = validation_metrics(rows, config)
    assert found["val/pass@1"] == pytest.approx(0.375 / 2)
    assert found["val/pass@2"] == pytest.approx(0.642857 / 2, abs=1e-6)
    assert found["val/pass@4"] == pytest.approx(0.928571 / 2, abs=1e-6)
    assert found["val/score"] == pytest.approx(3 / 16)


def test_by_domain_and_without_those_that_have_no_score():
    config = ValidationConfig(GenerationConfig(), [1], pass_score=0.5)
    found = validation_metrics(
        answers([0.5, 0.0, NAN, 1.0], [0, 1, 2, 3], [1] * 4, ["a", "b", "b", "b"]), config
    )
    assert found["val/score"] == pytest.approx(0.5) and found["val/score"].count == 3
    assert (found["val/a/pass@1"], found["val/b/pass@1"]) == (1.0, 0.5)
    assert found["val/pass@1"] == pytest.approx(2 / 3)


def test_l02_five_of_two_ranks():
    found = validation_metrics(answers([1.0, 0, 1, 0, 1], range(5), [1] * 5), ValidationConfig())
    assert found["val/score"] == found["val/pass@1"] == pytest.approx(0.6)
