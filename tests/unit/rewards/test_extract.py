"""Which part of a text is the answer."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_td.rewards.extract import after_thinking, ground_truth_text, last_box, last_integer

BALANCED = st.recursive(
    st.text("ab1+ ", max_size=4),
    lambda inner: st.lists(inner, max_size=3).map(lambda parts: "{" + "".join(parts) + "}"),
)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"First \boxed{5}. Wrong, so \boxed{7}.", "7"),
        (r"\boxed{5}\boxed{7}", "7"),
        (r"\boxed{5} or \boxed{7", "5"),
        (r"\fbox{42}", "42"),
        (r"\boxed {a}", "a"),
        (r"\boxed{x=\boxed{5}}", r"x=\boxed{5}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"a } stray \boxed{7} and { more", "7"),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
        (r"\\boxed{7}", None),  # a line break, then a word
        (r"\boxed 7", None),
        ("", None),
    ],
)
def test_g09_the_last_box_whose_braces_balance(text: str, box: str | None) -> None:  # G09
    assert last_box(text) == box


@given(st.text("ab {}\\", max_size=30), BALANCED)
def test_whatever_comes_before_the_last_box_is_no_matter(before: str, inside: str) -> None:
    before = before.rstrip("\\")
    assert last_box(f"{before} \\boxed{{{inside}}} end") == inside


def test_boxes_without_end_take_no_time() -> None:
    started = time.perf_counter()
    assert last_box(r"\boxed{" * 100_000) is None
    nested = r"\boxed{" * 50_000 + "1" + "}" * 50_000
    assert last_box(nested) == nested[len(r"\boxed{") : -1]
    assert time.perf_counter() - started < 2  # 0.05 s measured; in square time it is minutes


@pytest.mark.parametrize(
    ("response", "rest"),
    [
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),  # the opening tag is often part of the prompt
        ("b", "b"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think> maybe \\boxed{42", None),
        ("<think>a</think>b<think>c", None),
    ],
)
def test_g01_thoughts_are_left_out(response: str, rest: str | None) -> None:  # G01
    assert after_thinking(response) == rest


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1 + 2 = 3", "3"),
        ("It is 1,234.", "1234"),
        ("1,234,567 of 12,34", "34"),
        ("x=-4", "-4"),
        ("5-3", "3"),
        ("007", "7"),
        ("-0", "0"),
        ("3.5", ""),
        ("35.25 or 6", "6"),
        ("a1 b22", ""),
        ("none", ""),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_the_last_whole_number(text: str, number: str) -> None:
    assert last_integer(text) == number


@given(st.integers(), st.text("abc .:=\n", max_size=10))
def test_a_number_is_found_whatever_stands_before_it(number: int, before: str) -> None:
    assert last_integer(f"12 {before} {number}") == str(number)
    assert last_integer(f"is {number:,}.") == str(number)


def test_a_ground_truth_is_text_or_number() -> None:
    assert ground_truth_text("so 3+4\n#### 7", "####") == " 7"
    assert ground_truth_text(7, "####") == "7"
    assert ground_truth_text(None, None) == ground_truth_text(float("nan"), None) == ""
    with pytest.raises(TypeError, match=r"\[7\] \(list\): want a text or a number"):
        ground_truth_text([7], None)
