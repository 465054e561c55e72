"""Whether a response keeps constraints that can be verified: the 25 kinds of IFEval (Zhou et al.
2023, arXiv:2311.07911, table 1), strictly, on the response as it is.

Each constraint is a function of the response and its own arguments, which have the names that the
public data set gives them.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll_td.rewards.language import language_of

RELATIONS = ("less than", "at least")
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""Of constrained_response."""

_KINDS: dict[str, Any] = {"int": (int, float), "str": str, "Sequence[str]": (list, tuple)}
"""Annotation of an argument → what it may be; a table makes floats of whole numbers."""
_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"[.!?]+[\"'\u201d\u2019)\]]*(?=\s|$)")
_NO_END = re.compile(
    r"(?:^|[\s(])(?:Mr|Mrs|Ms|Dr|St|Prof|Capt|Lt|Inc|Ltd|Jr|Sr|Co|vs|etc|e\.g|i\.e|[A-Z])\.$"
)
"""A text that ends like this has no end of a sentence there, unless it is the text's end."""


def _holds(count: int, relation: str, wanted: int) -> bool:
    if relation not in RELATIONS:
        raise ValueError(f"relation {relation!r}: want one of {', '.join(RELATIONS)}")
    return count < wanted if relation == "less than" else count >= wanted


def existence(response: str, *, keywords: Sequence[str]) -> bool:
    """All keywords are in it, whatever their case."""
    return all(re.search(re.escape(word), response, re.IGNORECASE) for word in keywords)


