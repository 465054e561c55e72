"""Where numbers differ first."""

from __future__ import annotations

import math

import pytest
import torch

from roll_td.pipelines.comparing import Compared, compare, comparison_table

NAMES = ["sample 4", "sample 7"]
NAN = math.nan


def of(recorded: list, computed: list, where: list, tolerance: float = 1e-3) -> Compared:
    tensors = torch.tensor(recorded), torch.tensor(computed), torch.tensor(where, dtype=torch.bool)
    return compare("stage", "column", *tensors, NAMES, tolerance)


def test_the_first_number_beyond_the_tolerance_is_named() -> None:
    ours = of([[1.0, 2, 3], [4, 5, 6]], [[1.0, 2, 9], [4, 5.5, 7]], [[1, 1, 0], [1, 1, 1]])
    assert ours.first == "sample 7, token 1: recorded 5, computed 5.5"
    assert (ours.count, ours.largest) == (5, pytest.approx(1 / 6))
    assert of([1.0, 2], [1.0, 3], [1, 1]).first == "sample 7: recorded 2, computed 3"


def test_a_difference_is_a_share_of_what_is_above_1() -> None:
    assert of([1000.0, 0.5], [1000.9, 0.5009], [1, 1]).first == ""
    assert of([1000.0, 0.5], [1000.0, 0.502], [1, 1]).first.startswith("sample 7")


@pytest.mark.parametrize(
    ("recorded", "computed", "largest"),
    [
        ([NAN, 1.0], [NAN, 1.0], 0),
        ([NAN, 1.0], [0.0, 1.0], math.inf),
        ([0.0, 1.0], [NAN, 1.0], math.inf),
        ([math.inf, 1.0], [math.inf, 1.0], 0),
        ([True, False], [True, True], 1),
    ],
)
def test_nan_is_equal_to_nan_alone(recorded: list, computed: list, largest: float) -> None:
    ours = of(recorded, computed, [1, 1])
    assert ours.largest == largest and (ours.first == "") == (largest == 0)


def test_the_table_tells_the_first_difference_of_all() -> None:
    equal, differs = of([1.0, 2], [1.0, 2], [1, 1]), of([1.0, 2], [2.0, 2], [1, 1])
    lines = comparison_table([equal, differs], ["no weights"]).splitlines()
    assert lines[1].endswith("equal") and lines[2].split()[:4] == [
        "stage",
        "column",
        "2",
        "1.0e+00",
    ]
    assert lines[3] == "no weights"
    assert lines[4] == "first difference: stage, column of sample 4: recorded 1, computed 2"
    assert comparison_table([equal], []).endswith("no difference")
