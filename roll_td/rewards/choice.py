"""Which of several options a response chooses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from roll_td.rewards.extract import after_thinking, last_box

_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_SAID = re.compile(
    r"(?i:answer|choice|option)(?:\s++(?i:is|would\s+be|should\s+be)|\s*+:)\s*+:?\s*+"
    r"\**+\s*+(?i:option\s+|choice\s+)?[(\[\"']?([A-Z]|[a-z](?!\s+[a-z]))(?![A-Za-z'\u2019])"
)
"""The last of "answer is (B)", "Answer: **b**", "the correct option is B" and the like."""
_MARKED = re.compile(r"\(([A-Z])\)|\[([A-Z])\]|\*\*\(?([A-Z])[).:]?\)?\*\*")
_LINE = re.compile(r"^[^\S\n]*+(?:option\s++)?([A-Z])[^\S\n]*+(?:[).:].*)?$", re.MULTILINE)
_ALONE = re.compile(r"(?<![A-Za-z0-9'\u2019.-])([B-HJ-Z]|[AI](?![ ]+[a-z]))(?![A-Za-z0-9'\u2019-])")
"""A capital letter that is no word: not the article, not the pronoun."""
_SINGLE = re.compile(r"(?<![A-Za-z0-9])([A-Z])(?![A-Za-z0-9'\u2019])")


def multiple_choice(response: str, ground_truth: object, *, letters: int) -> float | None:
    """1 if the response chooses the option that the ground truth names, else 0; None if that names
    none.

    ground_truth: a letter, or a number counted from 0. Chosen is what is in the last box after the
    last </think>; without a box the first of these that is there, each time its last place: "answer
    is B" and the like; (B), [B] or **B**; a line that is B or begins with "B." or "B)"; a capital
    letter that is no word. Different letters in one box, or a letter beyond the options: none is
    chosen.
    """
    right = _number(ground_truth, letters)
    return None if right is None else float(_chosen(response, letters) == right)


def multiple_choice_options(
    response: str, ground_truth: object, options: Sequence[object]
) -> float | None:
    """As multiple_choice, with the texts of the options: the ground truth may be one of them, and
    so may what is in a box or, as a whole, the response. A number that is the text of an option is
    that text. TypeError for options that are no list."""
    texts = _texts(options)
    right = _right(ground_truth, texts)
    if right is None:
        return None
    said = after_thinking(response)
    box = None if said is None else last_box(said)
    told = said if box is None else box
    by_text = None if told is None else _of_text(told, texts)
    chosen = _chosen(response, len(texts)) if by_text is None else by_text
    return float(chosen == right)


def letter_exists(ground_truth: object, *, letters: int) -> float | None:
    """1 if the ground truth names an option, else None."""
    return None if _number(ground_truth, letters) is None else 1.0


def option_exists(ground_truth: object, options: Sequence[object]) -> float | None:
    """1 if the ground truth is one of the options or names one, else None."""
    return None if _right(ground_truth, _texts(options)) is None else 1.0


def _texts(options: Sequence[object]) -> list[str]:
    if isinstance(options, str | bytes | Mapping) or not isinstance(options, Iterable):
        raise TypeError(f"options is {options!r:.80}: want a list of texts")
    return [_plain(str(option)) for option in options]


def _number(ground_truth: object, count: int) -> int | None:
    """The number of an option, from 0, that a letter or a number names."""
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int):
        return None
    if isinstance(ground_truth, str):
        text = ground_truth.strip().strip("()[].").strip()
        if len(text) == 1 and text.isascii() and text.isalpha():
            ground_truth = ord(text.upper()) - ord("A")
        elif text.isascii() and text.isdigit():
            ground_truth = int(text)
        else:
            return None
    return ground_truth if 0 <= ground_truth < count else None


def _right(ground_truth: object, texts: Sequence[str]) -> int | None:
    number = _of_text(str(ground_truth), texts)
    return _number(ground_truth, len(texts)) if number is None else number


def _chosen(response: str, count: int) -> int | None:
    said = after_thinking(response)
    if said is None:
        return None
    box = last_box(said)
    if box is not None:
        found = {letter.upper() for letter in _in_box(box)}
        letter = found.pop() if len(found) == 1 else ""
    else:
        letter = _last(said)
    return _number(letter, count)


def _in_box(box: str) -> list[str]:
    inside = _WRAPPED.sub(r"\1", box).strip()
    alone = re.fullmatch(r"[(\[]?\s*([A-Za-z])\s*[)\].:]?", inside)
    if alone is not None:
        return [alone[1]]
    first = re.match(r"[(\[]?([A-Z])[)\].:]\s", inside)  # with the option's text behind it
    return [first[1]] if first is not None else _SINGLE.findall(inside)


def _last(text: str) -> str:
    for pattern in (_SAID, _MARKED, _LINE, _ALONE):
        found = list(pattern.finditer(text))
        if found:
            return next(group for group in found[-1].groups() if group)
    return ""


def _of_text(text: str, options: Sequence[str]) -> int | None:
    """The number of the only option that is this text."""
    plain = _plain(text)
    numbers = [number for number, option in enumerate(options) if option == plain and plain]
    return numbers[0] if len(numbers) == 1 else None


def _plain(text: str) -> str:
    return " ".join(_WRAPPED.sub(r"\1", text).split()).strip(" .").casefold()
