"""exact_match and format: rewards of a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_td.rewards.texts import exact_match, format_match

THINK = r"<think>.*</think>\s*<answer>.*</answer>"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("#919", 1),
        ("7+2+0=09,3+8+0=11,2+6+1=09#919", 1),
        ("#1#919", 1),
        ("#919\n", 1),
        ("919", 0),
        ("#919#", 0),
        ("#91 9", 0),
        ("#918", 0),
        ("", 0),
    ],
)
def test_what_counts_is_after_the_last_marker(response: str, score: float) -> None:
    assert exact_match(response, 919, after="#", part="text") == score


@pytest.mark.parametrize(
    ("response", "score"),
    [("2 + 2 = 4", 1), ("It is 4.", 1), ("4 and 5", 0), ("04", 1), ("four", 0), ("4.5", 0)],
)
def test_the_last_whole_number_counts_by_value(response: str, score: float) -> None:
    assert exact_match(response, "4", after=None, part="last_integer") == score


def test_a_ground_truth_is_cut_as_the_response_is() -> None:
    gold = "Natalia sold 48/2 = 24 clips.\n#### 1,072"
    assert exact_match("so #### 1072", gold, after="####", part="last_integer") == 1
    assert exact_match("so 1072", gold, after="####", part="last_integer") == 0
    assert exact_match("48/2 #### 24", gold, after="####", part="last_integer") == 0


@pytest.mark.parametrize("gold", ["", "  ", None])
def test_no_ground_truth_is_no_score(gold: str | None) -> None:
    assert exact_match("", gold, after=None, part="text") is None
    assert exact_match("", "none", after=None, part="last_integer") is None


@given(st.text(min_size=1).filter(str.strip), st.text(" \n\t", max_size=3))
def test_every_text_equals_itself_and_space_around_it_never_counts(text: str, space: str) -> None:
    assert exact_match(space + text + space, text, after=None, part="text") == 1
    assert exact_match(text + "x", text, after=None, part="text") == 0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", 1),
        ("<think>a</think><answer>c</answer>\n", 1),
        ("<answer>c</answer>", 0),
        ("<think>a</think><answer>c</answer>junk", 0),
        ("junk<think>a</think><answer>c</answer>", 0),
    ],
)
def test_g14_all_of_the_response_but_space_around_it_must_match(  # G14
    response: str, score: float
) -> None:
    assert format_match(response, pattern=THINK) == score
