"""Tokens and answers of a row: templates, masks, truncation, rows that can't be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from roll_td.config.data import DataConfig
from roll_td.data.encode import Purpose, Tokens, encode
from roll_td.data.read import BadRow

MakeTokenizer = Callable[..., Any]


def chat(*turns: str) -> dict[str, Any]:
    """A row; turns of user and assistant alternate."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}


def one(
    row: dict[str, Any], tokenizer: Any, purpose: Purpose = "answers", **settings: Any
) -> tuple[str, str]:
    """(text of the row, the same with _ for each token that is not learnt from); ("bad: KIND",
    why) for a bad row. Each character is a token; <u> is <user> and so on."""
    (result,) = encode([row], DataConfig("a.jsonl", **settings), tokenizer, purpose)
    if isinstance(result, BadRow):
        return f"bad: {result.kind}", str(result)
    tokens = [short(t) for t in tokenizer.convert_ids_to_tokens(result.ids.tolist())]
    shown = [t if learn else "_" for t, learn in zip(tokens, result.learn.tolist(), strict=True)]
    return "".join(tokens), "".join(shown)


def short(token: str) -> str:
    """One character for a special token."""
    return {"<bos>": "^", "<eos>": "$", "<user>": "U", "<assistant>": "A"}.get(token, token)


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", ["marked", "plain"])
def test_h01_one_start_token_as_template_tokenised_in_one_go(
    make_tokenizer: MakeTokenizer, template: str, adds_bos: bool
) -> None:
    tokenizer = make_tokenizer(template, adds_bos)
    assert (tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id) == adds_bos
    row = chat("1+1", "2")
    for purpose, rows in (("answers", row), ("prompts", {"messages": row["messages"][:1]})):
        (result,) = encode([rows], DataConfig("a.jsonl"), tokenizer, purpose)  # type: ignore[arg-type]
        assert isinstance(result, Tokens)
        expected = tokenizer.apply_chat_template(
            rows["messages"], add_generation_prompt=purpose == "prompts", return_dict=False
        )
        assert result.ids.tolist() == expected
        assert result.ids.tolist().count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("prompt", ["1+1=", "<bos>1+1="])
def test_h01_without_a_template_too(make_tokenizer: MakeTokenizer, prompt: str) -> None:
    row, keys = {"p": prompt, "r": "2"}, {"prompt_key": "p", "response_key": "r"}
    tokenizer = make_tokenizer("", adds_bos=True)
    assert one(row, tokenizer, template="none", **keys) == ("^1+1=2$", "_____2$")
    assert one(row, tokenizer, "prompts", template="none", **keys)[0] == "^1+1="


def test_no_start_token_where_the_tokenizer_adds_none(make_tokenizer: MakeTokenizer) -> None:
    settings = {"template": "none", "prompt_key": "p", "response_key": "r"}
    assert one({"p": "ab", "r": "c"}, make_tokenizer(""), **settings) == ("abc$", "__c$")


def test_answers_as_the_template_marks_them(make_tokenizer: MakeTokenizer) -> None:
    row, tokenizer = chat("a", "bc", "d", "e"), make_tokenizer("marked")
    assert one(row, tokenizer) == ("^UaAbc$UdAe$", "____bc$___e$")
    assert one(row, tokenizer, train_on="last") == ("^UaAbc$UdAe$", "__________e$")


def test_answers_by_prefixes_end_with_their_end_token(make_tokenizer: MakeTokenizer) -> None:
    row, tokenizer = chat("a", "bc", "d", "e"), make_tokenizer("plain")
    assert one(row, tokenizer) == ("^Ua$\nAbc$\nUd$\nAe$\n", "______bc$______e$_")
    assert one(row, tokenizer, train_on="last")[1] == "_______________e$_"


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_a_last_turn_of_the_user_is_not_learnt(
    make_tokenizer: MakeTokenizer, train_on: str
) -> None:
    row = chat("a", "b", "c")
    assert one(row, make_tokenizer("marked"), train_on=train_on) == ("^UaAb$Uc", "____b$__")
    found = one(row, make_tokenizer("plain"), train_on=train_on)
    assert found == ("^Ua$\nAb$\nUc$\n", "______b$_____")


