"""What of a text is the answer."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
"""The start of a box, any other command's first character (so that `\\{` is no brace), a brace."""
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_INTEGER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?![,.]?\d)", re.ASCII)
"""A whole number, no part of a word or of a decimal. A minus sign after a digit or a letter is one
of subtraction; commas stand between thousands."""


def last_box(text: str) -> str | None:
    """What is in the last \\boxed{…} or \\fbox{…} whose braces balance; of nested ones the outer.
    None if there is none. Takes time in proportion to the text's length."""
    opened: list[int | None] = []
    found: tuple[int, int] | None = None
    for token in _TOKEN.finditer(text):
        if token[0] == "}":
            start = opened.pop() if opened else None
            found = found if start is None else (start, token.start())
        elif token[0] == "{":
            opened.append(None)
        elif token[0].endswith("{") and len(token[0]) > 2:
            opened.append(token.end())
    return None if found is None else text[found[0] : found[1]]


def last_fenced_block(text: str) -> str | None:
    """What is between the last two lines of three backquotes of which the first may name a
    language; None if there is none. A block that doesn't end is none."""
    blocks = _FENCED.findall(text)
    return blocks[-1] if blocks else None


def after_thinking(response: str) -> str | None:
    """What follows the thoughts, which end with the last </think>; the whole response if it has no
    tags; None if it has thoughts that don't end."""
    rest = response.rpartition("</think>")[2]
    return None if "<think>" in rest else rest


def last_integer(text: str) -> str:
    """The last whole number in a text, without leading zeros and commas; "" if there is none."""
    numbers = _INTEGER.findall(text)
    if not numbers:
        return ""
    number = numbers[-1].replace(",", "")  # int() refuses more than 4300 digits
    digits = number.lstrip("-").lstrip("0") or "0"
    return f"-{digits}" if number.startswith("-") and digits != "0" else digits


def ground_truth_text(ground_truth: object, after: str | None) -> str:
    """A ground truth (a text or a number) as text, from the last `after` on if it has one; "" for
    None and for NaN, which a table has where it has nothing. TypeError for another type."""
    if ground_truth is None or ground_truth != ground_truth:
        return ""
    if not isinstance(ground_truth, str | int | float):
        given = f"ground_truth is {ground_truth!r:.80} ({type(ground_truth).__name__})"
        raise TypeError(
            f"{given}: want a text or a number; change the data, or use your own reward"
        )
    return str(ground_truth).rpartition(after)[2] if after else str(ground_truth)
