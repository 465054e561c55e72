"""DataProto: no row is lost, repeated or shared by accident."""

import copy
import pickle
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from roll_td.columns import same_values
from roll_td.metrics import Mean, Sum
from roll_td.protocol import DataProto, pad_value

RAGGED = st.lists(st.integers(0, 9), max_size=3)
OBJECTS = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.dictionaries(st.sampled_from("ab"), RAGGED, max_size=2),
    RAGGED,
    RAGGED.map(np.array),
    RAGGED.map(torch.tensor),
)


@st.composite
def batches(draw: st.DrawFn, rows: int | None = None) -> DataProto:
    """A DataProto of tensors (some with no rows), object columns and meta_info."""
    n = draw(st.integers(0, 9)) if rows is None else rows
    columns: dict[str, Any] = {}
    if draw(st.booleans()):
        columns["ids"] = torch.arange(n * 2).view(n, 2)
        columns["mask"] = torch.arange(n) % 2 == 0
    for name in draw(st.sets(st.sampled_from(["x", "y"]))):
        columns[name] = draw(st.lists(OBJECTS, min_size=n, max_size=n))
    return DataProto.from_single_dict(columns, {"step": 1, "tags": ["a"], "nested": {"k": [1]}})


def same(a: DataProto, b: DataProto) -> bool:
    if a.keys() != b.keys() or len(a) != len(b) or not same_values(a.meta_info, b.meta_info):
        return False
    return all(same_values(a[key], b[key]) for key in a.keys())  # noqa: SIM118


def letters(n: int = 5) -> DataProto:
    return DataProto.from_single_dict({"i": torch.arange(n), "s": list("abcdefgh"[:n])})


@given(batches(), st.integers(1, 12))
def test_chunk_then_concat_is_the_identity(data: DataProto, n: int) -> None:
    parts = data.chunk(n)
    assert [len(part) for part in parts] == [len(p) for p in np.array_split(range(len(data)), n)]
    assert same(DataProto.concat(parts), data)
    assert same(DataProto.concat([DataProto(), *parts, DataProto()]), data)


@st.composite
def typed_batches(draw: st.DrawFn) -> DataProto:
    """Columns of every dtype and shape, token columns with lengths, objects, metrics."""
    rows, width = draw(st.integers(0, 9)), draw(st.integers(0, 4))
    dtypes = st.sampled_from([torch.bool, torch.int32, torch.bfloat16, torch.float64])
    shapes = st.sampled_from([(), (3,), (2, 0), (1, 2)])
    columns: dict[str, Any] = {
        name: torch.arange(rows * int(np.prod(shape))).view(rows, *shape).to(draw(dtypes))
        for name in draw(st.sets(st.sampled_from("abc")))
        for shape in [draw(shapes)]
    }
    if draw(st.booleans()):
        columns["lengths"] = torch.full((rows,), width)
        columns["input_ids"] = torch.arange(rows * width).view(rows, width)
    columns["o"] = draw(st.lists(OBJECTS, min_size=rows, max_size=rows))
    return DataProto.from_single_dict(columns, {"k": draw(OBJECTS), "metrics": {"n": Sum(0)}})


@given(typed_batches(), st.lists(st.integers(0, 9), max_size=6), st.integers(1, 4))
def test_rows_cut_anywhere_and_joined_in_any_grouping_are_the_same(
    data: DataProto, cuts: list[int], first: int
) -> None:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [data[start:stop] for start, stop in pairwise(bounds)]
    parts.insert(first % len(parts), data[[]])
    assert same(DataProto.concat(parts), data)
    inner = DataProto.concat(parts[:first])
    assert same(DataProto.concat([inner, *parts[first:]]), data)
    every = [data[i] for i in range(-len(data), 0)]
    assert same(DataProto.concat(every or [data]), data)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(len(cuts)))
    assert same(data.reorder(order).reorder(order.argsort()), data)


@given(batches())
def test_no_two_dataprotos_share_meta_info(data: DataProto) -> None:
    every = list(range(len(data)))
    made = [data, DataProto.concat([data]), DataProto.concat([data, data[:0]]), data.clone()]
    made += [*data.chunk(3), data[:], data[every], data.select(data.keys()), data.pad_to(2)[0]]
    made += [data.to("cpu"), data.repeat(2), data.reorder(every), data.unpad(0), copy.copy(data)]
    made += [data.pop([]), DataProto().union(DataProto(meta_info=data.meta_info))]
    other = DataProto()
    other.meta_info = data.meta_info
    made.append(other)
    for number, one in enumerate(made):
        one.meta_info["tags"].append(number)
        one.meta_info["nested"]["k"].append(number)
    for number, one in enumerate(made):
        assert one.meta_info["tags"] == ["a", number]
        assert one.meta_info["nested"]["k"] == [1, number]


