"""From rows of a file to tokens, and which of them are answers to learn from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from roll_td.config.data import DataConfig
from roll_td.data.read import BadRow, Row

Purpose = Literal["answers", "pairs", "prompts"]
"""answers: learn from the answers in the data. pairs: from two answers to each prompt. prompts: up
to where an answer is to begin."""
Chat = list[dict[str, Any]]

CUT_KINDS = frozenset({"too long", "nothing left"})
"""Rows that max_length takes out: nothing is wrong with them."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Tokens(NamedTuple):
    """A row of T tokens."""

    ids: NDArray[np.int32]
    """(T,)."""
    learn: NDArray[np.bool_]
    """(T,); True where the token is part of an answer to learn from. The first never is."""


def encode(
    rows: Sequence[Row | BadRow], config: DataConfig, tokenizer: Any, purpose: Purpose
) -> list[Tokens | BadRow]:
    """The tokens of each row, or what is wrong with it; a row that is bad already stays so.

    A chat is rendered and tokenised in one go: start and end tokens are the template's alone. What
    of it is an answer, the template tells with {% generation %}; where it does not, an answer is
    what an assistant's turn adds to the turns before it, without what follows its end token, and
    the tokens of the turns before must be the first of the whole. `tokenizer` is one of
    transformers. ValueError for one that lacks a chat template or an end token where needed.
    """
    _check_tokenizer(config, tokenizer, purpose)
    if config.template == "none":
        texts = _each(lambda row: _texts(row, config, purpose), rows)
        start, end = _start(tokenizer), [tokenizer.eos_token_id] * (purpose == "answers")
        ids = _together(lambda good: _tokenise(good, tokenizer), texts)
        tokens = _each(lambda row: _join(row, start, end), ids)
    elif purpose == "prompts":
        chats = _each(lambda row: _chat(row, config, purpose), rows)
        texts = _each(lambda chat: [_render(chat, tokenizer, True)], chats)
        ids = _together(lambda good: _tokenise(good, tokenizer), texts)
        tokens = _each(lambda row: _mark(row[0], []), ids)
    else:
        chats = _each(lambda row: _chat(row, config, purpose), rows)
        has_marks = _MARKS.search(tokenizer.get_chat_template())
        answers = _marked_answers if has_marks else _added_answers
        tokens = answers(chats, config, tokenizer)
    return _each(lambda row: _cut(row, config, purpose), tokens)


