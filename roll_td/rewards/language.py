"""Which language a text is in. The one importer of langdetect."""

from __future__ import annotations


def language_of(text: str) -> str | None:
    """The code of the likeliest language as langdetect has it (ISO 639-1; zh-cn, zh-tw), the same
    each time; None of a text without letters. ImportError if langdetect is not installed."""
    try:
        from langdetect import (  # type: ignore[import-untyped]
            DetectorFactory,
            LangDetectException,
            detect,
        )
    except ImportError as error:
        fix = "pip install 'roll-td[language]', or take its rows out"
        raise ImportError(
            f"response_language needs langdetect, which is not here; {fix}"
        ) from error
    DetectorFactory.seed = 0  # else it draws at random
    try:
        return str(detect(text))
    except LangDetectException:
        return None