@given(batches())
def test_pickle_keeps_everything(data: DataProto) -> None:
    assert same(pickle.loads(pickle.dumps(data)), data)


def test_a03_chunk_gives_exactly_n_parts() -> None:
    sizes = [len(p) for p in DataProto({"x": torch.arange(124)}).chunk(15)]
    assert sizes == [9] * 4 + [8] * 11
    assert [len(p) for p in DataProto({"x": torch.arange(3)}).chunk(4)] == [1, 1, 1, 0]


def test_a05_equal_objects_do_not_collapse() -> None:
    def of(*values: object) -> DataProto:
        return DataProto.from_single_dict({"x": list(values)})

    joined = DataProto.concat([of("a", "a"), of("b", "c")])
    assert joined["x"].tolist() == ["a", "a", "b", "c"]
    assert joined[3]["x"].tolist() == ["c"]
    assert DataProto.concat([of("a"), of("a")])["x"].tolist() == ["a", "a"]
    assert DataProto.concat([of(None), of({"k": [1]})])["x"].tolist() == [None, {"k": [1]}]
    assert of([1, 2], [3, 4])["x"].tolist() == [[1, 2], [3, 4]] and of([1, 2], [3])["x"].ndim == 1


def test_a06_a_value_of_the_whole_batch_that_differs_is_an_error() -> None:
    parts = [DataProto(meta_info={"scale": torch.tensor(v)}) for v in (1.0, 2.0)]
    with pytest.raises(ValueError, match=r"'scale' differs: tensor\(1\.\) and tensor\(2\.\)"):
        DataProto.concat(parts)
    with pytest.raises(ValueError, match="'scale' has no dimension"):
        DataProto({"scale": torch.tensor(1.0)})


def test_a08_meta_info_merges() -> None:
    def merged(*infos: dict[str, Any]) -> dict[str, Any]:
        return DataProto.concat([DataProto(meta_info=info) for info in infos]).meta_info

    times = merged({"metrics": {"t": 73.946372}}, {"metrics": {"t": 73.946380, "u": 1.0}})
    assert times["metrics"] == {"t": pytest.approx(73.946376, abs=1e-9), "u": 1.0}
    counted = merged({"metrics": {"x": Mean(1, 3), "n": Sum(3)}}, {"metrics": {"x": Mean(5, 1)}})
    assert counted["metrics"] == {"x": 2.0, "n": 3.0}
    assert merged({"a": 1}, {"b": 2}) == {"a": 1, "b": 2}
    nan = {"x": float("nan"), "y": np.array([np.nan, 1]), "z": torch.tensor([np.nan])}
    assert same_values(merged(nan, copy.deepcopy(nan)), nan)
    with pytest.raises(ValueError, match="'eos' differs: 1 and 2"):
        merged({"eos": 1}, {"eos": 2})


def test_a10_objects_of_every_rank_are_kept() -> None:
    parts = [DataProto.from_single_dict({"x": v}) for v in (["a"], ["b", "c"], [])]
    assert DataProto.concat(parts)["x"].tolist() == ["a", "b", "c"]


def test_from_single_dict_splits_by_type() -> None:
    data = DataProto.from_single_dict(
        {"t": torch.zeros(2, 3), "a": np.arange(4).reshape(2, 2), "l": ["x", None]}, {"k": 1}
    )
    assert data.batch is not None and list(data.batch.keys()) == ["t"]
    assert [row.tolist() for row in data["a"]] == [[0, 1], [2, 3]] and data["a"].dtype == object
    assert data.meta_info == {"k": 1}
    for value in ("text", 3, {"a": 1}, (1, 2)):
        with pytest.raises(TypeError, match="column 'bad'"):
            DataProto.from_single_dict({"bad": value})


def test_unequal_rows_and_shared_names_are_errors() -> None:
    with pytest.raises(ValueError, match="'t': 2, 'x': 3"):
        DataProto({"t": torch.zeros(2)}, {"x": [1, 2, 3]})
    with pytest.raises(ValueError, match=r"\['t'\] are in batch and in non_tensor_batch"):
        DataProto({"t": torch.zeros(2)}, {"t": [1, 2]})
    with pytest.raises(ValueError, match="batch_size"):
        DataProto(TensorDict({}, batch_size=[2, 3]))


