"""What columns and rows may be: wrong ones are errors at once, never a silent surprise."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from roll_td.protocol import DataProto


def letters(n: int = 5) -> DataProto:
    return DataProto({"i": torch.arange(n)}, {"s": list("abcdefgh"[:n])})


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (np.int64(-1), "e"),
        (np.uint8(1), "b"),
        (torch.tensor(2), "c"),
        (np.array(3), "d"),
        ((0, -1), "ae"),
        (range(4, -1, -2), "eca"),
        ([np.int64(1), np.int32(-1)], "be"),
        ([torch.tensor(1), torch.tensor(2)], "bc"),
        ([np.True_, np.False_, np.True_, np.False_, np.True_], "ace"),
        (np.array([1, 2], dtype=np.uint64), "bc"),
        (torch.tensor([-5, -1], dtype=torch.int16), "ae"),
        (np.array([]), ""),
        (slice(np.int64(3), None), "de"),
    ],
)
def test_rows_by_every_kind_of_number(index: Any, rows: str) -> None:
    assert letters()[index]["s"].tolist() == list(rows)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (True, "row is True: want a whole number"),
        (np.True_, "want a whole number"),
        (1.0, "row is 1.0: want a whole number"),
        (None, "row is None: want a whole number"),
        ({1}, "want a whole number"),
        (["i", "s"], "neither numbers nor a mask; columns go by select"),
        (np.array([1, 2], dtype=object), "neither numbers nor a mask"),
        ((slice(0, 1), 0), "neither numbers nor a mask"),
        (torch.tensor([1, 0, 1, 0, 1], dtype=torch.uint8), "uint8, to torch a mask: want bool"),
        (torch.tensor([1.0]), "row index is torch.float32: want integers"),
    ],
)
def test_what_is_no_row_is_an_error(index: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        letters()[index]


def test_a_mask_has_an_entry_a_row_and_an_index_one_dimension() -> None:
    for mask in (np.array([], dtype=bool), torch.ones(6, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"mask has \d entries for 5 rows"):
            letters()[mask]
    with pytest.raises(ValueError, match=r"shape \[1, 2\]: want one dimension"):
        letters()[[[0, 1]]]
    for beyond in ([5], [-6], [0, 9]):
        with pytest.raises(IndexError, match="of 5 rows: out of range"):
            letters().reorder(beyond)


CALLS: dict[str, Callable[[Any], Any]] = {
    "chunk: n": lambda n: letters().chunk(n),
    "repeat: n": lambda n: letters().repeat(n),
    "pad_to: divisor": lambda n: letters().pad_to(n),
    "unpad: n": lambda n: letters().unpad(n),
    "iter_batches: size": lambda n: letters().iter_batches(n),
    "iter_batches: epochs": lambda n: letters().iter_batches(2, epochs=n),
}


@pytest.mark.parametrize("what", list(CALLS))
def test_counts_are_whole_numbers(what: str) -> None:
    for wrong in (1.5, 2.0, "3", None, True, [1]):
        with pytest.raises(TypeError, match=f"{what} is .*: want a whole number"):
            CALLS[what](wrong)
    with pytest.raises(ValueError, match=f"{what} is -1: want a whole number of at least"):
        CALLS[what](-1)
    CALLS[what](np.int64(2))
    CALLS[what](torch.tensor(2))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DataProto([1]), TypeError, "batch is a list: want a TensorDict, a dict or None"),
        (lambda: DataProto(torch.ones(2)), TypeError, "batch is a Tensor"),
        (lambda: DataProto(DataProto()), TypeError, "batch is a DataProto"),
        (lambda: DataProto({"x": [1, 2]}), TypeError, r"batch\['x'\] is a list: want a tensor"),
        (lambda: DataProto({"x": {"y": torch.ones(1)}}), TypeError, r"batch\['x'\] is a dict"),
        (lambda: DataProto({1: torch.ones(2)}), TypeError, "column name 1 is a int: want a string"),
        (lambda: DataProto({("a", "b"): torch.ones(2)}), TypeError, "is a tuple: want a string"),
        (lambda: DataProto(None, {1: [1, 2]}), TypeError, "column name 1"),
        (lambda: DataProto(None, {"x": (1, 2)}), TypeError, "column 'x' is a tuple"),
        (lambda: DataProto(None, {"x": "text"}), TypeError, "column 'x' is a str"),
        (lambda: DataProto(None, {"x": torch.ones(2)}), TypeError, "column 'x' is a Tensor"),
        (lambda: DataProto(None, {"x": np.array(3)}), ValueError, "'x' has no dimension"),
        (lambda: DataProto({"x": torch.eye(2).to_sparse()}), ValueError, "sparse or nested"),
        (lambda: DataProto(meta_info=[1]), TypeError, "meta_info is a list: want a dict"),  # type: ignore[arg-type]
        (lambda: DataProto(meta_info="text"), TypeError, "meta_info is a str"),  # type: ignore[arg-type]
        (
            lambda: DataProto(TensorDict({"a": TensorDict({}, [2])}, [2])),
            TypeError,
            r"batch\['a'\] is a TensorDict",
        ),
    ],
)
def test_what_is_no_column_is_an_error(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_list_put_into_non_tensor_batch_is_a_column() -> None:
    """It once came back as row numbers."""
    data = letters(3)
    data.non_tensor_batch["new"] = ["x", "y", "z"]
    data.non_tensor_batch["array"] = np.array([1, 2, 3])
    for taken in (
        data[[2, 0]],
        data.reorder([2, 0, 1])[:2],
        pickle.loads(pickle.dumps(data))[::-2],
    ):
        assert taken["new"].tolist() == ["z", "x"]
        assert taken["array"].tolist() == [3, 1]
        assert taken["new"].dtype == taken["array"].dtype == object
    assert data.group_by("new")["y"]["i"].tolist() == [1]
    assert DataProto.concat([data, data])["new"].tolist() == ["x", "y", "z"] * 2


def test_columns_put_in_by_hand_are_checked_by_the_next_call() -> None:
    for key, column, message in (
        ("new", ["x"], r"differ in rows: \{'i': 3, 's': 3, 'new': 1"),
        ("i", ["x", "y", "z"], r"columns \['i'\] are in batch and in non_tensor_batch"),
    ):
        data = letters(3)
        data.non_tensor_batch[key] = column
        with pytest.raises(ValueError, match=message):
            data.clone()
    data = letters(3)
    data.non_tensor_batch["new"] = 3
    with pytest.raises(TypeError, match="column 'new' is a int"):
        data.keys()


def test_batch_and_non_tensor_batch_can_be_assigned() -> None:
    data = letters(2)
    data.batch = {"x": torch.tensor([7, 8])}  # type: ignore[assignment]
    data.non_tensor_batch = {"o": [None, {"k": 1}]}
    assert data.keys() == ["x", "o"] and data[1]["o"].tolist() == [{"k": 1}]
    assert isinstance(data.batch, TensorDict) and len(data) == 2
    data.batch = None
    assert data.keys() == ["o"] and len(data) == 2
    with pytest.raises(TypeError, match="batch is a list"):
        data.batch = [1]  # type: ignore[assignment]
    own = DataProto(data.batch, data.non_tensor_batch)
    own.non_tensor_batch["more"] = [1, 2]
    assert data.keys() == ["o"], "the containers are never shared"


def test_concat_takes_any_iterable_of_dataprotos_and_nothing_else() -> None:
    """A generator once gave no rows."""
    whole: Any = DataProto.concat(part for part in letters(5).chunk(3))  # type: ignore[arg-type]
    assert whole["s"].tolist() == list("abcde") and whole["i"].tolist() == list(range(5))
    with pytest.raises(TypeError, match="concat got NoneType among its parts"):
        DataProto.concat([letters(), None])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="meta_info 'metrics' is 3: want a dict of metrics"):
        DataProto.concat([DataProto(meta_info={"metrics": 3})])


def test_unicode_and_odd_names() -> None:
    data = DataProto(
        {"日本": torch.arange(2), "a.b": torch.ones(2)}, {"ü": ["é", "🙂"], "": [1, 2]}
    )
    assert data.chunk(2)[1]["ü"].tolist() == ["🙂"]
    again = pickle.loads(pickle.dumps(DataProto.concat(data.chunk(2))))
    assert again.keys() == ["日本", "a.b", "ü", ""] and again["日本"].tolist() == [0, 1]
    assert copy.deepcopy(data)["a.b"].tolist() == [1.0, 1.0]


def test_group_keys_are_what_can_be_a_key() -> None:
    mixed = DataProto(None, {"g": [1, "1", None, (1, 2), 1]})
    assert {k: len(v) for k, v in mixed.group_by("g").items()} == {1: 2, "1": 1, None: 1, (1, 2): 1}
    for value in ([1], (1, [2]), {"a": 1}):
        with pytest.raises(TypeError, match=r"group_by\('g'\): row 0 is a"):
            DataProto(None, {"g": [value]}).group_by("g")
    flags = DataProto({"g": torch.tensor([True, False, True])})
    assert {k: len(v) for k, v in flags.group_by("g").items()} == {True: 2, False: 1}


def test_torchs_compiler_is_not_imported_before_a_tensordict_is_wanted() -> None:
    program = """
import sys, torch, roll_td.runtime.job, roll_td.workers.reward, roll_td.pipelines.rlvr
from roll_td import DataProto
data = DataProto({"x": torch.ones(2)})
print("torch._dynamo" in sys.modules, len(data.batch), "tensordict" in sys.modules)
"""
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert out.stdout == "False 2 True\n", out.stderr


def test_a_batch_can_be_made_while_another_thread_imports_tensordict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", ModuleType("tensordict"))  # as it is at first
    assert DataProto({"x": torch.arange(2)})["x"].tolist() == [0, 1]
