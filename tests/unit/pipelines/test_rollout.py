"""Rollout only, in a job of threads, with a model that needs no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll_td import Dispatch, Worker, register
from roll_td.config.rollout import RolloutConfig
from roll_td.config.schema import ConfigError, read
from roll_td.models import load_tokenizer
from roll_td.pipelines.rollout import RolloutPipeline
from roll_td.placement import planned_places
from roll_td.runtime.inprocess import LocalJob
from roll_td.strategies.base import StrategyContext
from roll_td.strategies.mock import MockInfer
from roll_td.trackers import read_metrics
from roll_td.workers.generation import GenerationWorker

TOKENIZER = str(Path(__file__).parents[3] / "configs" / "sft" / "tiny" / "tokenizer")
WORDS = [f"{n}+{n}=" for n in range(7)]


class Mock(GenerationWorker):
    """Without process groups, which a job of threads has none of."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        Worker.initialize(self, pipeline_config)
        config, model, place = self.worker_config, pipeline_config.model, self.rank_info
        self.strategy = MockInfer(
            StrategyContext("actor_infer", config, model, place, {}, None, self.device, 0)
        )
        self.tokenizer = load_tokenizer(model)


def by_place(response: str, number: int) -> float | None:
    """No score for the answers to prompt 3, and for prompt 1 they are right half of the time."""
    return None if number == 3 else float(number != 1 or len(response) % 2)


def run(folder: Path, steps: int | None = None, **given: Any) -> RolloutPipeline:
    """`steps`: stop after so many, in the middle of the next one."""
    rows = [{"q": q, "n": n, "d": "ab"[n > 4]} for n, q in enumerate(WORDS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reading = read(
        RolloutConfig,
        {
            "output_dir": str(folder),
            "exp_name": "exp",
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": TOKENIZER},
            "data": {
                "train": str(folder / "train.jsonl"),
                "prompt_key": "q",
                "keep": {"number": "n", "domain": "d"},
            },
            "rewards": {"default": {"name": f"{__name__}.by_place"}},
            "batch_size": 2,
            "pass_at": [1, 4],
            "actor_infer": {
                "worker_cls": f"{__name__}.Mock",
                "device_mapping": [0, 1],
                "strategy_args": {"strategy_name": "mock_infer"},
                "generation": {"num_return_sequences": 4, "max_new_tokens": 5},
            },
        }
        | given,
    )
    if reading.value is None:
        raise ConfigError(reading.problems)
    with LocalJob(planned_places(1, 2, 2), 1, 2):
        pipeline = RolloutPipeline(reading.value)
        if steps is not None:
            write, seen = pipeline.write, []

            def stop(batch):
                write(batch)
                seen.append(batch)
                if len(seen) > steps:
                    raise KeyboardInterrupt

            pipeline.write = stop
        try:
            pipeline.run()
        except KeyboardInterrupt:
            assert steps is not None
        finally:
            pipeline.close()
    return pipeline


ONE_BY_ONE = {"async_generation_ratio": 1.0, "in_flight_per_engine": 3}


@pytest.mark.parametrize("scheduling", [{}, ONE_BY_ONE], ids=["one call", "one by one"])
def test_every_prompt_is_answered_once_in_order(
    scheduling: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, scheduling=scheduling)
    lines = [
        json.loads(line) for line in (tmp_path / "exp" / "answers.jsonl").read_text().splitlines()
    ]
    assert [(line["row"], line["sample"]) for line in lines] == [(n // 4, n) for n in range(28)]
    for line in lines:
        assert (
            line["prompt"].endswith(WORDS[line["number"]]) or WORDS[line["row"]] in line["prompt"]
        )
        assert len(line["tokens"]) == len(line["log_probs"]) > 0
        assert line["finish_reason"] == ("length" if len(line["tokens"]) == 5 else "stop")
        assert line["score"] == by_place(line["response"], line["row"])
        assert all(-4 < value < 0 for value in line["log_probs"]) and line["weight_version"] == 0
    right = [line["score"] for line in lines if line["score"] is not None]
    of_1 = sum(line["score"] for line in lines if line["row"] == 1)
    assert 0 < of_1 < 4, "the test has something to tell"
    metrics = read_metrics(tmp_path / "exp" / "metrics.jsonl")
    assert metrics["val/score", 4] == pytest.approx(sum(right) / 24)
    assert metrics["val/pass@1", 4] == pytest.approx((5 + of_1 / 4) / 6)
    assert metrics["val/pass@4", 4] == 1 and metrics["val/b/pass@1", 4] == 1
    assert metrics["reward/without_score", 1] == 4
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[-4:]] == ["score", "all", "a", "b"]
    assert out[-3].split() == [
        "all",
        f"{sum(right) / 24:.4f}",
        f"{(5 + of_1 / 4) / 6:.4f}",
        "1.0000",
    ]


@pytest.mark.parametrize("scheduling", [{}, ONE_BY_ONE], ids=["one call", "one by one"])
def test_a_stopped_run_goes_on_and_ends_as_if_it_had_not(
    scheduling: dict[str, Any], tmp_path: Path
) -> None:
    """One by one its answers are those of one call each batch."""
    runs = {}
    for name in ("whole", "stopped"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "stopped":
            # what the third step wrote is written again
            stopped = run(folder, steps=2, scheduling=scheduling)
            assert stopped.global_step == 2
            with (folder / "exp" / "answers.jsonl").open("a") as file:
                file.write("torn" * 10_000)
        run(folder, scheduling=scheduling if name == "stopped" else {})
        runs[name] = (folder / "exp" / "answers.jsonl").read_bytes()
    assert runs["stopped"] == runs["whole"]
    assert run(folder).written_bytes == len(runs["whole"]), "it is done: nothing to do"
    assert (folder / "exp" / "answers.jsonl").read_bytes() == runs["whole"]


def test_answers_that_are_gone_are_told(tmp_path: Path) -> None:
    run(tmp_path, steps=1)
    (tmp_path / "exp" / "answers.jsonl").write_text("")
    with pytest.raises(ValueError, match="has lost answers"):
        run(tmp_path)


def test_a_role_judges_what_another_has_answered(tmp_path: Path) -> None:
    asks = {"role": "j", "pattern": r"(\d)", "highest": 9, "template": "Is {response} good?"}
    judge = {"worker_cls": f"{__name__}.Mock", "strategy_args": {"strategy_name": "mock_infer"}}
    args = {"name": "llm_judge", "on_error": "skip", "settings": asks | {"attempts": 3}}
    run(tmp_path, rewards={"default": args}, judges={"j": judge})
    lines = [
        json.loads(line) for line in (tmp_path / "exp" / "answers.jsonl").read_text().splitlines()
    ]
    digits = [[int(c) for c in line["judge_reply"] if c.isdigit()] for line in lines]
    wanted = [found[-1] / 9 if found else None for found in digits]
    assert [line["score"] for line in lines] == pytest.approx(wanted)
    assert len(set(wanted)) > 3, "it says this and that"
    metrics = read_metrics(tmp_path / "exp" / "metrics.jsonl")
    assert sum(metrics["judge/j/questions", step] for step in range(4)) == 28
