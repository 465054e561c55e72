"""Whether a program in an answer passes the tests of its row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from roll_td.config.reward_settings import SandboxLimits
from roll_td.rewards.extract import after_thinking, last_fenced_block
from roll_td.rewards.sandbox import run_programs, run_tests

FORMS = (
    "want a text of Python that raises unless it holds, a list of those, {inputs: […], outputs: "
    "[…]}, a list of {input, output}, or one of these as JSON text"
)
_KEPT_BYTES = 4096
"""Of an output, beyond twice the longest expected one."""


@dataclass(frozen=True)
class Tests:
    """What a row asks of a program."""

    asserts: tuple[str, ...] = ()
    """Pieces of Python."""
    pairs: tuple[tuple[str, str], ...] = ()
    """What it reads, and what it is to print."""


def code(
    response: str, ground_truth: object, *, part: str, score: str, limits: SandboxLimits
) -> float | None:
    """1 if the program in the response passes all tests of the row, else 0; with score "share" the
    share that it passes. None for a row without tests.

    ground_truth: tests, in one of FORMS. Python is run after the program, in its names, each piece
    being a test; pairs have the program read `input` and compare what it prints with `output`, line
    by line, space at the ends of lines and of the text left out. A program that ends with another
    status than 0 fails its pair. part: what is run: "last_block", the last fenced block after the
    last </think> (without one: 0), or "text", all of that. TypeError for another form of tests;
    RuntimeError if the sandbox can't be made.
    """
    tests = read_tests(ground_truth)
    count = len(tests.asserts) + len(tests.pairs)
    if not count:
        return None
    said = after_thinking(response)
    program = said if said is None or part == "text" else last_fenced_block(said)
    if program is None:
        return 0.0
    passed = sum(_passed(program, tests, limits))
    return passed / count if score == "share" else float(passed == count)


def _passed(program: str, tests: Tests, limits: SandboxLimits) -> list[bool]:
    if tests.asserts:
        return list(run_tests(program, list(tests.asserts), limits).passed)
    longest = max(len(output.encode()) for _, output in tests.pairs)
    inputs = [given for given, _ in tests.pairs]
    ran = run_programs(program, inputs, limits, 2 * longest + _KEPT_BYTES)
    wanted = [_lines(output) for _, output in tests.pairs]
    return [
        one.status == 0 and _lines(one.output) == lines
        for one, lines in zip(ran, wanted, strict=True)
    ]


def have_meaning(
    ground_truth: object, *, part: str, score: str, limits: SandboxLimits
) -> float | None:
    """1 if these are tests, None if there are none, or one is no Python. TypeError as `code`."""
    tests = read_tests(ground_truth)
    try:
        for text in tests.asserts:
            compile(text, "test", "exec")
    except (SyntaxError, ValueError):
        return None
    return 1.0 if tests.asserts or tests.pairs else None


def check_sandbox(*, part: str, score: str, limits: SandboxLimits) -> str | None:
    """What is to be known of the sandbox that these settings ask for. RuntimeError if it can't be
    made here, or a program can't use Python's own modules in it."""
    ran = run_tests("import decimal, json", ["assert json.loads('1') == 1"], limits)
    if ran.passed != (True,):
        raise RuntimeError(
            f"a program can't import Python's modules in the sandbox (status {ran.status}); "
            "raise the limits, or install Python where all users may read it"
        )
    if limits.isolation == "namespaces":
        return None
    return "answers run with limits alone: they can use the files of their user, and the network"


def read_tests(ground_truth: object) -> Tests:
    """The tests of a row. TypeError for a form that isn't in FORMS."""
    value = ground_truth
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = ground_truth  # Python may begin like that too
    if value is None or value == "":
        return Tests()
    if isinstance(value, str):
        return Tests(asserts=(value,))
    if isinstance(value, Mapping) and {"inputs", "outputs"} <= value.keys():
        inputs, outputs = value["inputs"], value["outputs"]
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
            return Tests(pairs=tuple(map(_pair, inputs, outputs)))
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return Tests(asserts=tuple(value))
    if isinstance(value, list) and all(
        isinstance(one, Mapping) and {"input", "output"} <= one.keys() for one in value
    ):
        return Tests(pairs=tuple(_pair(one["input"], one["output"]) for one in value))
    raise TypeError(f"ground_truth is {ground_truth!r:.80}: {FORMS}")


def _pair(given: object, wanted: object) -> tuple[str, str]:
    if not isinstance(given, str) or not isinstance(wanted, str):
        raise TypeError(f"a test has {given!r:.40} and {wanted!r:.40}: want texts")
    return given, wanted


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
