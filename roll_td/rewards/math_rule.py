"""Whether an answer is mathematically equal to the ground truth. The one importer of math-verify.

To be run in a process with a time limit (roll_td.rewards.pool): an expression may take for ever,
and the library's own alarm works on a main thread only and does not interrupt arithmetic in C.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from math_verify import parse, verify  # type: ignore[import-untyped]
from sympy import Basic, Expr, MatrixBase, N  # type: ignore[import-untyped]

from roll_td.rewards.extract import after_thinking, ground_truth_text, last_box

MOST_GOLDS = 4096
"""Parsed ground truths that a process remembers."""
TOLERANCE = 1e-5
"""The library rounds to 6 decimals, which makes all tiny numbers equal; equal ones differ by at
most this share, too."""

_LETTER = re.compile(r"\\(?:mathrm|mathit|rm)\s*\{\s*([A-Za-z])\s*\}")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,!;: ]|\{,\}|[ ~])\d{3})+(?!\d)")
_MIXED = re.compile(r"(?<![\w.,/^})])(-?)(\d{1,9})\s+(\d{1,9})/(\d{1,9})(?![\w.])(\s*%)?")
_SCIENTIFIC = re.compile(r"(?<![\w.\\}])(?:\d+(?:\.\d+)?|\.\d+)[eE][+-]?\d{1,2}(?![\w^]|\.\d)")
_SIGNS = {
    "\\varnothing": "\\emptyset",
    "\\degree": "^\\circ ",
    "°": "^\\circ ",
    "∞": "\\infty ",
    "·": "\\cdot ",
    "²": "^2",
    "³": "^3",
    "½": "\\frac{1}{2}",
    "∓": "\\mp ",
    "±": "\\pm ",
}
"""What math-verify does not read, and what it does."""
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z])")
_CURRENCY = re.compile(r"(?<!\\)\\\$|[£€¥]")
_REPEATING = re.compile(r"(?<![\w.])(\d{1,9})\.(\d{0,9})\\overline\s*\{\s*(\d{1,9})\s*\}")
_STYLED = re.compile(r"\\(?:text|mathrm|(?:text|math)bf|underline)\s*\{\s*([-+]?\.?\d[^{}]*)\}")
_NUMBER_OF = re.compile(
    r"(?P<number>[-+]?[\d.,]*\d|\\[dt]?frac\{\d+\}\{\d+\})"
    r"(?:\s*\^\{?\\circ\s*\}?\s*[CF]|[\s~]+(?!(?:hundred|thousand|[mbtr]+illion|percent)\b)"
    r"(?:(?:[ckm]?m|ft|in|yd|mi|kg|lb)(?:\s*\^\{?[23]\}?|/(?:h|hr|s))|[A-Za-z]{4,}(?:\s[a-z]+)*))"
)
"""A number and a unit as plain letters, which math-verify takes for variables."""
_BASE = re.compile(r"(?<=\d)_\{?(\d+)\}?$")
_PERCENT = re.compile(r"\s*(?:\\?%|[Pp]ercent|\\text\s*\{\s*percent\s*\})\s*$")
_NO_MEANING = re.compile(r"\\left|\\right|\\displaystyle|\\[,!;: ]|\\q?quad|[\s$~]")
_QUANTIFIER = re.compile(r"\\forall|\\exists|[∀∃]")
_ELLIPSIS = re.compile(r"\\[lcd]?dots[bc]?(?![a-z])|…|\.\.\.")
_MARKED = re.compile(r"\$|\\\(|\\\[")
_WHOLE = re.compile(r"\$([^$]+)\$\.?|\\\(((?:(?!\\\)).)+)\\\)\.?", re.DOTALL)

for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # they warn that the time limit is ours


@dataclass(frozen=True)
class Answer:
    """What an answer says."""

    text: str
    """The formula."""
    values: list[Any]
    """What math-verify makes of it: sympy objects, and its own text of the formula."""

    @property
    def has_value(self) -> bool:
        """Whether any of them is more than text."""
        return any(isinstance(value, Basic | MatrixBase) for value in self.values)


def math_rule(response: str, ground_truth: object, *, gold_after: str | None) -> float | None:
    """1 if the response's answer equals the ground truth, else 0; None if the ground truth has no
    meaning as mathematics.

    The answer is in the last balanced \\boxed or \\fbox after the last </think>; without a box it
    is what math-verify finds in the text: after "final answer is", else the last formula or number.
    Thoughts that don't end get 0. gold_after: the ground truth (a text or a number, LaTeX or plain)
    is the text after the last of these, if it has one.

    Where one may differ: 1000,99 is 1000.99 in a text, and in a box or formula a pair; a percentage
    is its number (28% is 28), and so are degrees (90° is 90, not π/2); currencies and units say
    nothing; a number to another base is read to base 10, and two that state one must state the
    same; numbers are equal to 6 decimals (33.3 is not 100/3), the ends of intervals
    exactly; √(1/n) is not 1/√n, which needs n > 0; formulas with an ellipsis are equal as texts
    only; a quantifier must be on both sides. TypeError as ground_truth_text.
    """
    gold = _gold(ground_truth_text(ground_truth, gold_after).strip())
    if gold is None:
        return None
    said = after_thinking(response)
    return 0.0 if said is None else float(_equal(gold, _read(said)))


def gold_equals_itself(ground_truth: object, *, gold_after: str | None) -> float | None:
    """1 if math_rule finds the ground truth's own value, boxed, equal to it; 0 if not; None if it
    has no meaning. Not as texts, which would hide what can't be compared."""
    gold = _gold(ground_truth_text(ground_truth, gold_after).strip())
    if gold is None:
        return None
    values = [value for value in gold.values if not isinstance(value, str)]
    return float(not values or verify(values, values, timeout_seconds=None))


