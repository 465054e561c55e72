"""Settings of the rewards by name. No torch here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from string import Formatter
from typing import Literal

from roll_td.config.function_settings import require
from roll_td.config.schema import ConfigError, Problem

REPLY = "judge_reply"
"""Column with the text that a role of this job has replied as a judge; None where it was not
asked."""


@dataclass
class MathRuleSettings:
    """Equal as mathematics."""

    gold_after: str | None = None
    """The ground truth is the text after the last of these, if it has one: '####' for GSM8K. None:
    all of it."""

    def __post_init__(self) -> None:
        require(self, gold_after=(self.gold_after != "", "must not be empty"))


@dataclass
class ExactMatchSettings:
    """Equal as text."""

    after: str | None = None
    """What counts is the text after the last of these; without one a response gets 0, and a ground
    truth is taken whole. None: all of it. Space around it never counts."""
    part: Literal["text", "last_integer"] = "text"
    """What of that is compared: all, or the last whole number in it."""

    def __post_init__(self) -> None:
        require(self, after=(self.after != "", "must not be empty"))


@dataclass
class FormatSettings:
    """The shape of a response."""

    pattern: str
    """Regular expression that the whole response has to match, space around it left out; a dot
    matches line ends too."""

    def __post_init__(self) -> None:
        require(self, pattern=_pattern_rule(self.pattern, groups=0))


@dataclass
class SandboxLimits:
    """What a program may take, and what it is kept from."""

    isolation: Literal["namespaces", "limits"] = "namespaces"
    """namespaces: a file system of its own, no network, no other process; where the kernel doesn't
    permit them the job doesn't start. limits: only what follows; such a program can use the files
    of its user, and the network."""
    time_s: float = 5.0
    """Seconds of one run of a program, on the clock and of CPU."""
    total_s: float = 30.0
    """Seconds of all runs for a response; those that don't begin have not passed."""
    memory_mb: int = 1024
    """Address space of each process of a program."""
    box_mb: int = 64
    """With namespaces: the folder in memory that it may write to."""
    file_mb: int = 16
    """Its largest file; what it prints is one."""
    processes: int = 32
    """Its processes and threads at the same time."""
    files: int = 64
    """Open files of each of its processes."""

    def __post_init__(self) -> None:
        sizes = ("memory_mb", "box_mb", "file_mb", "processes", "files")
        require(self, **{name: (getattr(self, name) >= 1, "must be at least 1") for name in sizes})
        times = {name: getattr(self, name) for name in ("time_s", "total_s")}
        rule = "must be a finite number above 0"
        require(self, **{name: (0 < it < math.inf, rule) for name, it in times.items()})


