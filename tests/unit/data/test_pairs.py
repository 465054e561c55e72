"""Pairs: their columns, both sides' masks, the forms they come in, and what is wrong with some."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from roll_td.config.data import DataConfig
from roll_td.config.schema import ConfigError
from roll_td.data.loader import Data, load_data

Write = Callable[..., str]
KEYS = {"chosen_key": "good", "rejected_key": "bad"}
TEXT = KEYS | {"prompt_key": "q"}


def load(path: Any, tokenizer: Any, batch_size: int = 2, **settings: Any) -> Data:
    config = DataConfig(path, **({"shuffle": False} | settings))
    return load_data(config, tokenizer, "pairs", batch_size, seed=5)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_i01_both_prompts_are_masked_whatever_the_lengths(make_tokenizer: Any, write: Write):
    path = write(
        "a.jsonl", [{"q": "ab", "good": "c", "bad": "defg"}, {"q": "a", "good": "hi", "bad": "j"}]
    )
    batch = load(path, make_tokenizer(""), template="none", **TEXT).train.batch(0)
    assert set(batch.keys()) == {"input_ids", "lengths", "labels", "is_chosen", "group_id"}
    assert batch["lengths"].tolist() == [4, 7, 4, 3]
    assert batch["is_chosen"].tolist() == [True, False, True, False]
    assert batch["group_id"].tolist() == [0, 0, 1, 1]
    learnt = [row[row != -100].tolist() for row in batch["labels"]]
    assert learnt == [[8, 2], [9, 10, 11, 12, 2], [13, 14, 2], [15, 2]]
    prompts = [
        ids[: len(ids) - len(row)].tolist()
        for ids, row in zip(
            [ids[:n] for ids, n in zip(batch["input_ids"], batch["lengths"], strict=True)],
            learnt,
            strict=True,
        )
    ]
    assert prompts == [[6, 7], [6, 7], [6], [6]]


@pytest.mark.parametrize("template", ["marked", "plain"])
def test_the_same_pair_in_each_form(template: str, make_tokenizer: Any, write: Write):
    """Multi-turn: of all turns of the assistant the last alone is learnt from. H01: one start."""
    prompt = [user("a"), assistant("b"), user("c")]
    forms = {
        "beside": ({"m": prompt, "good": "dd", "bad": "e"}, {"messages_key": "m"}),
        "json": ({"m": json.dumps(prompt), "good": "dd", "bad": "e"}, {"messages_key": "m"}),
        "turns": (
            {"m": prompt, "good": [assistant("dd")], "bad": [assistant("e")]},
            {"messages_key": "m"},
        ),
        "whole": ({"good": [*prompt, assistant("dd")], "bad": [*prompt, assistant("e")]}, {}),
    }
    tokenizer = make_tokenizer(template, True)
    found = []
    for name, (row, keys) in forms.items():
        batch = load(write(f"{name}.jsonl", [row]), tokenizer, 1, **KEYS, **keys).train.batch(0)
        found.append((batch["input_ids"].tolist(), batch["labels"].tolist()))
    assert all(one == found[0] for one in found)
    (chosen, rejected), labels = found[0]
    assert [row.count(1) for row in (chosen, rejected)] == [1, 1]
    assert [[t for t in row if t != -100] for row in labels] == [[9, 9, 2], [10, 2]]


def test_an_answer_that_is_json_text_stays_text(make_tokenizer: Any, write: Write):
    path = write("a.jsonl", [{"q": "a", "good": "[]", "bad": "b"}])
    batch = load(path, make_tokenizer("plain"), 1, **TEXT).train.batch(0)
    assert batch["lengths"].tolist()[0] == batch["lengths"].tolist()[1] + 1


def test_pairs_stay_together_when_drawn_held_back_and_selected(make_tokenizer: Any, write: Write):
    letters = "abcdefghij"
    rows = [{"q": letter, "good": "1", "bad": "22", "n": n} for n, letter in enumerate(letters)]
    data = load(
        write("a.jsonl", rows), make_tokenizer(""), 4, template="none", shuffle=True,
        validation_split=0.3, keep={"n": "n"}, **TEXT,
    )  # fmt: skip
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.train.rows)) == (7, 3, 10)
    batches = [data.train.batch(step) for step in range(3)] + list(data.validation.batches(2))
    assert [len(batch) for batch in batches] == [8, 8, 8, 4, 2]
    for batch in batches:
        assert batch["n"][::2].tolist() == batch["n"][1::2].tolist()
        first = batch["input_ids"][:, 0] - 6
        assert first.tolist() == batch["n"].tolist()
        assert batch["lengths"].tolist() == [3, 4] * (len(batch) // 2)
    held = {n for batch in batches[3:] for n in batch["n"]}
    drawn = {n for batch in batches[:3] for n in batch["n"]}
    assert len(held) == 3 and drawn == set(range(10)) - held
    assert data.train.numbers(4, 4).tolist() == batches[1]["n"][::2].tolist()
    assert batches[1]["group_id"].tolist() == [4, 4, 5, 5, 6, 6, 7, 7]


@pytest.mark.parametrize(
    ("row", "keys", "kind"),
    [
        ({"q": "a", "good": "b", "bad": "b"}, TEXT, "equal answers"),
        ({"q": "a", "good": "b", "bad": " "}, TEXT, "empty"),
        ({"q": "a", "good": "b", "bad": 1}, TEXT, "wrong type"),
        ({"q": "a", "good": "b"}, TEXT, "no column"),
        ({"q": "a", "good": "b", "bad": "c" * 60}, TEXT, "too long"),
        (
            {"good": [user("a"), assistant("b")], "bad": [user("c"), assistant("d")]},
            KEYS,
            "two prompts",
        ),
        ({"good": [user("a")], "bad": [user("a"), assistant("d")]}, KEYS, "no answer"),
        ({"good": "text", "bad": [user("a"), assistant("d")]}, KEYS, "wrong type"),
        ({"good": 5, "bad": [user("a"), assistant("d")]}, KEYS, "wrong type"),
    ],
)
def test_a_bad_side_takes_the_pair_out(row, keys, kind, make_tokenizer: Any, write: Write):
    good = {"q": "a", "good": "b", "bad": "c"}
    if keys is KEYS:
        good = {"good": [user("a"), assistant("b")], "bad": [user("a"), assistant("c")]}
    settings = {"max_length": 50, "on_bad_row": "skip", **keys}
    data = load(write("a.jsonl", [good, row]), make_tokenizer(), 1, **settings)
    assert data.reports["train"].dropped == {kind: 1} and len(data.train) == 1
    if kind != "too long":
        with pytest.raises(ValueError, match=r"a.jsonl:2"):
            load(
                write("a.jsonl", [good, row]),
                make_tokenizer(),
                **(settings | {"on_bad_row": "fail"}),
            )


def test_settings_that_do_not_fit():
    with pytest.raises(ConfigError, match="rejected_key: is missing: a pair has two answers"):
        DataConfig("a.jsonl", chosen_key="good")
    for settings, message in (
        ({"prompt_key": "q", "response_key": "a"}, "data.chosen_key: is missing"),
        (TEXT | {"response_key": "a"}, "data.response_key='a': is an answer that is neither"),
        (TEXT | {"truncation": "left"}, "data.truncation=left: would take from the two prompts"),
    ):
        with pytest.raises(ConfigError, match=message):
            load("a.jsonl", None, **settings)
