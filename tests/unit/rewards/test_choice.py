"""Which option a response chooses."""

from __future__ import annotations

import time
from typing import Any

import pytest

from roll_td.rewards.choice import (
    letter_exists,
    multiple_choice,
    multiple_choice_options,
    option_exists,
)

CITIES = ["Rome", "Paris", "New York", "3"]


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        (r"\boxed{B}", "B"),
        (r"The answer is A. No: \boxed{\text{(B)}}.", "B"),
        (r"\boxed{B. Paris}", "B"),
        (r"\boxed{b}", "B"),
        (r"\boxed{A, B}", None),
        (r"\boxed{both A and B}", None),
        (r"\boxed{B or B}", "B"),
        ("The answer is (B).", "B"),
        ("The correct answer is: **B**, not (A)", "B"),
        ("answer: b", "B"),
        ("Answer: C. Wait. The final answer is D", "D"),
        ("The answer is B because C is wrong", "B"),
        ("The answer is a matter of taste", None),
        ("The answer is Berlin", None),
        ("Not (A). So (C)", "C"),
        ("**C**", "C"),
        ("I think\nB. Paris", "B"),
        ("A is wrong, so C!", "C"),
        ("I am a cat", None),
        ("A cat. I say so.", None),
        ("", None),
        ("<think>B</think> C", "C"),
        ("<think>The answer is B", None),
        ("The answer is E", None),
    ],
)
def test_the_letter_that_is_chosen(response: str, letter: str | None) -> None:
    said = [one for one in "ABCD" if multiple_choice(response, one, letters=4)]
    assert said == ([] if letter is None else [letter])


@pytest.mark.parametrize(
    ("gold", "score"),
    [("C", 1), ("(c)", 1), ("C.", 1), (2, 1), ("2", 1), (1, 0), ("A", 0)]
    + [(gold, None) for gold in ("E", 4, -1, "", None, "Paris", True, 2.0)],
)
def test_a_gold_is_a_letter_or_a_number_and_else_no_score(gold: Any, score: float | None) -> None:
    assert multiple_choice("C", gold, letters=4) == score
    assert letter_exists(gold, letters=4) == (None if score is None else 1)


@pytest.mark.parametrize(
    ("response", "chosen"),
    [
        ("B", 1),
        ("Paris.", 1),
        (r"It is \boxed{\text{new  york}}", 2),
        (r"\boxed{3}", 3),
        ("The answer is (D)", 3),
        ("Rome or Paris", None),
        ("E", None),
    ],
)
def test_an_option_may_be_chosen_by_its_text(response: str, chosen: int | None) -> None:
    for number, city in enumerate(CITIES):
        right = float(number == chosen)
        assert multiple_choice_options(response, city, CITIES) == right
        assert multiple_choice_options(response, "ABCD"[number], CITIES) == right
        assert option_exists(city, CITIES) == 1


def test_a_number_that_is_an_options_text_is_that_text() -> None:
    assert multiple_choice_options("D", "3", CITIES) == 1
    assert multiple_choice_options("D", 3, CITIES) == 1
    assert multiple_choice_options("C", "3", ["3", "5", "7", "9"]) == 0
    assert multiple_choice_options("A", "3", ["3", "5", "7", "9"]) == 1


@pytest.mark.parametrize("gold", ["Berlin", "E", 4, None, ""])
def test_a_gold_that_is_no_option_is_no_score(gold: Any) -> None:
    assert multiple_choice_options("A", gold, CITIES) is None
    assert option_exists(gold, CITIES) is None
    assert multiple_choice_options("Rome", "Rome", ["Rome", "rome"]) is None, "which of the two?"


@pytest.mark.parametrize("options", ["AB", '["Rome"]', {"A": "Rome"}, None, 3])
def test_options_that_are_no_list_are_an_error(options: Any) -> None:
    for judge in (
        lambda: multiple_choice_options("A", "A", options),
        lambda: option_exists(0, options),
    ):
        with pytest.raises(TypeError, match="want a list of texts"):
            judge()


@pytest.mark.parametrize(
    "response", ["\n" * 10**6, "answer is" + " " * 10**6 + "!", "A\n " * 10**5, "answer " * 10**5]
)
def test_a_long_response_takes_no_time(response: str) -> None:
    started = time.perf_counter()
    assert multiple_choice(response, "B", letters=4) == 0
    assert time.perf_counter() - started < 5  # 0.4 s measured; in square time it is minutes
