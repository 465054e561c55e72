"""Metrics: floats whose type is their reduction."""

import copy
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from roll_td.metrics import Last, Max, Mean, Min, Sum, merge_metrics


def test_a_metric_is_a_float_everywhere() -> None:
    for kind in (Mean, Sum, Min, Max, Last):
        value = kind(0.25)
        assert (value, str(value), json.dumps({"x": value})) == (0.25, "0.25", '{"x": 0.25}')


def test_each_reduction() -> None:
    parts = [
        {"mean": Mean(1.0, 1), "sum": Sum(1), "min": Min(3), "max": Max(3), "last": Last(7)},
        {"mean": Mean(4.0, 2), "sum": Sum(5), "min": Min(2), "max": Max(2), "last": Last(6)},
    ]
    merged = merge_metrics(parts)
    assert merged == {"mean": 3.0, "sum": 6.0, "min": 2.0, "max": 3.0, "last": 6.0}
    assert [type(v) for v in merged.values()] == [Mean, Sum, Min, Max, Last]


def test_merging_in_two_stages_equals_merging_at_once() -> None:
    a, b, c = {"x": Mean(1.0, 3)}, {"x": Mean(5.0, 1)}, {"x": Mean(3.0, 4)}
    staged = merge_metrics([merge_metrics([a, b]), c])["x"]
    at_once = merge_metrics([a, b, c])["x"]
    assert isinstance(staged, Mean) and isinstance(at_once, Mean)
    assert (staged, staged.count) == (at_once, at_once.count) == (2.5, 8.0)


def test_bare_numbers_scalars_and_tensors_are_means_of_count_1() -> None:
    parts: list[dict[str, Any]] = [{"x": 1}, {"x": np.float32(2.0)}, {"x": torch.tensor(6.0)}]
    merged = merge_metrics(parts)
    assert merged == {"x": 3.0} and isinstance(merged["x"], Mean) and merged["x"].count == 3


def test_keys_of_some_parts_are_kept() -> None:
    assert merge_metrics([{"a": 1.0}, {"b": 2.0}]) == {"a": 1.0, "b": 2.0}
    assert merge_metrics([]) == {}


def test_a_mean_of_count_0_does_not_count() -> None:
    assert merge_metrics([{"x": Mean(math.nan, 0)}, {"x": Mean(2.0, 3)}]) == {"x": 2.0}
    empty = merge_metrics([{"x": Mean(1.0, 0)}, {"x": Mean(2.0, 0)}])["x"]
    assert isinstance(empty, Mean) and math.isnan(empty) and empty.count == 0


def test_nan_reaches_min_and_max_from_any_position() -> None:
    for kind in (Min, Max):
        for values in ((1.0, math.nan), (math.nan, 1.0)):
            assert math.isnan(merge_metrics([{"x": kind(v)} for v in values])["x"])


def test_unlike_reductions_are_an_error_naming_the_key() -> None:
    with pytest.raises(ValueError, match="'loss' comes as Mean and Sum"):
        merge_metrics([{"loss": 1.0}, {"loss": Sum(1)}])


@pytest.mark.parametrize("value", ["high", None, [1.0], torch.ones(2), np.ones(1)])
def test_a_value_that_is_no_number_is_an_error_naming_the_key(value: object) -> None:
    with pytest.raises(TypeError, match="metric 'loss'"):
        merge_metrics([{"loss": value}])  # type: ignore[dict-item]


def test_a_negative_count_is_an_error() -> None:
    with pytest.raises(ValueError, match="count -1"):
        Mean(1.0, -1)
    for count in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a count is 0 or more"):
            Mean(1.0, count)


def test_pickle_and_copy_keep_type_and_count() -> None:
    value = Mean(2.0, 5)
    for other in (pickle.loads(pickle.dumps(value)), copy.copy(value), copy.deepcopy(value)):
        assert (type(other), float(other), other.count) == (Mean, 2.0, 5.0)
    assert type(pickle.loads(pickle.dumps(Sum(1.0)))) is Sum