def frequency(response: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """So often a keyword is in it, whatever its case."""
    found = re.findall(re.escape(keyword.strip()), response, re.IGNORECASE)
    return _holds(len(found), relation, frequency)


def forbidden_words(response: str, *, forbidden_words: Sequence[str]) -> bool:
    """None of them is in it as a whole word, whatever its case."""
    return not any(
        re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words
    )


def letter_frequency(response: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """So often a letter is in it, whatever its case."""
    return _holds(response.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(response: str, *, language: str) -> bool:
    """It is in a language, by its ISO 639-1 code."""
    return language_of(response) == language


def number_sentences(response: str, *, num_sentences: int, relation: str) -> bool:
    """So many sentences: a sentence ends with one or more of . ! ? before space or the end, not
    with an initial or one of a few abbreviations; what follows the last end is one, too."""
    count, begin = 0, 0
    for end in _SENTENCE_END.finditer(response):
        if _WORD.search(response, begin, end.end()) and not (
            response[end.end() :].strip() and _NO_END.search(response[begin : end.end()])
        ):
            count, begin = count + 1, end.end()
    return _holds(count + bool(_WORD.search(response, begin)), relation, num_sentences)


def number_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """Exactly so many paragraphs, with *** between them."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", response)]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def number_words(response: str, *, num_words: int, relation: str) -> bool:
    """So many words."""
    return _holds(len(_WORD.findall(response)), relation, num_words)


def nth_paragraph_first_word(
    response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Exactly so many paragraphs, with an empty line between them, of which the n-th, from 1,
    begins with a word, whatever its case."""
    if nth_paragraph < 1:
        raise ValueError(f"nth_paragraph {nth_paragraph}: want one from 1 on")
    parts = re.split(r"\n\n", response)
    if sum(1 for part in parts if part.strip()) != num_paragraphs or nth_paragraph > len(parts):
        return False
    words = parts[int(nth_paragraph) - 1].split()
    first = re.match(r"[^.,?!'\"]*", words[0].lstrip("'\"")) if words else None
    return first is not None and first[0].lower() == first_word.lower()


def number_placeholders(response: str, *, num_placeholders: int) -> bool:
    """At least so many placeholders in square brackets."""
    return len(re.findall(r"\[.*?\]", response)) >= num_placeholders


def postscript(response: str, *, postscript_marker: str) -> bool:
    """There is a postscript, begun by a marker; P.S. and P.P.S match with space in them, too."""
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    marker = known.get(postscript_marker.strip(), re.escape(postscript_marker.strip()))
    return re.search(rf"\s*{marker}.*$", response, re.IGNORECASE | re.MULTILINE) is not None


def number_bullet_lists(response: str, *, num_bullets: int) -> bool:
    """Exactly so many bullets: lines that begin with * or -."""
    stars = re.findall(r"^\s*\*[^*].*$", response, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", response, re.MULTILINE)) == num_bullets


def constrained_response(response: str) -> bool:
    """One of ANSWERS is in it."""
    return any(answer in response for answer in ANSWERS)


def number_highlighted_sections(response: str, *, num_highlights: int) -> bool:
    """At least so many parts in *one* or **two** stars."""
    single = re.findall(r"\*[^\n*]*\*", response)
    double = re.findall(r"\*\*[^\n*]*\*\*", response)
    return sum(bool(part.strip("*").strip()) for part in single + double) >= num_highlights


def multiple_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections, each begun by a word and a number: Section 1."""
    marks = re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", response)
    return len(marks) >= num_sections


def json_format(response: str) -> bool:
    """All of it is JSON, in a fenced block or not."""
    text = response.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except ValueError:
        return False
    return True


def title(response: str) -> bool:
    """There is a title in <<double angular brackets>>."""
    titles = re.findall(r"<<[^\n]+>>", response)
    return any(found.lstrip("<").rstrip(">").strip() for found in titles)


def two_responses(response: str) -> bool:
    """Two different responses with ****** between them."""
    parts = response.split("******")
    inner = [part.strip() for part in parts[1:-1]]
    whole = [part.strip() for part in parts if part.strip()]
    return all(inner) and len(whole) == 2 and whole[0] != whole[1]


def repeat_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    """It begins with the prompt, whatever the case."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(response: str, *, end_phrase: str) -> bool:
    """It ends with a phrase, whatever the case; quotation marks around it do not count."""
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(response: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """So many words in capital letters; hyphens and apostrophes are part of a word."""
    words = re.findall(r"\w+(?:['\u2019-]\w+)*", response)
    return _holds(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def english_capital(response: str) -> bool:
    """All letters are capitals. Not whether it is English, which says little of capitals."""
    return response.isupper()


def english_lowercase(response: str) -> bool:
    """No letter is a capital. Not whether it is English."""
    return response.islower()


def no_comma(response: str) -> bool:
    """There is no comma."""
    return "," not in response


def quotation(response: str) -> bool:
    """All of it is in double quotation marks."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CONSTRAINTS: dict[str, Callable[..., bool]] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
"""By the data set's name."""


def instruction(
    response: str, instruction_id_list: Sequence[str], kwargs: Sequence[Any], *, score: str
) -> float | None:
    """1 if the response keeps all its constraints, else 0; with score "share" the share that it
    keeps. None without constraints.

    instruction_id_list: names of CONSTRAINTS. kwargs: the arguments of each, in that order, a
    mapping in which None is nothing; or JSON text of the list. An empty response keeps none.
    ValueError for an unknown name, or for arguments that are not those of the constraint.
    """
    asked = _asked(instruction_id_list, kwargs)
    if not asked:
        return None
    said = bool(response.strip())
    kept = sum(said and function(response, **own) for function, own in asked)
    return kept / len(asked) if score == "share" else float(kept == len(asked))


def constraints_have_meaning(
    instruction_id_list: Sequence[str], kwargs: Sequence[Any], *, score: str
) -> float | None:
    """1 if there are constraints, else None. ValueError as `instruction`; ImportError if one needs
    what isn't installed."""
    asked = _asked(instruction_id_list, kwargs)
    for function, own in asked:
        function("This is a text.", **own)
    return 1.0 if asked else None


def _asked(
    names: Sequence[str], kwargs: Sequence[Any] | str
) -> list[tuple[Callable[..., bool], dict[str, Any]]]:
    given = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
    if any(isinstance(one, str) or not isinstance(one, Sequence) for one in (names, given)):
        told = f"instruction_id_list is {names!r:.80} and kwargs {given!r:.80}"
        raise ValueError(f"{told}: want two lists, or for kwargs JSON text of one")
    if len(names) != len(given):
        raise ValueError(f"{len(names)} names and {len(given)} kwargs: want one of each")
    asked = []
    for name, own in zip(names, given, strict=True):
        if name not in CONSTRAINTS:
            known = ", ".join(CONSTRAINTS)
            raise ValueError(f"instruction {name!r} is none of {known}; take its rows out")
        function = CONSTRAINTS[name]
        values = own if isinstance(own, Mapping) else {}
        arguments = {key: value for key, value in values.items() if value is not None}
        parameters = inspect.signature(function).parameters
        wanted = set(parameters) - {"response"}
        if arguments.keys() != wanted:
            raise ValueError(
                f"instruction {name!r} takes {sorted(wanted)}, not {sorted(arguments)}"
            )
        for key, value in arguments.items():
            kind = parameters[key].annotation
            if not isinstance(value, _KINDS[kind]):
                raise ValueError(f"instruction {name!r} has {key}={value!r:.40}: want {kind}")
        asked.append((function, arguments))
    return asked