def _each(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """`function` of each item, or the BadRow that it raises; items that are bad stay so."""
    results: list[Any] = []
    for item in items:
        try:
            results.append(item if isinstance(item, BadRow) else function(item))
        except BadRow as bad:
            results.append(bad)
    return results


def _together(function: Callable[[list[Any]], Iterable[Any]], items: Sequence[Any]) -> list[Any]:
    """`function` of the list of all items that are not bad, its results put in their places."""
    good = [item for item in items if not isinstance(item, BadRow)]
    results = iter(function(good) if good else ())
    return [item if isinstance(item, BadRow) else next(results) for item in items]


def _check_tokenizer(config: DataConfig, tokenizer: Any, purpose: Purpose) -> None:
    if config.template == "chat" and not tokenizer.chat_template:
        raise ValueError(
            "template: chat, but the tokenizer has no chat template; give one as "
            "model.chat_template, or use template: none with prompt_key"
        )
    if config.template == "none" and purpose == "answers" and tokenizer.eos_token_id is None:
        raise ValueError(
            "template: none ends an answer with the tokenizer's end token, and it has none; "
            "set eos_token in its tokenizer_config.json"
        )


def _text(row: Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise BadRow("wrong type", f"has {type(value).__name__} in {column!r}: want text")
    if not value.strip():
        raise BadRow("empty", f"has no text in {column!r}")
    return value


def _texts(row: Row, config: DataConfig, purpose: Purpose) -> list[str]:
    """Prompt, and response if it is to be learnt from."""
    columns = [config.prompt_key, config.response_key if purpose == "answers" else None]
    return [_text(row, column) for column in columns if column is not None]


def _chat(row: Row, config: DataConfig, purpose: Purpose) -> Chat:
    """The turns of a row, checked."""
    if config.messages_key is None:
        pairs = zip(("user", "assistant"), _texts(row, config, purpose), strict=False)
        return [{"role": role, "content": content} for role, content in pairs]
    column, chat = config.messages_key, row[config.messages_key]
    if isinstance(chat, str):
        try:
            chat = json.loads(chat)
        except ValueError as error:
            raise BadRow("wrong type", f"has no chat as JSON in {column!r}: {error}") from None
    if not isinstance(chat, list):
        raise BadRow("wrong type", f"has {type(chat).__name__} in {column!r}: want a list")
    if not chat:
        raise BadRow("empty", f"has no turn in {column!r}")
    for number, turn in enumerate(chat, 1):
        _check_turn(turn, f"turn {number} of {column!r}")
    roles = [turn["role"] for turn in chat]
    if purpose == "answers" and "assistant" not in roles:
        raise BadRow("no answer", f"has no turn of role assistant in {column!r}, only {roles}")
    if purpose == "prompts" and roles[-1] == "assistant":
        raise BadRow("no prompt", f"ends with an answer in {column!r}: leave out the last turn")
    return chat


def _check_turn(turn: Any, name: str) -> None:
    if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
        raise BadRow("wrong type", f"{name} is {turn!r:.60}: want {{role: …, content: …}}")
    for key in ("role", "content"):
        if not isinstance(turn[key], str):
            raise BadRow("wrong type", f"{name} has {type(turn[key]).__name__} as {key}: want text")
    if turn["role"] != "system" and not turn["content"].strip():
        raise BadRow("empty", f"{name} ({turn['role']}) has no text")


def _tokenise(rows: Sequence[Sequence[str]], tokenizer: Any) -> Iterator[list[list[int]]]:
    """Token ids of each text of each row; no start or end token but those in the text. One call
    for all, as the tokenizer is threaded."""
    texts = [text for row in rows for text in row]
    options = {"add_special_tokens": False, "return_attention_mask": False}
    ids = iter(tokenizer(texts, **options)["input_ids"] if texts else ())
    return ([next(ids) for _ in row] for row in rows)


def _start(tokenizer: Any) -> list[int]:
    """The start token, if the tokenizer puts one before a text."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and bos in tokenizer("")["input_ids"] else []


def _join(row: Sequence[list[int]], start: list[int], end: list[int]) -> Tokens:
    """Start, prompt and, if there is one, response and end. Prompt and response were tokenised
    apart, as they are when an answer is generated."""
    prompt = row[0] if row[0][: len(start)] == start else [*start, *row[0]]
    whole = [*prompt, *(token for response in row[1:] for token in response), *end]
    return _mark(whole, [(len(prompt), len(whole))])


def _render(chat: Chat, tokenizer: Any, add_generation_prompt: bool) -> str:
    """The text of a chat. BadRow if the template refuses it."""
    try:
        text: str = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:
        raise BadRow("template", f"is refused by the chat template: {error}") from None
    return text


def _answer_turns(chat: Chat, config: DataConfig) -> list[int]:
    turns = [number for number, turn in enumerate(chat) if turn["role"] == "assistant"]
    return turns if config.train_on == "all" else turns[-1:]


def _marked_answers(chats: Sequence[Any], config: DataConfig, tokenizer: Any) -> list[Any]:
    """Tokens of each chat, with answers as the template marks them."""

    def prepare(chat: Chat) -> tuple[Chat, list[str]]:
        """The chat, and what is before its last answer if that is the only one that counts."""
        _render(chat, tokenizer, False)  # so that a chat is refused by itself, not with all others
        if config.train_on == "all":
            return chat, []
        return chat, [_render(chat[: _answer_turns(chat, config)[0]], tokenizer, True)]

    def encode_all(good: list[tuple[Chat, list[str]]]) -> Iterator[tuple[Any, Any, Any]]:
        marked = tokenizer.apply_chat_template(
            [chat for chat, _ in good], return_dict=True, return_assistant_tokens_mask=True
        )
        befores = _tokenise([texts for _, texts in good], tokenizer)
        return zip(marked["input_ids"], marked["assistant_masks"], befores, strict=True)

    def finish(row: tuple[list[int], list[int], list[list[int]]]) -> Tokens:
        ids, mask, befores = row
        learn = np.array(mask, np.bool_)
        for before in befores:
            learn[: _length(before, ids)] = False
        return Tokens(np.array(ids, np.int32), learn)

    return _each(finish, _together(encode_all, _each(prepare, chats)))


def _added_answers(chats: Sequence[Any], config: DataConfig, tokenizer: Any) -> list[Any]:
    """Tokens of each chat, with answers as what a turn adds to the turns before it."""

    def texts(chat: Chat) -> list[str]:
        """The whole, then for each answer what is before it and the same with it."""
        parts = [_render(chat, tokenizer, False)]
        for turn in _answer_turns(chat, config):
            parts.append(_render(chat[:turn], tokenizer, True))
            if turn + 1 < len(chat):
                parts.append(_render(chat[: turn + 1], tokenizer, False))
        return parts

    def finish(row: list[list[int]]) -> Tokens:
        whole, befores = row[0], row[1::2]
        afters = [*row[2::2], whole]
        spans = []
        for before, after in zip(befores, afters, strict=False):
            start, stop = _length(before, whole), _length(after, whole)
            added = whole[start:stop]
            if tokenizer.eos_token_id in added:  # what follows it, nobody generates
                stop -= added[::-1].index(tokenizer.eos_token_id)
            spans.append((start, stop))
        return _mark(whole, spans)

    ids = _together(lambda good: _tokenise(good, tokenizer), _each(texts, chats))
    return _each(finish, ids)


def _length(prefix: list[int], whole: list[int]) -> int:
    """The length of `prefix`. BadRow unless `whole` begins with it."""
    if whole[: len(prefix)] != prefix:
        raise BadRow(
            "template",
            "has an answer that can't be told from the rest: the chat template writes what is "
            "before it, or the answer, differently as the chat goes on; use train_on: last, or a "
            "model.chat_template with {% generation %} around an answer",
        )
    return len(prefix)


def _mark(ids: list[int], spans: Sequence[tuple[int, int]]) -> Tokens:
    """A row whose answers are the tokens from start to before stop of each span."""
    learn = np.zeros(len(ids), np.bool_)
    for start, stop in spans:
        learn[start:stop] = True
    return Tokens(np.array(ids, np.int32), learn)


def _cut(row: Tokens, config: DataConfig, purpose: Purpose) -> Tokens:
    """A row of at most max_length tokens. BadRow if there is none, or nothing to learn in it."""
    length, most = len(row.ids), config.max_length
    if length > most and config.truncation == "drop":
        raise BadRow("too long", f"has {length} tokens, {length - most} more than max_length")
    kept = slice(-most, None) if config.truncation == "left" else slice(most)
    ids, learn = row.ids[kept], row.learn[kept].copy()
    learn[:1] = False  # nothing is before it that it could be told from
    if purpose == "answers" and not learn.any():
        if length > most:
            raise BadRow("nothing left", f"keeps no token of an answer when cut to {most}")
        raise BadRow("no answer", "has no token of an answer")
    if length == 0:
        raise BadRow("empty", "has no tokens")
    return Tokens(ids, learn)
