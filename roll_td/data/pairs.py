"""Pairs of answers to one prompt: each side becomes tokens as an answer to learn from does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from roll_td.config.data import DataConfig
from roll_td.data.encode import Tokens, encode
from roll_td.data.read import BadRow, Row

CHAT = "messages"
"""Column of the rows that are made of a side."""


def encode_pairs(
    rows: Sequence[Row | BadRow], config: DataConfig, tokenizer: Any
) -> list[tuple[Tokens, ...] | BadRow]:
    """(chosen, rejected) of each row, or what is wrong with it. Of both the last turn alone is
    learnt from, after a prompt of the same turns. Raises as encode does.

    A row of which max_length takes out one side is taken out whole.
    """
    sides = [
        _encode_side(rows, config, tokenizer, key)
        for key in (config.chosen_key, config.rejected_key)
        if key is not None
    ]
    both: list[tuple[Tokens, ...] | BadRow] = []
    for chosen, rejected in zip(*sides, strict=True):
        if isinstance(chosen, BadRow) or isinstance(rejected, BadRow):
            both.append(chosen if isinstance(chosen, BadRow) else rejected)
        else:
            both.append(_wrong_pair(chosen, rejected) or (chosen, rejected))
    return both


def _encode_side(
    rows: Sequence[Row | BadRow], config: DataConfig, tokenizer: Any, key: str
) -> list[Tokens | BadRow]:
    own = replace(config, chosen_key=None, rejected_key=None, train_on="last")
    if config.template == "none":
        return encode(rows, replace(own, response_key=key), tokenizer, "answers")
    chats: list[Row | BadRow] = []
    for row in rows:
        try:
            chats.append(row if isinstance(row, BadRow) else {CHAT: _chat(row, config, key)})
        except BadRow as bad:
            chats.append(bad)
    own = replace(own, prompt_key=None, messages_key=CHAT)
    return [
        BadRow(tokens.kind, f"{tokens} ({key})")
        if isinstance(tokens, BadRow) and not isinstance(chat, BadRow)
        else tokens
        for chat, tokens in zip(chats, encode(chats, own, tokenizer, "answers"), strict=True)
    ]


def _chat(row: Row, config: DataConfig, key: str) -> list[Any]:
    """The prompt's turns and those of one side. BadRow unless they end with an answer."""
    if config.prompt_key is not None:
        chat = [_turn(row, config.prompt_key, "user")]
    elif config.messages_key is not None:
        chat = _turns(row, config.messages_key)
    else:
        chat = []
    is_text = bool(chat) and isinstance(row[key], str)
    chat = [*chat, _turn(row, key, "assistant")] if is_text else [*chat, *_turns(row, key)]
    last = chat[-1] if chat else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        raise BadRow("no answer", f"does not end with a turn of role assistant in {key!r}")
    return chat


def _turn(row: Row, key: str, role: str) -> dict[str, Any]:
    return {"role": role, "content": row[key]}


def _turns(row: Row, key: str) -> list[Any]:
    """The list of turns in a column, which may be there as JSON text."""
    value = row[key]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow("wrong type", f"has no chat as JSON in {key!r}: {error}") from None
    if not isinstance(value, list):
        raise BadRow("wrong type", f"has {type(value).__name__} in {key!r}: want a list")
    return value


def _wrong_pair(chosen: Tokens, rejected: Tokens) -> BadRow | None:
    """What keeps two answers from being compared: other prompts, or the same answer twice."""
    (prompt, answer), (other_prompt, other) = _split(chosen), _split(rejected)
    if prompt != other_prompt:
        return BadRow("two prompts", "has answers to different prompts: a pair has one prompt")
    if answer == other:
        return BadRow("equal answers", "has the same answer twice: there is nothing to prefer")
    return None


def _split(side: Tokens) -> tuple[list[int], list[int]]:
    """Tokens before the answer, and from there on."""
    first = int(side.learn.argmax())
    return side.ids[:first].tolist(), side.ids[first:].tolist()
