"""Which functions judge a row, and what their failures mean."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_td.config.rewards import RewardArgs, Rewards
from roll_td.metrics import Mean, Sum, merge_metrics
from roll_td.rewards.judge import Judge
from roll_td.rewards.sandbox import Ran
from tests.unit.rewards.namespaces import needs_namespaces

MINE = "tests.unit.rewards.reward_functions."
LOGGER = logging.getLogger("reward.0")
MakeJudge = Callable[[Rewards], Judge]


@pytest.fixture
def judge() -> Iterator[MakeJudge]:
    made: list[Judge] = []

    def make(rewards: Rewards) -> Judge:
        made.append(Judge(rewards, 2, LOGGER))
        return made[-1]

    yield make
    for own in made:
        own.close()


def mine(name: str, **arguments: Any) -> RewardArgs:
    return RewardArgs(MINE + name, **arguments)


EXACT = RewardArgs("exact_match")
FOUR = {"response": ["bad", "1", "2", "3"], "ground_truth": ["1", "1", "1", "3"]}


def test_domains_go_by_their_tag_and_the_rest_by_default(judge: MakeJudge) -> None:
    rewards: Rewards = {
        "sums": RewardArgs("exact_match", {"after": "#"}),
        "default": mine("length", settings={"share": 0.5}),
    }
    columns = {
        "response": ["#3", "3", "three", "#4"],
        "ground_truth": [3, 3, None, 3],
        "domain": ["sums", "sums", "words", "sums"],
    }
    verdict = judge(rewards).score(columns)
    assert verdict.scores == [1, 0, 2.5, 0] and verdict.parts == {}
    assert verdict.metrics["reward/sums/exact_match"] == pytest.approx(1 / 3)
    assert verdict.metrics["reward/default/length"] == 2.5


@pytest.mark.parametrize("domain", ["physics", None, 3])
def test_c12_a_domain_without_reward_is_an_error_and_no_zero(  # C12
    judge: MakeJudge, domain: object
) -> None:
    columns = {"response": ["1"], "ground_truth": ["1"], "domain": [domain]}
    with pytest.raises(ValueError, match=f"domain={domain!r} has no reward: there are math, sums"):
        judge({"math": EXACT, "sums": EXACT}).score(columns)


def test_the_functions_of_a_domain_are_added_by_weight(judge: MakeJudge) -> None:
    rewards: Rewards = {
        "both": [EXACT, mine("length", weight=-0.5)],
        "one": RewardArgs("exact_match", weight=2.0),
    }
    columns = {
        "response": ["ab", "abc", "ab"],
        "ground_truth": ["ab", "ab", "ab"],
        "domain": ["both", "both", "one"],
    }
    verdict = judge(rewards).score(columns)
    assert verdict.scores == [1 - 1, 0 - 1.5, 2]
    assert verdict.parts["exact_match"] == [1, 0, 1]
    assert verdict.parts["length"][:2] == [2, 3] and math.isnan(verdict.parts["length"][2])
    assert verdict.metrics["reward/both/length"] == 2.5, "before its weight"


def test_g11_an_exception_ends_the_job_and_names_the_row(judge: MakeJudge) -> None:  # G11
    columns = FOUR | {"prompt": ["What is " + 500 * "x"] * 4}
    with pytest.raises(RuntimeError, match="reward/default/raises_on_bad: the function") as caught:
        judge({"default": mine("raises_on_bad")}).score(columns)
    text = str(caught.value)
    assert "response: 'bad'" in text and "prompt: 'What is xxx" in text and len(text) < 2000
    assert text.rstrip().endswith("ZeroDivisionError: one of four")


@pytest.mark.parametrize("timeout_s", [None, 20.0], ids=["in the rank", "in a process"])
@pytest.mark.parametrize(("policy", "score"), [("skip", math.nan), ("zero", 0.0)])
def test_g11_an_exception_is_no_score_or_zero(  # G11
    judge: MakeJudge,
    caplog: pytest.LogCaptureFixture,
    timeout_s: float | None,
    policy: Any,
    score: float,
) -> None:
    own = judge({"default": mine("raises_on_bad", on_error=policy, timeout_s=timeout_s)})
    for _ in range(2):
        verdict = own.score({name: values * 2 for name, values in FOUR.items()})
        assert verdict.scores == pytest.approx([score, 1, 0, 1] * 2, nan_ok=True)
    key = "reward/default/raises_on_bad"
    assert verdict.metrics[f"{key}/errors"] == 2 and verdict.metrics[f"{key}/no_score"] == 0
    mean = verdict.metrics[key]
    assert isinstance(mean, Mean)
    assert (mean, mean.count) == ((2 / 3, 6) if policy == "skip" else (0.5, 8))
    assert caplog.text.count("ZeroDivisionError: one of four") == 1, "the first alone is logged"


@pytest.mark.parametrize(("policy", "score"), [("skip", math.nan), ("zero", 0.0)])
def test_a_function_that_takes_too_long_is_no_score_or_zero(
    judge: MakeJudge, caplog: pytest.LogCaptureFixture, policy: Any, score: float
) -> None:
    own = judge({"default": mine("sleeps", timeout_s=1.0, on_timeout=policy)})
    verdict = own.score({"response": ["0.01", "30", "0.02"]})
    assert verdict.scores == pytest.approx([0.01, score, 0.02], nan_ok=True)
    assert verdict.metrics["reward/default/sleeps/timeouts"] == 1
    assert verdict.metrics["reward/default/sleeps/errors"] == 0
    assert "took more than 1.0 s" in caplog.text and "response: '30'" in caplog.text


def test_a_sum_with_a_part_that_gives_no_score_is_none(judge: MakeJudge) -> None:
    none = mine("always", settings={"value": None})
    verdict = judge({"default": [EXACT, none]}).score(FOUR)
    assert all(map(math.isnan, verdict.scores)) and verdict.parts["exact_match"] == [0, 1, 0, 1]
    assert verdict.metrics["reward/default/always/no_score"] == 4
    mean = verdict.metrics["reward/default/always"]
    assert isinstance(mean, Mean) and mean.count == 0


def test_math_and_texts_in_one_run_keep_their_order(judge: MakeJudge) -> None:
    rewards: Rewards = {"math": RewardArgs("math_rule"), "text": EXACT}
    columns = {
        "response": [r"\boxed{1/2}", r"\boxed{1/2}", "1/2", r"\boxed{1}", "0.5"],
        "ground_truth": ["0.5", "0.5", "1/2", "???", "1/2"],
        "domain": ["math", "text", "text", "math", "math"],
    }
    verdict = judge(rewards).score(columns)
    assert verdict.scores == pytest.approx([1, 0, 1, math.nan, 1], nan_ok=True)
    assert verdict.metrics["reward/math/math_rule/no_score"] == 1  # G06


def test_ground_truths_without_meaning_are_told(
    judge: MakeJudge, caplog: pytest.LogCaptureFixture
) -> None:  # G04
    columns = {
        "ground_truth": ["1", "???", "(1, 2)", "1", "(1, 2]", "any"],
        "domain": ["math"] * 5 + ["text"],
    }
    metrics = judge({"math": RewardArgs("math_rule"), "text": EXACT}).check_golds(columns)
    assert {key: float(value) for key, value in metrics.items()} == {
        "reward/math/math_rule/golds_without_meaning": 0.25,
        "reward/math/math_rule/golds_unequal": 0,
    }
    assert "25.0% of 4 distinct ground truths have no meaning: '???'" in caplog.text


def test_a_reward_that_looks_at_no_ground_truth_needs_none(judge: MakeJudge) -> None:
    own = judge({"default": mine("length")})
    assert own.check_golds({"response": ["a"]}) == {}
    assert own.score({"response": []}).scores == [] and own.score({"response": ["ab"]}).scores == [
        2
    ]


def test_a_missing_column_is_named_with_those_there_are(judge: MakeJudge) -> None:
    with pytest.raises(ValueError, match=r"needs columns \['ground_truth'\]; there are response"):
        judge({"default": mine("raises_on_bad")}).score({"response": ["a"]})


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (MINE + "length", {"shore": 2}, r"settings \['shore'\] do not fit .*length"),
        (MINE + "always", {}, "missing a required argument: 'value'|do not fit"),
        (MINE + "lenght", {}, "did you mean .*length"),
        ("no_such_module.f", {}, "no module no_such_module"),
    ],
)
def test_functions_and_settings_are_checked_before_the_first_row(
    judge: MakeJudge, name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        judge({"default": RewardArgs(name, settings)})


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), max_size=12), st.integers(0, 12)
)
def test_scores_do_not_depend_on_how_rows_are_cut(rows: list[tuple[str, int]], at: int) -> None:
    own = Judge({"a": [EXACT, mine("numpy_mean")], "b": EXACT}, 1, LOGGER)

    def score(part: list[tuple[str, int]]) -> Any:
        return own.score(
            {
                "response": [str(number) for _, number in part],
                "ground_truth": [1] * len(part),
                "domain": [tag for tag, _ in part],
            }
        )

    whole, parts = score(rows), [score(rows[:at]), score(rows[at:])]
    assert whole.scores == parts[0].scores + parts[1].scores
    merged = merge_metrics([part.metrics for part in parts])
    assert merged.keys() == whole.metrics.keys()
    for key, value in whole.metrics.items():
        assert merged[key] == pytest.approx(value, nan_ok=True) and type(merged[key]) is type(value)
        assert isinstance(value, Sum) == (key.count("/") == 3)


@needs_namespaces
def test_programs_choices_and_instructions_in_one_run(judge: MakeJudge) -> None:
    own = judge(
        {
            "code": RewardArgs("code", {"score": "share"}),
            "choice": RewardArgs("multiple_choice_options"),
            "rules": RewardArgs("instruction"),
        }
    )
    columns: dict[str, list[Any]] = {
        "domain": ["code", "choice", "rules", "code", "choice"],
        "response": ["```\ndef f(): return 1\n```", "B", "no comma", "none", "Rome"],
        "ground_truth": [["assert f() == 1", "assert f() == 2"], "Paris", None, [], "Berlin"],
        "options": [None, ["Rome", "Paris"], None, None, ["Rome", "Paris"]],
        "instruction_id_list": [None, None, ["punctuation:no_comma"], None, None],
        "kwargs": [None, None, [{}], None, None],
    }
    verdict = own.score(columns)
    assert verdict.scores == pytest.approx([0.5, 1, 1, math.nan, math.nan], nan_ok=True)
    assert verdict.metrics["reward/choice/multiple_choice_options/no_score"] == 1
    metrics = own.check_golds(columns)
    assert {key: float(value) for key, value in metrics.items() if "without" in key} == {
        "reward/code/code/golds_without_meaning": 0.5,
        "reward/choice/multiple_choice_options/golds_without_meaning": 0.5,
        "reward/rules/instruction/golds_without_meaning": 0,
    }


def test_an_unknown_instruction_is_told_before_it_is_judged(judge: MakeJudge) -> None:
    own = judge({"default": RewardArgs("instruction")})
    columns = {"instruction_id_list": [["punctuation:no_coma"]], "kwargs": [[{}]]}
    with pytest.raises(RuntimeError, match="instruction 'punctuation:no_coma' is none of"):
        own.check_golds(columns)


def test_limits_alone_are_told_at_the_start_once(
    judge: MakeJudge, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = "roll_td.rewards.unit_tests.run_tests"
    monkeypatch.setattr(started, lambda *_: Ran(0, passed=(True,)))
    settings = {"limits": {"isolation": "limits"}}
    judge({"a": RewardArgs("code", settings), "b": RewardArgs("code", settings)})
    assert caplog.text.count("reward code: answers run with limits alone") == 1