def test_adjacent_answers_and_a_system_turn(make_tokenizer: MakeTokenizer) -> None:
    turns = [("system", ""), ("user", "q"), ("assistant", "a"), ("assistant", "b")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    assert one(row, make_tokenizer("marked"))[1].replace("_", "") == "a$b$"
    assert one(row, make_tokenizer("plain"))[1].replace("_", "") == "a$b$"
    assert one(row, make_tokenizer("plain"), train_on="last")[1].replace("_", "") == "b$"


def test_a_template_that_rewrites_the_past_is_found_out(make_tokenizer: MakeTokenizer) -> None:
    row, tokenizer = chat("a", "b", "c", "d"), make_tokenizer("forgetful")
    kind, why = one(row, tokenizer)
    assert kind == "bad: template"
    assert "use train_on: last, or a model.chat_template with {% generation %}" in why
    assert one(row, tokenizer, train_on="last") == ("^Ua$Ab$Uc$A##d$", "___________##d$")


def test_prompt_and_response_through_the_chat_template(make_tokenizer: MakeTokenizer) -> None:
    row, keys = {"q": "1+1", "a": "2"}, {"prompt_key": "q", "response_key": "a"}
    assert one(row, make_tokenizer(), **keys) == ("^U1+1A2$", "______2$")
    assert one(row, make_tokenizer(), "prompts", **keys)[0] == "^U1+1A"


def test_a_chat_may_be_json_text(make_tokenizer: MakeTokenizer) -> None:
    row = {"m": json.dumps(chat("1+1")["messages"])}
    assert one(row, make_tokenizer(), "prompts", messages_key="m")[0] == "^U1+1A"


@pytest.mark.parametrize("truncation", ["drop", "left", "right"])
@pytest.mark.parametrize("max_length", [7, 8])
def test_what_fits_is_not_cut(
    make_tokenizer: MakeTokenizer, truncation: str, max_length: int
) -> None:
    settings = {"max_length": max_length, "truncation": truncation}
    assert one(chat("ab", "c"), make_tokenizer(), **settings) == ("^UabAc$", "_____c$")


def test_longer_rows_are_dropped_and_told_apart(make_tokenizer: MakeTokenizer) -> None:
    row, tokenizer = chat("ab", "c"), make_tokenizer()
    expected = ("bad: too long", "has 7 tokens, 1 more than max_length")
    assert one(row, tokenizer, max_length=6) == expected


@pytest.mark.parametrize("max_length", [4, 5])
def test_h03_a_prompt_as_long_as_the_limit_leaves_nothing(
    make_tokenizer: MakeTokenizer, max_length: int
) -> None:
    kind, why = one(chat("ab", "c"), make_tokenizer(), max_length=max_length, truncation="right")
    assert (kind, why) == (
        "bad: nothing left",
        f"keeps no token of an answer when cut to {max_length}",
    )


def test_h04_a_cut_inside_an_answer_adds_no_end(make_tokenizer: MakeTokenizer) -> None:
    settings = {"max_length": 6, "truncation": "right"}
    assert one(chat("a", "bcd"), make_tokenizer(), **settings) == ("^UaAbc", "____bc")


def test_h04_a_cut_inside_a_users_turn_learns_no_end(make_tokenizer: MakeTokenizer) -> None:
    settings = {"max_length": 9, "truncation": "right"}
    found = one(chat("a", "b", "cdef", "g"), make_tokenizer(), **settings)
    assert found == ("^UaAb$Ucd", "____b$___")


def test_h08_after_a_left_cut_the_first_token_is_not_learnt(make_tokenizer: MakeTokenizer) -> None:
    settings = {"max_length": 3, "truncation": "left"}
    assert one(chat("a", "bcd"), make_tokenizer(), **settings) == ("cd$", "_d$")
    settings["max_length"] = 5
    assert one(chat("a", "bcd"), make_tokenizer(), **settings) == ("Abcd$", "_bcd$")


def test_a_left_cut_keeps_the_end_of_a_prompt(make_tokenizer: MakeTokenizer) -> None:
    settings = {"max_length": 3, "truncation": "left"}
    assert one(chat("abc"), make_tokenizer(), "prompts", **settings)[0] == "bcA"


@pytest.mark.parametrize(
    ("value", "kind", "why"),
    [
        (None, "wrong type", "has NoneType in 'messages': want a list"),
        ("[{", "wrong type", "has no chat as JSON in 'messages': Expecting"),
        ([], "empty", "has no turn in 'messages'"),
        (["hi"], "wrong type", "turn 1 of 'messages' is 'hi': want {role: …, content: …}"),
        ([{"from": "human", "value": "a"}], "wrong type", "turn 1 of 'messages' is {'from'"),
        ([{"role": "user", "content": None}], "wrong type", "turn 1 of 'messages' has NoneType"),
        ([{"role": "user", "content": " \n"}], "empty", "turn 1 of 'messages' (user) has no text"),
        (chat("a", "")["messages"], "empty", "turn 2 of 'messages' (assistant) has no text"),
        (chat("a")["messages"], "no answer", "has no turn of role assistant in 'messages', only"),
        (chat("a", "b")["messages"][1:], "template", "is refused by the chat template: roles must"),
    ],
)
def test_a_bad_chat_says_why_and_leaves_its_neighbours(
    make_tokenizer: MakeTokenizer, value: Any, kind: str, why: str
) -> None:
    good, tokenizer = chat("a", "b"), make_tokenizer("strict")
    before = BadRow("not JSON", "is not JSON")
    rows = [before, good, {"messages": value}, good]
    first, second, bad, last = encode(rows, DataConfig("a.jsonl"), tokenizer, "answers")
    assert first is before
    assert isinstance(bad, BadRow) and isinstance(second, Tokens) and isinstance(last, Tokens)
    assert (bad.kind, str(bad)[: len(why)]) == (kind, why)
    assert second.ids.tolist() == last.ids.tolist() == [1, 4, 6, 5, 7, 2]


@pytest.mark.parametrize(
    ("row", "kind", "why"),
    [
        ({"p": 3, "r": "a"}, "wrong type", "has int in 'p': want text"),
        ({"p": "", "r": "a"}, "empty", "has no text in 'p'"),
        ({"p": "a", "r": " "}, "empty", "has no text in 'r'"),
    ],
)
@pytest.mark.parametrize("template", ["chat", "none"])
def test_a_bad_prompt_or_response(
    make_tokenizer: MakeTokenizer, row: dict[str, Any], kind: str, why: str, template: str
) -> None:
    settings = {"prompt_key": "p", "response_key": "r", "template": template}
    assert one(row, make_tokenizer(), **settings) == (f"bad: {kind}", why)


def test_a_prompt_that_ends_with_an_answer(make_tokenizer: MakeTokenizer) -> None:
    assert one(chat("a", "b"), make_tokenizer(), "prompts")[0] == "bad: no prompt"


def test_a_tokenizer_without_what_is_needed(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ValueError, match="the tokenizer has no chat template; give one as model"):
        one(chat("a", "b"), make_tokenizer(""))
    tokenizer = make_tokenizer("")
    tokenizer.eos_token = None
    settings = {"prompt_key": "p", "response_key": "r", "template": "none"}
    with pytest.raises(ValueError, match="tokenizer's end token, and it has none; set eos_token"):
        one({"p": "a", "r": "b"}, tokenizer, **settings)