@lru_cache(MOST_GOLDS)
def _gold(text: str) -> Answer | None:
    """None for a text without meaning."""
    text = _CURRENCY.sub("", text)
    is_bare = last_box(text) is None and not _MARKED.search(text)
    gold = _formula(text) if is_bare else _read(text)
    return gold if gold.has_value or _ELLIPSIS.search(gold.text) else None


def _read(text: str) -> Answer:
    """The answer in a text: its last box, all of it if that is a formula, else what math-verify
    finds."""
    text = _CURRENCY.sub("", text)
    box, whole = last_box(text), _WHOLE.fullmatch(text.strip())
    if box is not None:
        return _formula(box)
    if whole is not None:
        return _formula(whole[1] or whole[2])
    values = _parse(_rewritten(text))
    texts = [value for value in values if isinstance(value, str)]
    return Answer(texts[-1] if texts else "", values)


def _formula(text: str) -> Answer:
    """A text that is a formula as a whole."""
    text = text.strip()
    text = text if text.endswith("..") else text.removesuffix(".")
    text = styled[1].strip() if (styled := _STYLED.fullmatch(text)) else text
    rewritten = _THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), _rewritten(text))
    counted = _NUMBER_OF.fullmatch(rewritten.strip())
    rewritten = counted["number"] if counted else rewritten
    percent = _PERCENT.search(rewritten)
    if percent is None:
        answer = Answer(text, _parse(rf"\boxed{{{rewritten}}}"))
        if answer.has_value or rewritten.count("\\pm") != 1 or "\\mp" in rewritten:
            return answer
        both = ",".join(rewritten.replace("\\pm", sign) for sign in "+-")
        return Answer(text, _parse(rf"\boxed{{{both}}}"))
    number = rewritten[: percent.start()].replace("$", "")
    return Answer(text, _parse(f"${number}$ percent"))


def _rewritten(text: str) -> str:
    """With what math-verify does not read written as it does."""

    def improper(found: re.Match[str]) -> str:
        whole, above, below = (int(found[group]) for group in (2, 3, 4))
        if above >= below:
            return found[0]
        both = f"{found[1]}{whole * below + above}/{below}"
        return f"${both}$ percent" if found[5] else both

    def fraction(found: re.Match[str]) -> str:
        whole, once, again = found.groups()
        above, below = int(whole + once + again) - int(whole + once), 10 ** len(again) - 1
        return f"{above}/{below * 10 ** len(once)}"

    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    text = _ROOT.sub(r"\\sqrt{\1}", _REPEATING.sub(fraction, text))
    text = _SCIENTIFIC.sub(lambda found: f"{Decimal(found[0]):f}", text)
    return _MIXED.sub(improper, _LETTER.sub(r"\1", text))


def _parse(text: str) -> list[Any]:
    values: list[Any] = parse(text, parsing_timeout=None)
    return values


def _equal(gold: Answer, answer: Answer) -> bool:
    plain, own = _NO_MEANING.sub("", gold.text), _NO_MEANING.sub("", answer.text)
    if plain == own:
        return True
    if _ELLIPSIS.search(plain) or _ELLIPSIS.search(own):
        return False
    if _QUANTIFIER.findall(plain) != _QUANTIFIER.findall(own):
        return False
    bases = [found[1] for text in (plain, own) if (found := _BASE.search(text))]
    return len(set(bases)) < 2 and _equal_values(gold, answer)


def _equal_values(gold: Answer, answer: Answer) -> bool:
    if not verify(gold.values, answer.values, timeout_seconds=None):
        return False
    first, second = gold.values[0], answer.values[0]
    both = isinstance(first, Expr) and isinstance(second, Expr)
    if not both or not (first.is_number and second.is_number):
        return True
    first, second = N(first), N(second)
    if first == 0 or second == 0:
        return bool(first == second)
    ratio = first / second  # of a percentage to its number it is 100
    return not ratio.is_comparable or any(
        abs(ratio - share) <= TOLERANCE * share for share in (1, 100, 0.01)
    )
