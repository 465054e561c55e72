"""Processes with a time limit: what is hostile costs its own row, nothing else."""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from roll_td.rewards.pool import Call, Outcome, Pool

MATH = "roll_td.rewards.math_rule.math_rule"
MINE = "tests.unit.rewards.reward_functions."
HOSTILE = "9^(9^(9^9))"


def math_call(response: str, timeout_s: float, gold: str = "42") -> Call:
    return Call(MATH, (response, gold), {"gold_after": None}, timeout_s)


def mine(name: str, response: str, timeout_s: float = 20.0) -> Call:
    return Call(MINE + name, (response,), {}, timeout_s)


def test_g08_one_huge_expression_costs_its_own_row(pool: Pool) -> None:  # G08
    responses = ["42", "41", r"\boxed{42}", HOSTILE, "42", "41", "$42$", "42"]
    started = time.perf_counter()
    outcomes = pool.run([math_call(response, 2.0) for response in responses])
    assert time.perf_counter() - started < 2.0 + 2.0
    assert [o.kind for o in outcomes] == ["value"] * 3 + ["timeout"] + ["value"] * 4
    assert [o.value for o in outcomes if o.kind == "value"] == [1, 0, 1, 1, 0, 1, 1]


def test_g08_twenty_in_a_row_do_not_shrink_the_pool(pool: Pool) -> None:  # G08
    outcomes = pool.run([math_call(HOSTILE, 0.3) for _ in range(20)])
    assert [o.kind for o in outcomes] == ["timeout"] * 20
    ids = [outcome.value for outcome in pool.run([mine("process_id", "x") for _ in range(6)])]
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{9^{9^{9^9}}}",
        r"\boxed{\binom{10^9}{5 \cdot 10^8}}",
        r"\boxed{(10^9)!}",
        r"\boxed{\sum_{k=1}^{10^9} \frac{1}{k}}",
        r"\boxed{" * 2000,
        r"\boxed{" + "(" * 2000 + ")" * 2000 + "}",
        r"\frac{" * 500,
        "9" * 100_000,
        "$" * 10_000,
        "\x00\ud800\\",
    ],
    ids=lambda response: response[:12].encode("ascii", "backslashreplace").decode(),
)
def test_a_hostile_response_is_wrong_or_takes_too_long(pool: Pool, response: str) -> None:
    (outcome, after) = pool.run([math_call(response, 1.0), math_call("42", 20.0)])
    assert outcome.kind == "timeout" or (outcome.kind == "value" and outcome.value == 0)
    assert after.value == 1


def test_a_function_that_takes_its_process_down_costs_its_own_row(pool: Pool) -> None:
    outcomes = pool.run([mine("exits", own) for own in ("ok", "end", "ok", "exit", "ok", "ok")])
    assert [o.kind for o in outcomes] == ["value", "timeout", "value", "error", "value", "value"]


def test_the_limit_counts_from_a_calls_start_and_outcomes_keep_their_order(pool: Pool) -> None:
    seconds = ["0.5", "0.1"] * 4  # 1.2 s in all on each process
    outcomes = pool.run([mine("sleeps", own, timeout_s=1.0) for own in seconds])
    assert [o.value for o in outcomes] == [float(own) for own in seconds]


def test_an_exception_is_a_value_with_its_traceback(pool: Pool) -> None:
    (outcome,) = pool.run([Call(MINE + "raises_on_bad", ("bad", 1), {}, 20.0)])
    assert outcome.kind == "error"
    assert "in raises_on_bad" in outcome.text and "ZeroDivisionError: one of four" in outcome.text


@pytest.mark.parametrize(
    ("value", "number"), [(1, 1.0), (True, 1.0), (0.5, 0.5), (None, math.nan), (math.nan, math.nan)]
)
def test_numbers_are_scores_and_none_is_none(pool: Pool, value: object, number: float) -> None:
    (outcome,) = pool.run([Call(MINE + "always", ("x",), {"value": value}, 20.0)])
    assert outcome.kind == "value" and outcome.value == pytest.approx(number, nan_ok=True)


@pytest.mark.parametrize("value", ["1", math.inf, [1], {}])
def test_what_is_no_score_is_an_error(pool: Pool, value: object) -> None:
    (outcome,) = pool.run([Call(MINE + "always", ("x",), {"value": value}, 20.0)])
    assert outcome.kind == "error"
    assert f"returned {value!r}" in outcome.text and "a score is" in outcome.text


def test_the_processes_do_not_import_torch(pool: Pool) -> None:
    assert pool.run([mine("torch_is_imported", "x")]) == [Outcome("value", 0.0)]


def test_a_process_that_ended_while_idle_is_replaced(pool: Pool) -> None:
    first = pool.run([mine("process_id", "x") for _ in range(2)])
    processes = [psutil.Process(int(outcome.value)) for outcome in first]
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, 10)
    again = pool.run([mine("process_id", "x") for _ in range(2)])
    assert {o.kind for o in again} == {"value"}
    assert not {o.value for o in again} & {o.value for o in first}


def test_after_a_run_that_failed_the_next_gets_its_own_answers(pool: Pool) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pool.run([mine("sleeps", "0.3"), Call("math.sqrt", (lambda: None,), {}, 20.0)])
    outcomes = pool.run([Call("math.sqrt", (float(n * n),), {}, 20.0) for n in range(4)])
    assert [o.value for o in outcomes] == [0, 1, 2, 3]


def test_a_module_that_cannot_be_imported_is_an_error_of_its_own() -> None:
    broken = Pool(1, ["tests.unit.rewards.no_such_module"])
    with pytest.raises(RuntimeError, match=r"could not start: (.|\n)*no_such_module"):
        broken.run([Call("math.sqrt", (4.0,), {}, 20.0)])
    broken.close()


RANK = f"""
import sys
from roll_td.rewards.pool import Call, Pool

if __name__ == "__main__":
    pool = Pool(2, ["roll_td.rewards.math_rule"])
    pool.run([Call("math.sqrt", (4.0,), {{}}, 60.0)] * 2)
    print("ready", flush=True)
    pool.run([Call({MATH!r}, ({HOSTILE!r}, "42"), {{"gold_after": None}}, 600.0)] * 2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_l04_the_processes_end_with_the_rank(tmp_path: Path, number: signal.Signals) -> None:  # L04
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    ) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"ready\n"
        time.sleep(1.5)  # both are in arithmetic now, in C
        family = psutil.Process(rank.pid).children(recursive=True)
        assert len(family) >= 3  # two, and the one they are forked from
        rank.send_signal(number)
        rank.wait(20)
        _, alive = psutil.wait_procs(family, 5)
        for process in alive:
            process.kill()
        assert not alive
