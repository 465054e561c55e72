"""The 25 constraints of IFEval, each kept and broken."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from roll_td.rewards.instruction import CONSTRAINTS, constraints_have_meaning, instruction

K, L, C, F = "keywords:", "length_constraints:", "change_case:", "detectable_format:"
THREE = {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "Then"}
BULLETS = {"num_bullets": 2}
AT_LEAST_2 = {"num_sentences": 2, "relation": "at least"}
GERMAN = "Das ist ein deutscher Satz, der nicht schwer zu erkennen ist."
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (K + "existence", {"keywords": ["sea", "sand"]}, ["Sand by the SEA"], ["the sea"]),
    (
        K + "frequency",
        {"keyword": "sea", "frequency": 2, "relation": "at least"},
        ["Sea and sea"],
        ["sea", ""],
    ),
    (
        K + "frequency",
        {"keyword": "sea", "frequency": 2, "relation": "less than"},
        ["sea"],
        ["sea sea"],
    ),
    (K + "forbidden_words", {"forbidden_words": ["sea"]}, ["seaside"], ["The Sea."]),
    (
        K + "letter_frequency",
        {"letter": "e", "let_frequency": 3, "let_relation": "at least"},
        ["Eee"],
        ["ee"],
    ),
    ("language:response_language", {"language": "de"}, [GERMAN], ["This is English.", "12"]),
    (
        L + "number_sentences",
        AT_LEAST_2,
        ["One. Two!", "One? Two", 'He said "go." Then he went.'],
        ["One, two.", "Dr. Who", "It is 3.5 m", "... !"],
    ),
    (
        L + "number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na *** b\n***"],
        ["a\n\nb", "a *** *** b", "a***b***c"],
    ),
    (L + "number_words", {"num_words": 3, "relation": "less than"}, ["a, b"], ["a b c"]),
    (
        L + "nth_paragraph_first_word",
        THREE,
        ["a\n\nthen, b\n\nc", 'a\n\n"Then" b\n\nc'],
        ["a\n\nb\n\nc", "a\n\nThen b", "a\n\nthenceforth\n\nc", "Then\n\nb\n\nc"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] in [city]"],
        ["[name]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye\nP. S. more", "p.s. x"],
        ["Bye", "PS more"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["x P.P.S y"],
        ["P.S. y"],
    ),
    (
        F + "number_bullet_lists",
        BULLETS,
        ["* a\n* b", "- a\n * b"],
        ["* a", "* a\n* b\n* c", "**a**\n* b"],
    ),
    (F + "constrained_response", {}, ["My answer is maybe."], ["Maybe."]),
    (
        F + "number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b*", "*a* **b**"],
        ["*a*", "* * **  **"],
    ),
    (
        F + "multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb"],
        ["Section 1\na\nSection two"],
    ),
    (F + "json_format", {}, ['{"a": 1}', '```json\n{"a": [1]}\n```'], ["{a: 1}", '{"a": 1} ok']),
    (F + "title", {}, ["<<A title>>\ntext"], ["<< >>", "<A title>"]),
    (
        "combination:two_responses",
        {},
        ["a\n******\nb", "a******b******"],
        ["a", "a******a", "a******b******c", "a****** ******b"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Why so?"},
        ["why so? Because"],
        ["Because. Why so?"],
    ),
    ("startend:end_checker", {"end_phrase": "Is it?"}, ['"Well, is it?"'], ["Is it? Yes"]),
    ("startend:quotation", {}, ['"all of it"'], ['"part" of it', '"']),
    (
        C + "capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["A BIG-END thing"],
        ["BIG thing"],
    ),
    (C + "english_capital", {}, ["ALL OF IT 3"], ["ALL BUT thIS", "3"]),
    (C + "english_lowercase", {}, ["all of it"], ["all but This"]),
    ("punctuation:no_comma", {}, ["none here; none"], ["one, here"]),
]


@pytest.mark.parametrize(("name", "arguments", "kept", "broken"), CASES)
def test_a_constraint_is_kept_or_broken(
    name: str, arguments: dict[str, Any], kept: list[str], broken: list[str]
) -> None:
    padded = arguments | {"unused": None}  # as tables have it, where every row has every argument
    for response in kept:
        assert instruction(response, [name], [padded], score="all") == 1, response
    for response in broken:
        assert instruction(response, [name], [padded], score="all") == 0, response
    assert constraints_have_meaning([name], [arguments], score="all") == 1


def test_all_25_have_cases() -> None:
    assert len(CONSTRAINTS) == 25 and {case[0] for case in CASES} == CONSTRAINTS.keys()


def test_all_or_the_share_that_is_kept() -> None:
    names = ["punctuation:no_comma", C + "english_lowercase"]
    both: tuple[list[str], Any] = (names, [{}, None])
    assert instruction("a b", *both, score="all") == 1
    assert instruction("a, b", *both, score="all") == 0
    assert instruction("a, b", *both, score="share") == 0.5
    assert instruction(" ", *both, score="share") == 0, "an empty response keeps nothing"
    assert instruction("a", [], [], score="all") is None
    assert constraints_have_meaning([], [], score="all") is None
    text = json.dumps([{}, {}])
    assert instruction("a b", names, text, score="all") == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "kwargs", "message"),
    [
        (["punctuation:no_coma"], [{}], "'punctuation:no_coma' is none of keywords:existence"),
        (["punctuation:no_comma"], [{"n": 1}], r"takes \[\], not \['n'\]"),
        ([K + "existence"], [{"keywords": None}], r"takes \['keywords'\], not \[\]"),
        (["punctuation:no_comma"], [], "1 names and 0 kwargs"),
        (None, None, "instruction_id_list is None and kwargs None: want two lists"),
        ("punctuation:no_comma", [{}], "want two lists"),
        ([K + "existence"], [{"keywords": "abc"}], r"keywords='abc': want Sequence\[str\]"),
        ([L + "number_words"], [{"num_words": "3", "relation": "at least"}], "num_words='3': want"),
        (
            [L + "nth_paragraph_first_word"],
            [{"num_paragraphs": 1, "nth_paragraph": -2, "first_word": "a"}],
            "nth_paragraph -2: want one from 1 on",
        ),
        (
            [L + "number_words"],
            [{"num_words": 3, "relation": "at most"}],
            "relation 'at most': want one of less than, at least",
        ),
    ],
)
def test_what_is_not_known_is_an_error_before_and_while_it_is_judged(
    names: list[str], kwargs: list[Any], message: str
) -> None:
    for judge in (
        lambda: instruction("a", names, kwargs, score="all"),
        lambda: constraints_have_meaning(names, kwargs, score="all"),
    ):
        with pytest.raises(ValueError, match=message):
            judge()


def test_a_language_without_its_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ImportError, match=r"pip install 'roll-td\[language\]'"):
        constraints_have_meaning(["language:response_language"], [{"language": "de"}], score="all")
