"""What a model says a response is worth: at an endpoint as OpenAI's, or in a role of this job."""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from roll_td.config.reward_settings import fields_of

AGAIN = frozenset({408, 429, *range(500, 600)})
"""Statuses after which a question is asked again."""
SHOWN_CHARACTERS = 300
"""Of a reply, in an error."""


def llm_judge(
    *values: object,
    template: str,
    url: str | None,
    model: str | None,
    role: str | None,
    pattern: str,
    lowest: float,
    highest: float,
    attempts: int,
    temperature: float,
    max_tokens: int,
    api_key_env: str | None,
    concurrency: int,
    backoff_s: float,
    wait_s: float,
) -> float:
    """The score in the model's reply, as a share of the way from lowest to highest.

    values: of the columns that the template names, in the order of their first places there; with a
    role, which the pipeline has asked, then its reply. ValueError where the reply has no score or
    one that is out of bounds, or where a role was not asked; OSError after the last attempt, or at
    once for a status that will not pass; `concurrency` is for the caller. A response may try to
    tell the judge what to say: the template should say what is quoted.
    """
    if role is not None:
        if not isinstance(values[-1], str):
            raise ValueError(f"the role {role} could not be asked, as the log says")
        return score_in(values[-1], pattern=pattern, lowest=lowest, highest=highest)
    assert url is not None, "the config asks for one of the two"
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": question(template, values)}],
        "temperature": temperature,
        "max_tokens": max_tokens,
    }
    headers = {"Content-Type": "application/json"}
    if api_key_env is not None:
        headers["Authorization"] = f"Bearer {os.environ[api_key_env]}"
    request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
    reply = _ask(request, attempts, backoff_s, wait_s)
    return score_in(reply, pattern=pattern, lowest=lowest, highest=highest)


def question(template: str, values: Sequence[object]) -> str:
    """What a judge is asked: the template with the values of the columns that it names, in the
    order of their first places there."""
    return template.format(**dict(zip(fields_of(template), values, strict=True)))


def score_in(reply: str, *, pattern: str, lowest: float, highest: float) -> float:
    """The first group of the last match of the pattern, as a share of the way from lowest to
    highest. ValueError where there is none, or one that is out of bounds."""
    found = [match[1] for match in re.finditer(pattern, reply)]
    if not found:
        raise ValueError(f"no score in the reply {reply[-SHOWN_CHARACTERS:]!r}; want {pattern}")
    score = float(found[-1])
    if not lowest <= score <= highest:
        raise ValueError(f"the reply's score {score} does not lie in {lowest} to {highest}")
    return (score - lowest) / (highest - lowest)


def check_key(*, api_key_env: str | None, **_: Any) -> None:
    """ValueError if the environment variable of the key is not set."""
    if api_key_env is not None and not os.environ.get(api_key_env):
        raise ValueError(
            f"api_key_env={api_key_env!r}: there is no such environment variable where rewards "
            "run; set it for all ranks, or leave api_key_env out"
        )


def _ask(request: urllib.request.Request, attempts: int, backoff_s: float, wait_s: float) -> str:
    """What the model replies."""
    told = ""
    for attempt in range(attempts):
        if attempt:
            time.sleep(backoff_s * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(request, timeout=wait_s) as answer:
                reply = json.load(answer)["choices"][0]["message"]["content"]
            if isinstance(reply, str):
                return reply
            told = f"the reply is {reply!r:.80} and no text"
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(SHOWN_CHARACTERS).decode("utf-8", "replace")
            told = f"status {error.code}: {said}"
            if error.code not in AGAIN:
                break
        except (OSError, http.client.HTTPException) as error:  # no connection, no answer in time
            told = f"{type(error).__name__}: {error}"
        except (ValueError, LookupError, TypeError) as error:
            told = f"the answer is no chat completion: {type(error).__name__}: {error}"
    key = request.get_header("Authorization", "").removeprefix("Bearer ")
    told = told.replace(key, "***") if key else told
    raise OSError(f"{request.full_url} has not answered in {attempt + 1} attempts: {told}")
