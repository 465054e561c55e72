"""A model at an endpoint as a judge."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from roll_td.config.rewards import RewardArgs, Rewards
from roll_td.rewards.judge import Judge

Answer = Callable[[dict[str, Any]], tuple[int, str]]
"""A request's body → status, and body of the reply."""


class Server(ThreadingHTTPServer):
    """An endpoint that answers as it is told."""

    daemon_threads = True
    answer: Answer
    url: str

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.asked = answer, []  # type: ignore[method-assign]
        self.keys: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/chat/completions"
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    asked: list[dict[str, Any]]

    def handle_error(self, *_: object) -> None:
        """Who asked has given up."""


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        status, text = self.server.answer(body)
        with self.server.lock:
            self.server.at_once -= 1
        if status:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    with Server(answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def reply(text: object) -> tuple[int, str]:
    return 200, json.dumps({"choices": [{"message": {"content": text}}]})


def question(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"])


def judge(url: str, on_error: Any = "fail", **settings: Any) -> Judge:
    given = {"template": "{ground_truth}?{response}", "backoff_s": 0.01, "wait_s": 5.0, **settings}
    args = RewardArgs("llm_judge", {"url": url, "model": "m", **given}, on_error=on_error)
    return Judge({"default": args}, 1, logging.getLogger("reward.0"))


def columns(*responses: str) -> dict[str, list[Any]]:
    return {"response": list(responses), "ground_truth": ["g"] * len(responses)}


def test_the_score_is_the_last_match_on_the_scale() -> None:
    replies = {"g?a": "Score: 9? No. Score: 5", "g?b": "score:10", "g?c": "Score: -0.0"}
    with serving(lambda body: reply(replies[question(body)])) as server:
        verdict = judge(server.url, temperature=0.5, max_tokens=7).score(columns("a", "b", "c"))
        assert verdict.scores == [0.5, 1, 0]
        asked = server.asked[0]
        assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("m", 0.5, 7)
        own = judge(server.url, pattern=r"(\d+)$", lowest=5, highest=15)
        assert own.score(columns("a", "b")).scores == [0, 0.5]


def test_each_domain_has_a_template_of_its_own() -> None:
    with serving(lambda body: reply(f"Score: {len(question(body))}")) as server:
        given = {"url": server.url, "model": "m"}
        rewards: Rewards = {
            "long": RewardArgs("llm_judge", given | {"template": "{response}{ground_truth}"}),
            "short": RewardArgs("llm_judge", given | {"template": "{response}"}),
        }
        made = Judge(rewards, 1, logging.getLogger("reward.0"))
        rows = columns("ab", "abc") | {"domain": ["long", "short"]}
        assert made.score(rows).scores == [0.3, 0.3]


def test_braces_in_a_response_are_no_names() -> None:
    with serving(lambda body: reply("Score: 1" if "{x}" in question(body) else "")) as server:
        made = judge(server.url, template="{{}} {response}")
        assert made.score({"response": ["{x}"]}).scores == [0.1]
        assert question(server.asked[0]) == "{} {x}"


def test_what_fails_for_a_moment_is_asked_again() -> None:
    failing = [(503, "busy"), (429, ""), (200, "no JSON"), (0, ""), (200, "{}"), reply(None)]

    def answer(body: dict[str, Any]) -> tuple[int, str]:
        return failing.pop(0) if failing else reply("Score: 4")

    with serving(answer) as server:
        made = judge(server.url, attempts=7)
        assert made.score(columns("a")).scores == [0.4]
        assert len(server.asked) == 7


@pytest.mark.parametrize(
    ("answered", "attempts", "message"),
    [
        ((500, "out of order"), 3, "has not answered in 3 attempts: status 500: out of order"),
        ((404, "no such model"), 1, "in 1 attempts: status 404: no such model"),
        (reply("eight of ten"), 1, "no score in the reply 'eight of ten'"),
        (reply("Score: 11"), 1, "score 11.0 does not lie in 0.0 to 10.0"),
    ],
)
def test_what_keeps_failing_is_what_on_error_says(
    answered: tuple[int, str], attempts: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, str]:
        return answered if question(body) == "g?bad" else reply("Score: 10")

    rows = columns("good", "bad", "good")
    with serving(answer) as server:
        skipped = judge(server.url, "skip", attempts=3).score(rows)
        assert skipped.scores == pytest.approx([1, math.nan, 1], nan_ok=True)
        assert skipped.metrics["reward/default/llm_judge/errors"] == 1
        assert len(server.asked) == 2 + attempts
        assert message in caplog.text
        assert judge(server.url, "zero", attempts=3).score(rows).scores == [1, 0, 1]
        with pytest.raises(RuntimeError, match=message):
            judge(server.url, attempts=3).score(rows)


def test_an_endpoint_that_is_down_or_silent() -> None:
    with serving(lambda body: (time.sleep(2), reply("Score: 1"))[1]) as server:
        began = time.monotonic()
        silent = judge(server.url, "skip", attempts=2, wait_s=0.2).score(columns("a"))
        assert math.isnan(silent.scores[0]) and time.monotonic() - began < 1.5
    down = judge(server.url, attempts=2)
    with pytest.raises(RuntimeError, match=r"in 2 attempts: URLError: .*refused"):
        down.score(columns("a"))


def test_questions_are_asked_at_the_same_time() -> None:
    with serving(lambda body: (time.sleep(0.2), reply("Score: 1"))[1]) as server:
        began = time.monotonic()
        scores = judge(server.url, concurrency=5).score(columns(*"abcdefghij")).scores
        assert scores == [0.1] * 10 and server.most_at_once == 5
        assert time.monotonic() - began < 1.5


def test_the_key_comes_from_the_environment_and_is_not_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "S3CRET")
    with serving(lambda body: (403, "S3CRET is no key")) as server:
        made = judge(server.url, "skip", api_key_env="JUDGE_KEY")
        assert math.isnan(made.score(columns("a")).scores[0])
        assert server.keys == ["Bearer S3CRET"]
        assert "*** is no key" in caplog.text and "S3CRET" not in caplog.text
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ValueError, match="api_key_env='JUDGE_KEY': there is no such environment"):
        judge(server.url, api_key_env="JUDGE_KEY")