@dataclass
class CodeSettings:
    """Programs, and tests that they are to pass."""

    part: Literal["last_block", "text"] = "last_block"
    """What of a response is run: its last fenced block, or all of it."""
    score: Literal["all", "share"] = "all"
    """all: 1 for a program that passes every test, else 0; share: the share that it passes."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """What it runs in."""


@dataclass
class InstructionSettings:
    """Constraints that a response keeps."""

    score: Literal["all", "share"] = "all"
    """all: 1 for a response that keeps every one, else 0; share: the share that it keeps."""


@dataclass
class ChoiceSettings:
    """One of several options, by letter."""

    letters: int = 4
    """Options that there are, from A on."""

    def __post_init__(self) -> None:
        require(self, letters=(2 <= self.letters <= 26, "must lie in 2 to 26"))


@dataclass
class JudgeSettings:
    """A model says what a response is worth: at an endpoint as OpenAI's, or in a role of this
    job."""

    template: str
    """What it is asked. {response}, {ground_truth} and other columns in braces stand for the row's;
    {{ and }} for braces."""
    url: str | None = None
    """Of the endpoint's chat completions: http://host:8000/v1/chat/completions."""
    model: str | None = None
    """The model's name at the endpoint."""
    role: str | None = None
    """Instead of url: one of `judges`, whose generation says how it answers."""
    pattern: str = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score; its last match in the reply counts."""
    lowest: float = 0.0
    """The score that becomes 0; a lower one is an error."""
    highest: float = 10.0
    """The score that becomes 1; a higher one is an error."""
    attempts: int = 4
    """How often a question is asked at most. An endpoint is asked again after a lost connection, no
    answer in time, or status 408, 429 or 5xx; a role, unless its temperature is 0, after a reply
    without a score, with other random numbers. Then it is an error, with what on_error says."""
    temperature: float = 0.0
    """Of the endpoint's model."""
    max_tokens: int = 512
    """Most tokens of a reply of the endpoint."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoint's key; it is neither logged nor saved. None: no
    key."""
    concurrency: int = 16
    """Questions to the endpoint at the same time by each worker of the role `reward`."""
    backoff_s: float = 1.0
    """Seconds before the second attempt at the endpoint; before each further one twice as many."""
    wait_s: float = 60.0
    """Seconds without an answer of the endpoint after which an attempt is given up."""

    def __post_init__(self) -> None:
        problems = self._whom_problems()
        rules = {
            "template": _template_rule(self.template),
            "pattern": _pattern_rule(self.pattern, groups=1),
            "highest": (self.lowest < self.highest, f"must be above lowest={self.lowest}"),
            "concurrency": (self.concurrency >= 1, "must be at least 1"),
            "attempts": (self.attempts >= 1, "must be at least 1"),
            "max_tokens": (self.max_tokens >= 1, "must be at least 1"),
            "backoff_s": (0 <= self.backoff_s < math.inf, "must be a finite number of at least 0"),
            "wait_s": (0 < self.wait_s < math.inf, "must be a finite number above 0"),
        }
        try:
            require(self, **rules)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)

    def _whom_problems(self) -> list[Problem]:
        """Of who is asked: an endpoint, or a role."""
        if self.role is not None:
            own = {f.name: f.default for f in fields(self) if f.name in OF_ENDPOINT}
            given = {name: getattr(self, name) for name in own}
            rule, fix = f"is of an endpoint, and role={self.role!r} is asked", "drop one of the two"
            return [Problem(n, repr(v), rule, fix) for n, v in given.items() if v != own[n]]
        if self.url is None:
            fix = "set url and model of an endpoint, or role, one of judges"
            return [Problem("url", "", "is missing: nobody is asked", fix)]
        problems = []
        if not self.url.startswith(("http://", "https://")):
            problems.append(Problem("url", repr(self.url), "must begin with http(s)://", ""))
        if self.model is None:
            problems.append(Problem("model", "", "is missing", "set its name at the endpoint"))
        return problems

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the template names, in the order of their first places; and what a role
        has replied."""
        return fields_of(self.template) + (() if self.role is None else (REPLY,))


OF_ENDPOINT = (
    "url", "model", "temperature", "max_tokens", "api_key_env", "concurrency", "backoff_s",
    "wait_s",
)  # fmt: skip
"""Settings of llm_judge that a role has no use for."""


def fields_of(template: str) -> tuple[str, ...]:
    """The names in braces of a template for str.format, each once. ValueError if it is none."""
    names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    return tuple(dict.fromkeys(names))


def _template_rule(template: str) -> tuple[bool, str]:
    try:
        names = fields_of(template)
    except ValueError as error:
        return False, f"is no template: {error}; write single braces twice"
    if bad := [name for name in names if not name.isidentifier()]:
        return False, f"has {bad[0]!r} in braces, which names no column"
    return "response" in names, "must have {response} in it"


def _pattern_rule(pattern: str, groups: int) -> tuple[bool, str]:
    try:
        found = re.compile(pattern).groups
    except re.error as error:
        return False, f"is no regular expression: {error}"
    return found >= groups, f"must have {groups} group in parentheses"
