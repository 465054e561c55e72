"""From files to batches: columns, reports, mixtures, splits, resume."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from roll_td.config.data import DataConfig, MixedConfig
from roll_td.config.schema import ConfigError
from roll_td.data.loader import Data, load_data
from roll_td.data.rows import CHUNK_ROWS
from roll_td.protocol import DataProto

Write = Callable[..., str]
PAIRS = {"prompt_key": "q", "response_key": "a", "template": "none"}


def pair(number: int, width: int = 1) -> dict[str, Any]:
    return {"q": f"{number:0{width}}=", "a": str(number), "tag": {"number": number}}


def load(
    path: Any, tokenizer: Any, purpose: Any = "answers", batch_size: int = 2, **settings: Any
) -> Data:
    config = DataConfig(path, **(PAIRS | settings))
    return load_data(config, tokenizer, purpose, batch_size, seed=5)


def numbers(batch: DataProto) -> list[int]:
    return [tag["number"] for tag in batch["tag"]]


def test_a_batch_is_padded_to_its_longest_row(make_tokenizer: Any, write: Write) -> None:
    path = write(
        "a.jsonl", [{"q": "a", "a": "bc"}, {"q": "abcd", "a": "e"}, {"q": "a" * 9, "a": "b"}]
    )
    batch = load(path, make_tokenizer(""), shuffle=False).train.batch(0)
    assert set(batch.keys()) == {"input_ids", "lengths", "labels"}
    assert batch["input_ids"].tolist() == [[6, 7, 8, 2, 0, 0], [6, 7, 8, 9, 10, 2]]
    assert batch["labels"].tolist() == [[-100, 7, 8, 2, -100, -100], [-100] * 4 + [10, 2]]
    assert batch["lengths"].tolist() == [4, 6]
    assert {column.dtype for column in batch.batch.values()} == {torch.int64}


def test_prompts_have_a_group_and_the_columns_kept(make_tokenizer: Any, write: Write) -> None:
    path = write("a.jsonl", [{"q": "ab", "a": [1], "x": 0}, {"q": "c", "a": None, "x": 0}])
    keep = {"ground_truth": "a"}
    settings = {"response_key": None, "template": "chat", "shuffle": False, "keep": keep}
    batch = load(path, make_tokenizer(), "prompts", **settings).train.draw(2, 3)
    assert set(batch.keys()) == {"input_ids", "lengths", "group_id", "ground_truth"}
    assert batch["input_ids"].tolist() == [[1, 4, 6, 7, 5], [1, 4, 8, 5, 0], [1, 4, 6, 7, 5]]
    assert batch["lengths"].tolist() == [5, 4, 5]
    assert batch["group_id"].tolist() == [2, 3, 4]
    assert batch["ground_truth"].tolist() == [[1], None, [1]]


def test_rows_as_roll_writes_them(make_tokenizer: Any, write: Write) -> None:
    """Two of DeepMath-103K (MIT), cut short: the chat is JSON text, all values are text."""
    rows = [
        {
            "id": number,
            "messages": f'[{{"role": "user", "content": "{question}"}}]',
            "ground_truth": answer,
            "tag": "deepmath_103k",
        }
        for number, question, answer in (("1", "find 31 22 modulo 11", "1"), ("2", "solve x", "x"))
    ]
    keep = {"ground_truth": "ground_truth", "domain": "tag"}
    config = DataConfig(write("a.jsonl", rows), keep=keep, shuffle=False)
    batch = load_data(config, make_tokenizer(), "prompts", 2, seed=0).train.batch(0)
    assert batch["ground_truth"].tolist() == ["1", "x"]
    assert batch["domain"].tolist() == ["deepmath_103k"] * 2
    assert batch["lengths"].tolist() == [3 + len("find 31 22 modulo 11"), 3 + len("solve x")]


def test_rows_are_read_once_in_order_over_files_and_chunks(
    make_tokenizer: Any, write: Write
) -> None:
    count = CHUNK_ROWS + 5
    paths = [
        write("a.jsonl", map(pair, range(count))),
        write("b.jsonl", map(pair, range(count, count + 5))),
    ]
    data = load(paths, make_tokenizer(""), shuffle=False, keep={"tag": "tag"})
    batch = data.train.draw(0, count + 5)
    assert len(data.train) == data.reports["train"].kept == count + 5
    assert numbers(batch) == list(range(count + 5))
    texts = [
        make_tokenizer("").decode(ids[: length - 1])
        for ids, length in zip(batch["input_ids"], batch["lengths"], strict=True)
    ]
    assert texts == [f"{number}={number}" for number in range(count + 5)]


def test_d12_a_new_loader_goes_on_where_the_old_one_stopped(
    make_tokenizer: Any, write: Write
) -> None:
    path = write("a.jsonl", map(pair, range(10)))
    first, resumed = (load(path, make_tokenizer(""), keep={"tag": "tag"}) for _ in range(2))
    used = [n for step in range(3) for n in numbers(first.train.batch(step))]
    rest = [n for step in range(3, 5) for n in numbers(resumed.train.batch(step))]
    assert sorted(used + rest) == list(range(10))
    assert used + rest != list(range(10))
    for key in ("input_ids", "labels", "lengths"):
        assert torch.equal(resumed.train.batch(3)[key], first.train.batch(3)[key])


def test_batches_are_full_and_epochs_follow_on(make_tokenizer: Any, write: Write) -> None:
    path = write("a.jsonl", map(pair, range(5)))
    train = load(path, make_tokenizer(""), keep={"tag": "tag"}, batch_size=3).train
    stream = [n for step in range(5) for n in numbers(train.batch(step))]
    assert [sorted(stream[i : i + 5]) for i in (0, 5, 10)] == [list(range(5))] * 3
    assert stream[:5] != stream[5:10]
    assert [train.epoch_of(step) for step in (0, 1, 5)] == [0, 0.6, 3]
    assert [train.steps(epochs) for epochs in (0.6, 1, 3)] == [1, 2, 5]


def test_data_sets_are_mixed_by_weight(make_tokenizer: Any, write: Write) -> None:
    few = write("few.jsonl", map(pair, range(3)))
    many = write("many.jsonl", map(pair, range(100, 200)))
    mixed = [MixedConfig(few, 3.0), MixedConfig(many, 1.0)]
    train = load(mixed, make_tokenizer(""), keep={"tag": "tag"}, batch_size=8).train
    stream = [numbers(train.batch(step)) for step in range(50)]
    assert [sum(n < 100 for n in batch) for batch in stream] == [6] * 50
    own = [n for batch in stream for n in batch if n >= 100]
    assert sorted(own) == list(range(100, 200))
    assert len(train) == 103


def test_bad_rows_are_counted_and_the_first_named(
    make_tokenizer: Any, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [pair(1), "{", {"q": "x"}, pair(2), *[{"q": 1, "a": "b"}] * 6, pair(3, width=9)]
    path = write("a.jsonl", rows)
    with caplog.at_level(logging.INFO):
        data = load(path, make_tokenizer(""), on_bad_row="skip", max_length=8)
    report = data.reports["train"]
    assert (report.kept, dict(report.dropped)) == (
        2,
        {"not JSON": 1, "no column": 1, "wrong type": 6, "too long": 1},
    )
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    lines = caplog.records[0].getMessage().splitlines()
    assert lines[0] == (
        "data.train: kept 2 of 11 rows; dropped: 1 not JSON, 1 no column, 6 wrong type, 1 too long"
    )
    assert lines[1].startswith(f"  {path}:2 is not JSON: Expecting")
    assert lines[2] == f"  {path}:3 has no column 'a'; it has ['q']"
    assert lines[5:] == [f"  {path}:7 has int in 'q': want text", "  and 4 more"]


def test_a_bad_row_refuses_the_run_by_name(make_tokenizer: Any, write: Write) -> None:
    path = write("a.jsonl", [pair(1), {"q": "x", "a": 3}])
    with pytest.raises(ValueError, match=r"a.jsonl:2 has int in 'a'.*; mend the row, or set on_b"):
        load(path, make_tokenizer(""))


def test_h03_rows_that_are_too_long_are_dropped_and_refuse_nothing(
    make_tokenizer: Any, write: Write
) -> None:
    path = write("a.jsonl", [pair(1), pair(2, width=7), pair(3)])
    for truncation, kind in (("drop", "too long"), ("right", "nothing left")):
        data = load(path, make_tokenizer(""), truncation=truncation, max_length=8)
        assert dict(data.reports["train"].dropped) == {kind: 1}
        labels = data.train.batch(0)["labels"]
        assert (labels != -100).sum(dim=1).tolist() == [2, 2]


def test_data_without_a_row_left_is_refused(make_tokenizer: Any, write: Write) -> None:
    long = write("a.jsonl", [pair(2, width=9)] * 2)
    with pytest.raises(
        ValueError, match=r"(?s)a.jsonl: no row can be used; kept 0 of 2.*a.jsonl:1"
    ):
        load(long, make_tokenizer(""), max_length=8)
    with pytest.raises(ValueError, match=r"blank.jsonl': has no row"):
        load(write("blank.jsonl", [""]), make_tokenizer(""))


def test_settings_and_files_are_checked_first(make_tokenizer: Any, write: Write) -> None:
    with pytest.raises(ConfigError, match=r"data.train='gone.jsonl': there is no such file"):
        load("gone.jsonl", make_tokenizer(""))
    path = write("a.jsonl", [pair(1)])
    with pytest.raises(ConfigError, match=r"data.response_key: is missing"):
        load(path, make_tokenizer(""), response_key=None)
    with pytest.raises(ConfigError, match=r"data.truncation=right: would cut off the end"):
        load(path, make_tokenizer(""), "prompts", truncation="right")


def test_validation_files_come_in_their_order(make_tokenizer: Any, write: Write) -> None:
    files = [write(f"{i}.jsonl", map(pair, range(3 * i, 3 * i + 3))) for i in range(3)]
    data = load(files[0], make_tokenizer(""), validation=files[1:], keep={"tag": "tag"})
    assert data.validation is not None
    batches = list(data.validation.batches(4))
    assert [numbers(batch) for batch in batches] == [[3, 4, 5, 6], [7, 8]]
    assert list(data.reports) == ["train", "validation"]
    assert len(data.train) == 3


def test_a_split_parts_the_rows_of_each_data_set(make_tokenizer: Any, write: Write) -> None:
    mixed = [
        MixedConfig(write("a.jsonl", map(pair, range(20)))),
        MixedConfig(write("b.jsonl", map(pair, range(100, 110)))),
    ]
    settings = {"validation_split": 0.2, "keep": {"tag": "tag"}}
    data, again = (load(mixed, make_tokenizer(""), **settings) for _ in range(2))
    assert data.validation is not None and again.validation is not None
    (held,) = data.validation.batches(100)
    assert [n < 100 for n in numbers(held)] == [True] * 4 + [False] * 2
    trained = {n for step in range(40) for n in numbers(data.train.batch(step))}
    assert trained | set(numbers(held)) == {*range(20), *range(100, 110)}
    assert not trained & set(numbers(held))
    assert len(data.train) == 24
    assert numbers(next(again.validation.batches(100))) == numbers(held)
    assert np.all(np.diff(numbers(held)) > 0)


def test_a_split_that_holds_nothing_back_is_refused(make_tokenizer: Any, write: Write) -> None:
    path = write("a.jsonl", map(pair, range(3)))
    with pytest.raises(ValueError, match=r"validation_split=0.1 of 3 rows is 0: it must leave"):
        load(path, make_tokenizer(""), validation_split=0.1)
