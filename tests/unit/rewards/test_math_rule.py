"""math_rule's verdicts. What takes too long is tested with the pool."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import math_verify
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_td.rewards.math_rule import gold_equals_itself, math_rule

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "math_answers.jsonl").read_text().splitlines()
]
POLICY = {5: 1, 22: 0, 32: 1, 44: 0, 49: 0, 74: 0, 94: 0, 105: 0}
"""What ours says where a case leaves it open; the docstring of math_rule tells the same."""


def verdict(response: str, gold: object) -> float | None:
    return math_rule(response, gold, gold_after=None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_g03_verdicts(case: dict[str, object]) -> None:  # G03, G04
    want = POLICY[case["id"]] if case["want"] == "policy" else case["want"]
    assert verdict(str(case["answer"]), case["gold"]) == want
    assert gold_equals_itself(case["gold"], gold_after=None) == 1


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c["want"] != "policy" and "box" not in c["answer"]],
    ids=lambda case: str(case["id"]),
)
def test_a_box_changes_no_verdict(case: dict[str, object]) -> None:
    answer = str(case["answer"]).strip("$")
    assert verdict(f"Of 3 and 4, \\boxed{{{answer}}} it is.", case["gold"]) == case["want"]


def test_an_answer_after_a_comma_is_a_pair_in_a_box() -> None:
    assert verdict("1000,99", "1000.99") == 1 and verdict(r"\boxed{1000,99}", "1000.99") == 0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"<think>a</think>\boxed{42}", 1),
        (r"a</think>\boxed{42}", 1),
        (r"\boxed{42}", 1),
        (r"<think>a \boxed{42}", 0),
        (r"<think>\boxed{42}</think>\boxed{41}", 0),
        (r"<think>\boxed{42}</think>", 0),
        (r"\boxed{41} \boxed{42}", 1),  # the library makes a set of the two
        (r"\boxed{42} \boxed{41}", 0),
        (r"\boxed{$42$}", 1),
        (r"\boxed{}", 0),
        ("", 0),
        ("the final answer is 42", 1),
    ],
)
def test_g01_where_the_answer_is(response: str, score: float) -> None:  # G01, G09
    assert verdict(response, "42") == score


@pytest.mark.parametrize("gold", ["???", "", "  ", None, "$$", r"\boxed{}", r"\foo{"])
@pytest.mark.parametrize(
    "response", ["???", "", r"\boxed{???}", r"\boxed{}", "1", r"\boxed{\foo{}}"]
)
def test_g06_a_ground_truth_without_meaning_gives_no_score(  # G06
    response: str, gold: str | None
) -> None:
    assert verdict(response, gold) is None
    assert gold_equals_itself(gold, gold_after=None) is None


@pytest.mark.parametrize(
    "gold",
    [
        "(1, 2)",
        "[0, 1)",
        r"(-\infty, 3] \cup (5, \infty)",
        r"\{1, 2, 3\}",
        "0,1",
        r"\sqrt[3]{2}",
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"1 - \frac{1}{\mathrm{e}}",
        r"\frac{1}{2004!}",
        r"\text{Evelyn}",
        "x^2 + 1",
        r"\frac12",
        "1.5",
        7,
        -0.25,
    ],
)
def test_g04_a_ground_truth_equals_itself(gold: object) -> None:  # G04
    assert gold_equals_itself(gold, gold_after=None) == 1
    assert verdict(f"\\boxed{{{gold}}}", gold) == 1
    assert verdict(f"So it is ${gold}$.", gold) == 1
    assert verdict(r"\boxed{12345}", gold) == 0


@pytest.mark.parametrize(
    ("gold", "answer", "score"),
    [
        ("1000", "\\boxed{1e3}", 1),
        ("0.0015", "It is 1.5E-3.", 1),
        ("1e3", "1000", 1),
        ("-0.01", "\\boxed{x = -1e-2}", 1),
        ("1001", "\\boxed{1e3}", 0),
        ("2e^3", "\\boxed{2000}", 0),
        ("\\emptyset", "\\boxed{\\varnothing}", 1),
        ("\\varnothing", "\\boxed{0}", 0),
        ("90", "\\boxed{90°}", 1),
        ("30\\degree", "\\boxed{30^\\circ}", 1),
        ("\\infty", "\\boxed{∞}", 1),
        ("-\\infty", "\\boxed{∞}", 0),
        ("√2", "\\boxed{\\sqrt{2}}", 1),
        ("x²", "\\boxed{x^2}", 1),
        ("½", "0.5", 1),
        ("3·4", "12", 1),
        ("5.", "5", 1),
        ("5", "\\boxed{5.}", 1),
        ("\\$3.50", "3.5", 1),
        ("$\\$3.50$", "\\boxed{\\$3.5}", 1),
        ("€5", "\\boxed{5 €}", 1),
        ("€5", "\\boxed{6 €}", 0),
        ("60", "\\boxed{60 km/h}", 1),
        ("60", "\\boxed{60^\\circ C}", 1),
        ("60", "\\boxed{60 dollars}", 1),
        ("5", "\\boxed{5 cm^2}", 1),
        ("5", "\\boxed{5 million}", 0),
        ("5", "\\boxed{5 x}", 0),
        ("1234", "\\boxed{\\textbf{1,234}}", 1),
        ("5", "\\boxed{\\text{5 cm}}", 1),
        ("\\frac{-1\\pm\\sqrt5}{2}", "\\boxed{\\frac{-1+\\sqrt5}{2}, \\frac{-1-\\sqrt5}{2}}", 1),
        ("\\frac{-1+\\sqrt5}{2}", "\\boxed{\\frac{-1\\pm\\sqrt5}{2}}", 0),
        ("0.1\\overline{6}", "\\boxed{\\frac16}", 1),
        ("0.\\overline{3}", "\\boxed{0.3}", 0),
        ("12_8", "\\boxed{12_9}", 0),
        ("12_8", "\\boxed{12_{8}}", 1),
        ("12_8", "\\boxed{12}", 1),
    ],
)
def test_other_ways_to_write_the_same(gold: str, answer: str, score: float) -> None:
    assert math_rule(answer, gold, gold_after=None) == score


def test_an_ellipsis_is_compared_as_text() -> None:
    gold = r"1, 2, \ldots, n"
    assert verdict(r"\boxed{1,2,\ldots,n}", gold) == 1 and verdict(f"${gold}$", gold) == 1
    assert verdict(r"\boxed{1, 3, \ldots, n}", gold) == 0 and verdict(r"\boxed{2}", gold) == 0
    assert gold_equals_itself(gold, gold_after=None) == 1


def test_tiny_numbers_are_not_all_equal() -> None:
    assert verdict(r"\boxed{10^{-9}}", r"10^{-9}") == 1
    assert verdict(r"\boxed{10^{-9}}", r"2 \cdot 10^{-9}") == 0
    assert verdict(r"\boxed{0}", r"10^{-9}") == 0


def test_a_ground_truth_may_stand_after_a_marker() -> None:
    gold = "48/2 = <<48/2=24>>24 in May.\n#### 72"
    assert math_rule(r"\boxed{72}", gold, gold_after="####") == 1
    assert math_rule(r"\boxed{24}", gold, gold_after="####") == 0
    assert gold_equals_itself(gold, gold_after="####") == 1


def test_a_ground_truth_of_another_type_is_an_error() -> None:
    with pytest.raises(TypeError, match="want a text or a number"):
        verdict("1", ["1"])


FRACTIONS = st.fractions(-20, 20, max_denominator=12)


@settings(max_examples=60)
@given(FRACTIONS, FRACTIONS)
def test_fractions_are_equal_by_value(gold: Fraction, answer: Fraction) -> None:
    equal = float(gold == answer)
    unreduced = rf"\frac{{{3 * answer.numerator}}}{{{3 * answer.denominator}}}"
    assert verdict(rf"\boxed{{{unreduced}}}", str(gold)) == equal
    assert verdict(f"It is ${unreduced}$.", str(gold)) == equal
    assert verdict(rf"\boxed{{x = {answer}}}", str(gold)) == equal


def test_a_ground_truth_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def parse(text: str, **arguments: Any) -> Any:
        parsed.append(text)
        return math_verify.parse(text, **arguments)

    monkeypatch.setattr("roll_td.rewards.math_rule.parse", parse)
    for number in range(3):
        assert verdict(rf"\boxed{{{number}}}", "9876") == 0
    assert parsed.count(r"\boxed{9876}") == 1 and len(parsed) == 4
