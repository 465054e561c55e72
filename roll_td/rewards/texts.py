"""Rewards that look at a response as text."""

from __future__ import annotations

import re

from roll_td.rewards.extract import ground_truth_text, last_integer


def exact_match(
    response: str, ground_truth: object, *, after: str | None, part: str
) -> float | None:
    """1 if what counts of the response is that of the ground truth, else 0; None where the ground
    truth has nothing that counts.

    after: what counts is the text after the last of these; a response without one gets 0, a ground
    truth without one is taken whole. part: "text", without the space around it, or "last_integer",
    the last whole number in it, by value. TypeError as ground_truth_text.
    """
    counts = last_integer if part == "last_integer" else str.strip
    gold = counts(ground_truth_text(ground_truth, after))
    if not gold:
        return None
    if after is not None and after not in response:
        return 0.0
    return float(counts(response.rpartition(after)[2] if after else response) == gold)


def format_match(response: str, *, pattern: str) -> float:
    """1 if all of the response but the space around it matches `pattern`, else 0; a dot matches
    line ends too."""
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)