def test_the_empty_dataproto() -> None:
    data = DataProto()
    assert (len(data), data.batch, data.keys(), len(data.chunk(2))) == (0, None, [], 2)
    assert list(data.iter_batches(2)) == [] and data.pad_to(4)[1] == 0


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (1, "b"),
        (-1, "e"),
        (slice(1, 4), "bcd"),
        (slice(None, None, 2), "ace"),
        (slice(None, None, -2), "eca"),
        (slice(-2, None), "de"),
        (slice(9, 12), ""),
        ([3, -5, 3], "dad"),
        ([], ""),
        ([True, False, False, True, False], "ad"),
        (np.array([0, 4]), "ae"),
        (np.array([False, True, False, False, False]), "b"),
        (torch.tensor([2, 1]), "cb"),
        (torch.tensor([False] * 5), ""),
    ],
)
def test_rows(index: Any, rows: str) -> None:
    part = letters()[index]
    assert part["s"].tolist() == list(rows)
    assert part["i"].tolist() == ["abcde".index(letter) for letter in rows]


def test_wrong_rows_are_errors() -> None:
    for index in (5, -6, [0, 5]):
        with pytest.raises(IndexError, match="of 5 rows"):
            letters()[index]
    with pytest.raises(ValueError, match="mask has 2 entries for 5 rows"):
        letters()[[True, False]]
    with pytest.raises(TypeError, match="want integers"):
        letters()[[0.5]]


def test_an_unknown_column_lists_those_there_are() -> None:
    data = letters()
    for call in (lambda: data["q"], lambda: data.select("q"), lambda: data.pop(["i", "q"])):
        with pytest.raises(KeyError, match=r"no column 'q'; there are \['i', 's'\]"):
            call()
    with pytest.raises(KeyError, match="no column 'q'"):
        letters().rename("q", "r")


def test_columns() -> None:
    data = letters(2)
    assert data.select("s").keys() == ["s"] and data.keys() == ["i", "s"]
    assert data.pop("i")["i"].tolist() == [0, 1] and data.keys() == ["s"] and len(data) == 2
    assert data.rename("s", "t").update({"u": torch.ones(2)}).keys() == ["u", "t"]
    assert data.rename({"t": "u", "u": "t"})["u"].tolist() == ["a", "b"]
    with pytest.raises(ValueError, match="pop the old one first"):
        data.rename("t", "u")
    assert data.update({"u": torch.zeros(2)})["u"].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="differ in rows"):
        data.update({"w": [1, 2, 3]})


def test_union() -> None:
    data = letters(2)
    joined = data.union(DataProto({"i": torch.arange(2), "f": torch.ones(2)}, meta_info={"k": 1}))
    assert joined is data and joined.keys() == ["i", "f", "s"] and joined.meta_info == {"k": 1}
    with pytest.raises(ValueError, match="column 'i' differs"):
        data.union(DataProto({"i": torch.tensor([0, 2])}))
    with pytest.raises(ValueError, match="2 with 3 rows"):
        data.union(letters(3))
    nan = DataProto({"f": torch.tensor([np.nan])})
    assert len(nan.union(nan.clone())) == 1


def test_clone_owns_its_tensors() -> None:
    data = letters(2)
    other = data.clone()
    other["i"][0], other["s"][0] = 9, "z"
    assert data["i"].tolist() == [0, 1] and data["s"].tolist() == ["a", "b"]


def test_repeat_reorder_and_padding() -> None:
    data = letters(3)
    assert data.repeat(2)["s"].tolist() == list("aabbcc")
    assert data.repeat(2, interleave=False)["s"].tolist() == list("abcabc")
    assert data.reorder([2, 0, 1])["s"].tolist() == list("cab")
    with pytest.raises(ValueError, match="every row number once"):
        data.reorder([0, 0, 1])
    padded, added = data.pad_to(7)
    assert (padded["s"].tolist(), added) == (list("abcabca"), 4)
    assert same(padded.unpad(added), data)
    with pytest.raises(ValueError, match=r"unpad\(4\) of 3"):
        data.unpad(4)


def test_group_by_keeps_order() -> None:
    data = DataProto({"g": torch.tensor([7, 3, 7, 3])}, {"s": list("abcd"), "o": [[1]] * 4})
    assert {k: v["s"].tolist() for k, v in data.group_by("g").items()} == {
        7: ["a", "c"],
        3: ["b", "d"],
    }
    assert list(data.group_by("g")) == [7, 3]
    assert [len(v) for v in data.group_by("s").values()] == [1] * 4
    with pytest.raises(TypeError, match=r"group_by\('o'\): row 0 is a list"):
        data.group_by("o")


