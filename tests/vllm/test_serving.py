"""Answers that come and go one by one, also over new weights."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roll_td.config.model import GenerationConfig
from roll_td.config.strategies import StrategyArgs
from roll_td.models import full_weights, load_tokenizer
from roll_td.strategies.engine import Answer, Failure
from roll_td.strategies.generation import as_sampled
from roll_td.strategies.hf import HfInfer
from roll_td.strategies.parts import Part
from roll_td.strategies.vllm import serving
from roll_td.strategies.vllm.strategy import VllmInfer
from tests.unit.strategies.test_hf_engine import collect
from tests.vllm.conftest import FIELDS, NEEDS_VLLM, context, strong
from tests.vllm.test_generate import LENGTHS, check_greedy, logits_after, prompts, responses

pytestmark = NEEDS_VLLM
N, SEED = 24, 5
"""More answers than the engine has at work at once, so that some are under way for long."""
GENERATION = GenerationConfig(max_new_tokens=80, num_return_sequences=N)


def asked() -> list[Answer]:
    rows = prompts()["input_ids"].tolist()
    given = [row[:length] for row, length in zip(rows, LENGTHS, strict=True)]
    return [
        Answer(sample_id=row * N + j, prompt=given[row])
        for row in range(len(given))
        for j in range(N)
    ]


def update(engine: VllmInfer, model: Any, version: int) -> None:
    engine.update_parameter_in_bucket(
        [Part(name, tuple(w.shape), 0, w.reshape(-1)) for name, w in full_weights(model)]
    )
    engine.process_weights_after_loading(version)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("abort", [False, True])
def test_they_are_those_of_generate_and_go_on_under_new_weights(
    one: VllmInfer, abort: bool
) -> None:
    old, new = strong(one.context.model, 42), strong(one.context.model, 43)
    update(one, old, 1)
    want = responses(one.generate(prompts(), GENERATION, SEED))
    engine = one.open_engine(GENERATION, SEED)
    came = engine.ended()
    engine.submit(asked())
    for answer in collect(came, N * len(LENGTHS)):
        tokens, log_probs = want[answer.sample_id]
        assert answer.tokens == tokens and answer.versions == [1] * len(tokens)
        torch.testing.assert_close(torch.tensor(answer.log_probs), log_probs, atol=1e-4, rtol=0)

    engine.submit(asked())
    with pytest.raises(RuntimeError, match="new weights come while the engine is at work"):
        update(one, new, 2)
    while not engine._call("progress"):
        assert engine._flying, "all have ended already"
    engine.pause(abort=abort, timeout_s=60)
    ended = collect(came, N * len(LENGTHS)) if abort else []
    given_up = [answer for answer in ended if answer.finish_reason == "abort"]
    ended = [answer for answer in ended if answer.finish_reason != "abort"]
    assert not abort or any(answer.tokens for answer in given_up)
    update(one, new, 2)
    engine.resume()
    for answer in given_up:
        answer.finish_reason = ""
    engine.submit(given_up)
    ended += collect(came, N * len(LENGTHS) - len(ended))
    met, starts = 0, asked()
    for answer in ended:
        assert answer.versions == sorted(answer.versions)
        assert len(answer.versions) == len(answer.tokens) == len(answer.log_probs)
        prompt = starts[answer.sample_id].prompt
        for version, model in ((1, old), (2, new)):
            log_probs = logits_after(model, prompt, answer.tokens).log_softmax(-1)
            own = log_probs.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
            by = torch.tensor(answer.versions) == version
            got = torch.tensor(answer.log_probs)[by]
            torch.testing.assert_close(got, own[by], atol=1e-4, rtol=0)
        met += set(answer.versions) == {1, 2}
    assert met > 0, "new weights met an answer half made"
    engine.close()
    update(one, old, 3)


@pytest.mark.timeout(120)
def test_greedy_they_are_those_of_hf_infer(one: VllmInfer) -> None:
    model = strong(one.context.model, 44)
    update(one, model, 4)
    config = replace(one.context.config, strategy_args=StrategyArgs("hf_infer"))
    other = HfInfer(replace(one.context, config=config))
    other.initialize(lambda config, seed: model)
    answers: list[dict[int, Answer]] = []
    for strategy in (one, other):
        engine = strategy.open_engine(GenerationConfig(temperature=0, max_new_tokens=40), SEED)
        engine.submit(asked())
        ended = collect(engine.ended(), N * len(LENGTHS))
        answers.append({answer.sample_id: answer for answer in ended})
        engine.close()
    for sample_id, wanted in answers[1].items():
        got = answers[0][sample_id]
        assert (got.tokens, got.finish_reason) == (wanted.tokens, wanted.finish_reason)
        assert got.log_probs == pytest.approx(wanted.log_probs, abs=1e-4)


def test_a_stop_string_ends_an_answer_that_had_its_beginning(one: VllmInfer) -> None:
    prompt = asked()[0].prompt
    update(one, strong(one.context.model, 46), 5)
    decode = as_sampled(load_tokenizer(one.context.model))

    def gone_on(*stop: str) -> Answer:
        config = GenerationConfig(max_new_tokens=30, stop=list(stop))
        engine = one.open_engine(config, SEED)
        had = Answer([8, 9, 10, 11], [-1.0] * 4, sample_id=0, prompt=prompt, versions=[4] * 4)
        engine.submit([had])
        (ended,) = collect(engine.ended(), 1)
        engine.close()
        return ended

    whole = gone_on()
    assert len(whole.tokens) > 5
    cut = decode(whole.tokens[2:5])
    assert cut not in decode(whole.tokens[:4]) and cut not in decode(whole.tokens[4:])
    ended = gone_on("never", cut)
    assert (ended.tokens, ended.finish_reason) == (whole.tokens[:5], "stop")
    assert ended.log_probs == pytest.approx(whole.log_probs[:5], abs=1e-4)
    assert ended.versions == [4] * 4 + [5]


def test_a_request_that_it_cannot_do_is_told_as_such(one: VllmInfer) -> None:
    """And the engine goes on."""
    short, long = Answer(sample_id=1, prompt=[5]), Answer(sample_id=2, prompt=[5] * 160)
    engine = one.open_engine(GENERATION, SEED)
    engine.submit([short, long])
    (told,) = engine.ended()
    assert isinstance(told, Failure) and told.sample_id == 2
    assert told.text.startswith("its prompt has 160 tokens, and max_model_len=160 leaves none")
    engine._shared["stop"] = [""]  # vLLM itself refuses it
    engine.submit([short])
    (told,) = engine.ended()
    assert isinstance(told, Failure) and told.sample_id == 1 and "empty string" in told.text
    engine.close()
    model = strong(one.context.model, 45)
    update(one, model, 5)
    check_greedy(one, model, 5)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_an_engine_that_dies_or_hangs_holds_nobody_up(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "END_S", 0.5)
    made = VllmInfer(context(1, FIELDS))
    made.initialize(strong)
    engine = made.open_engine(GENERATION, SEED)
    came = engine.ended()
    engine.submit(asked())
    os.kill(made._engine.process.pid, how)
    if how == signal.SIGKILL:
        failure = next(item for item in came if isinstance(item, Failure))
        assert "role infer, worker 0: the engine's process has ended with signal" in failure.text
    with ThreadPoolExecutor() as threads:
        pausing = threads.submit(engine.pause, abort=True, timeout_s=60)
        engine.close()
        pausing.result(10)
    assert made._engine.process.wait(10) == -signal.SIGKILL
    model = strong(made.context.model, 43)
    update(made, model, 2)
    engine.resume()
    if how == signal.SIGKILL:
        check_greedy(made, model, 2)  # it is started anew when it is needed
    made.close()


@pytest.mark.timeout(200)
def test_one_that_hangs_or_dies_while_weights_come_is_lost() -> None:
    """As at work: the driver is told, and says whether the job ends."""
    made = VllmInfer(context(1, FIELDS))
    made.initialize(strong)
    said = {signal.SIGSTOP: "has not done begin_loading within 0.5 s", signal.SIGKILL: "SIGKILL"}
    for version, how in enumerate(said, 2):
        engine = made.open_engine(GENERATION, SEED)
        engine.pause(abort=False, timeout_s=60)
        os.kill(made._engine.process.pid, how)
        made.context.config.timeout_s = 0.5
        update(made, model := strong(made.context.model, 40 + version), version)
        engine.resume()
        (failure,) = engine.ended()
        assert isinstance(failure, Failure) and said[how] in failure.text
        assert made._engine.process.wait(10) == -signal.SIGKILL
        made.context.config.timeout_s = 240
        check_greedy(made, model, version)  # it is started anew when it is needed
    made.close()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("at_work", [True, False], ids=["at work", "at rest"])
def test_a_worker_of_an_engine_that_dies_is_told_and_leaves_nothing(at_work: bool) -> None:
    before = set(os.listdir("/dev/shm"))
    made = VllmInfer(context(2, FIELDS))
    made.initialize(strong)
    engine = made.open_engine(GENERATION, SEED)
    if at_work:
        engine.submit(asked())
    process = made._engine.process
    workers = [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if of(entry, process.pid)]
    os.kill(workers[0], signal.SIGKILL)
    while not at_work and Path(f"/proc/{workers[1]}").exists():
        time.sleep(0.05)  # vLLM ends it with the other one
    if not at_work:
        engine.submit(asked())
    failure = next(item for item in engine.ended() if isinstance(item, Failure))
    assert "role infer, worker 0: one of the engine's workers has died; vLLM's" in failure.text
    assert process.wait(10) == 1
    made.close()
    assert set(os.listdir("/dev/shm")) <= before


def of(entry: Path, group: int) -> bool:
    """Whether a process in /proc is a worker of the engine with this process group."""
    with suppress(OSError):  # it has ended
        is_worker = b"Worker" in (entry / "cmdline").read_bytes()
        return is_worker and os.getpgid(int(entry.name)) == group
    return False