def test_iter_batches_covers_every_row_once_an_epoch() -> None:
    data = letters(7)
    epochs = [b["i"].tolist() for b in data.iter_batches(3, epochs=2, seed=0)]
    assert [len(rows) for rows in epochs] == [3, 3, 1] * 2
    first, second = list(chain(*epochs[:3])), list(chain(*epochs[3:]))
    assert sorted(first) == sorted(second) == list(range(7)) and first != second
    assert epochs == [b["i"].tolist() for b in data.iter_batches(3, epochs=2, seed=0)]
    assert epochs != [b["i"].tolist() for b in data.iter_batches(3, epochs=2, seed=1)]
    assert [b["s"].tolist() for b in data.iter_batches(3)] == [list("abc"), list("def"), ["g"]]
    with pytest.raises(ValueError, match="size is 0"):
        data.iter_batches(0)


def test_a_plan_does_not_survive_a_change_of_rows() -> None:
    plan: Any = object()
    data = DataProto({"i": torch.arange(4)}, plan=plan)
    for kept in (data.clone(), data.select("i"), data.to("cpu"), data.update({"x": torch.ones(4)})):
        assert kept.plan is plan
    for cut in (
        data[:2],
        data[[0, 1]],
        data.reorder([3, 2, 1, 0]),
        data.chunk(1)[0],
        data.repeat(1),
    ):
        assert cut.plan is None


def test_to_reaches_tensors_inside_objects() -> None:
    column = [{"a": [torch.ones(1)]}, (torch.ones(1), "x")]
    moved = DataProto({"t": torch.ones(2)}, {"o": column}).to("meta")
    leaves = [moved["t"], moved["o"][0]["a"][0], moved["o"][1][0]]
    assert [leaf.device.type for leaf in leaves] == ["meta"] * 3
    assert column[0]["a"][0].device.type == "cpu"  # type: ignore[index]


def test_a_pickled_slice_leaves_the_rest_behind() -> None:
    data = DataProto({"t": torch.zeros(1000, 100)}, {"o": list(torch.zeros(1000, 100))})
    assert len(pickle.dumps(data[:1])) < 10_000
    assert data[:1]["t"].data_ptr() == data["t"].data_ptr()


def test_concat_refuses_parts_that_do_not_fit() -> None:
    x = DataProto({"x": torch.ones(1, 2)})
    for other, message in (
        (DataProto({"y": torch.ones(1)}), r"part 1 lacks 'x', it has \['y'\]"),
        (DataProto({"x": torch.ones(1, 2).double()}), "'x' has dtypes"),
        (DataProto({"x": torch.ones(1, 3)}), "'x' has shapes"),
        (DataProto(None, {"x": ["a"]}), "'x' has dtypes"),
    ):
        with pytest.raises(ValueError, match=message):
            DataProto.concat([x, other])
    with pytest.raises(ValueError, match="no parts"):
        DataProto.concat([])


def test_token_columns_are_padded_where_rows_have_lengths() -> None:
    def of(width: int, lengths: bool = True, **more: torch.Tensor) -> DataProto:
        tokens = torch.ones(2, width, dtype=torch.int64)
        columns = {"input_ids": tokens, "labels": tokens, "response_mask": tokens.bool()} | more
        return DataProto(columns | ({"lengths": torch.full((2,), width)} if lengths else {}))

    joined = DataProto.concat([of(1), of(3), DataProto()])
    assert joined["input_ids"].tolist() == [[1, 0, 0]] * 2 + [[1, 1, 1]] * 2
    assert joined["labels"].tolist() == [[1, -100, -100]] * 2 + [[1, 1, 1]] * 2
    assert joined["response_mask"].dtype == torch.bool
    assert joined["response_mask"].sum(1).tolist() == [1, 1, 3, 3]
    assert (pad_value("labels"), pad_value("values")) == (-100, 0)
    with pytest.raises(ValueError, match="'input_ids' has shapes"):
        DataProto.concat([of(1, lengths=False), of(3, lengths=False)])
    with pytest.raises(ValueError, match="'hidden' has shapes"):
        DataProto.concat([of(1, hidden=torch.ones(2, 1)), of(1, hidden=torch.ones(2, 2))])


def test_rows_outlive_the_last_tensor_column() -> None:
    data = DataProto(TensorDict({}, batch_size=[3]))
    assert [len(part) for part in data.chunk(2)] == [2, 1]
    joined = DataProto.concat(data.chunk(2))
    assert joined.batch is not None and len(joined) == 3
    joined.batch["x"] = torch.arange(3)
    assert joined[-1]["x"].tolist() == [2]
