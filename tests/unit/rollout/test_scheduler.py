"""Real requests to engines that are threads of this process; the answers are a mock's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from roll_td import Dispatch, Worker, WorkerError, register
from roll_td.config.base import BaseConfig, WorkerConfig
from roll_td.config.model import GenerationConfig, ModelConfig
from roll_td.config.scheduling import SchedulingConfig
from roll_td.config.strategies import StrategyArgs
from roll_td.metrics import Sum, merge_metrics
from roll_td.models import load_tokenizer
from roll_td.placement import planned_places
from roll_td.protocol import DataProto
from roll_td.rollout.scheduler import Scheduler
from roll_td.runtime.cluster import Cluster, ResourceManager
from roll_td.runtime.inprocess import LocalJob
from roll_td.strategies.base import StrategyContext
from roll_td.strategies.engine import Answer, CoreEngine, Failure
from roll_td.strategies.mock import MockInfer
from roll_td.workers.generation import GenerationWorker

TOKENIZER = Path(__file__).parents[3] / "configs" / "sft" / "tiny" / "tokenizer"
SAMPLES, SEED = 3, 11


class Generator(GenerationWorker):
    """Weights are their version alone."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config):
        Worker.initialize(self, pipeline_config)
        config, device = self.worker_config, torch.device("cpu")
        where = (self.rank_info, {}, None, device, 0)  # there are no groups in threads
        self.strategy = MockInfer(StrategyContext("infer", config, config.model, *where))
        self.tokenizer = load_tokenizer(config.model)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_weights(self, version):
        self.strategy.process_weights_after_loading(version)


class Prompts:
    """An endless stream; what is drawn is remembered."""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def draw(self, position: int, count: int) -> DataProto:
        places = torch.arange(position, position + count)
        self.drawn += places.tolist()
        lengths = places % 3 + 2
        ids = torch.arange(1, 5).expand(count, 4) * (torch.arange(4) < lengths[:, None])
        return DataProto(
            {"input_ids": ids, "lengths": lengths, "group_id": places},
            {"gold": [f"gold {n}" for n in places.tolist()]},
        )


def score(rows: DataProto) -> dict[str, Any]:
    """The share of even tokens."""
    mask = rows["response_mask"]
    rows.update({"scores": ((rows["input_ids"] % 2 == 0) & mask).sum(-1) / mask.sum(-1)})
    return {"scored": Sum(len(rows))}


def never(rows: DataProto) -> bool:
    raise AssertionError("asked for a signal that nobody wants")


Made = Callable[..., tuple[Scheduler, Cluster, Prompts]]


@pytest.fixture
def made() -> Iterator[Made]:
    """`made(engines, mock settings, **scheduling)` in a job of its own."""
    found: list[Scheduler] = []
    with LocalJob(planned_places(1, 3, 1), 1, 3) as job:

        def make(engines=2, mock=None, size=4, refills=0, has_signal=never, **scheduling):
            settings = {"max_tokens": 9, "min_tokens": 2, "token_s": 0.001, "slots": 4}
            role = WorkerConfig(
                name="infer",
                device_mapping=list(range(engines)),
                model=ModelConfig(tokenizer=str(TOKENIZER)),
                strategy_args=StrategyArgs("mock_infer", settings | (mock or {})),
                generation=GenerationConfig(max_new_tokens=9, num_return_sequences=SAMPLES),
            )
            cluster = Cluster("infer", Generator, ResourceManager(1, 3), role)
            cluster.initialize(BaseConfig())
            prompts = Prompts()
            config = SchedulingConfig(deterministic=False, in_flight_per_engine=5)
            for name, value in scheduling.items():
                setattr(config, name, value)
            config.deterministic = None if config.async_generation_ratio else False
            scheduler = Scheduler(
                cluster, prompts, score, has_signal, config, role.generation, size, refills, SEED
            )
            found.append(scheduler)
            return scheduler, cluster, prompts

        yield make
        if job.driver.failed is None:
            for scheduler in found:
                scheduler.close()
        job.driver.failed = None


def update(scheduler: Scheduler, cluster: Cluster, version: int) -> None:
    with scheduler.updating(version):
        cluster.take_weights(version)


def same(one: DataProto, other: DataProto) -> None:
    """Equal to the bit, padding aside."""
    assert set(one.keys()) == set(other.keys())
    width = min(one["input_ids"].shape[1], other["input_ids"].shape[1])
    for name in one.batch.keys():  # noqa: SIM118
        left, right = (part[name] for part in (one, other))
        if left.ndim > 1:
            assert not left[:, width:].any() and not right[:, width:].any()
            left, right = left[:, :width], right[:, :width]
        assert left.dtype == right.dtype and torch.equal(left, right), name
    for name in one.non_tensor_batch:
        assert list(one[name]) == list(other[name]), name


def test_batches_are_those_of_the_blocking_call(made: Made) -> None:
    scheduler, cluster, prompts = made()
    position = 0
    for step in range(3):
        update(scheduler, cluster, step + 1)
        batch, looked_at, after = scheduler.batch(position, 3 - step)
        assert looked_at is batch
        asked = Prompts().draw(position, 4)
        asked.update({"sample_id": asked["group_id"]})
        generation = GenerationConfig(max_new_tokens=9, num_return_sequences=SAMPLES)
        want = cluster.generate(asked, generation, SEED)
        score(want)
        same(batch, want)
        assert set(batch["weight_version"][batch["response_mask"]].tolist()) == {step + 1}
        assert after == position + 4
        assert prompts.drawn == list(range(after)), "nothing is made ahead"
        metrics = merge_metrics(scheduler.metrics(batch))
        assert metrics["staleness/max"] == 0 and metrics["scored"] == 4 * SAMPLES
        assert 0 <= metrics["rollout/idle"] < 1
        position = after


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_ahead_of_training_tokens_are_as_old_as_they_may_be(made, ratio, in_flight) -> None:
    slow = {"token_s": 0.02}  # so that new weights meet answers half made, on a busy machine too
    scheduler, cluster, prompts = made(
        2, slow, async_generation_ratio=ratio, in_flight=in_flight, request_timeout_s=5.0
    )
    steps, position, oldest, mixed = 8, 0, 0, 0
    for step in range(steps):
        update(scheduler, cluster, step + 1)
        batch, _, position = scheduler.batch(position, steps - step)
        assert batch["group_id"].tolist() == [4 * step + n // SAMPLES for n in range(12)]
        most = int(min(ratio, steps - step - 1) * 4)
        assert prompts.drawn == list(range(max(len(prompts.drawn), position + most)))
        asked = Prompts().draw(4 * step, 4)
        asked.update({"sample_id": asked["group_id"]})
        want = cluster.generate(asked, scheduler._generation, SEED)
        mask = batch["response_mask"]
        assert torch.equal(batch["input_ids"][mask], want["input_ids"][want["response_mask"]])
        assert torch.equal(
            batch["infer_log_probs"][mask], want["infer_log_probs"][want["response_mask"]]
        )
        behind = step + 1 - batch["weight_version"]
        assert behind[mask].min() >= 0
        oldest = max(oldest, int(behind[mask].max()))
        mixed += sum(len(set(row[own].tolist())) > 1 for row, own in zip(behind, mask, strict=True))
        metrics = merge_metrics(scheduler.metrics(batch))
        assert metrics["staleness/max"] == behind[mask].max()
        assert metrics["staleness/token"] == pytest.approx(behind[mask].double().mean().item())
        time.sleep(0.01)  # training: the engines go on
    assert oldest == (1 if ratio == 0.5 else ratio), "it runs ahead, and no further"
    assert mixed > 0, "an answer that new weights met went on"
    assert len(prompts.drawn) == 4 * steps, "nothing is drawn for steps that don't come"


@pytest.mark.parametrize("token_s", [0.001, 0.02])  # they have ended, or are half made
def test_too_old_answers_are_made_anew(made: Made, token_s: float) -> None:
    mock = {"token_s": token_s}
    scheduler, cluster, _ = made(2, mock, async_generation_ratio=2.0, max_staleness=1)
    refused, position = 0.0, 0
    for step in range(6):
        update(scheduler, cluster, step + 1)
        batch, _, position = scheduler.batch(position, 6 - step)
        assert (step + 1 - batch["weight_version"])[batch["response_mask"]].max() <= 1
        assert batch["group_id"].unique().tolist() == list(range(4 * step, 4 * step + 4))
        refused += merge_metrics(scheduler.metrics(batch)).get("rollout/refused", 0)
        time.sleep(0.05)
    assert refused > 0


def test_what_is_too_old_half_made_is_given_up_at_once(made: Made) -> None:
    slow = {"token_s": 0.1, "min_tokens": 9}
    scheduler, cluster, _ = made(2, slow, async_generation_ratio=1.0, max_staleness=0)
    given_up, abort = [], cluster.abort
    cluster.abort = lambda ids, **where: (given_up.extend(ids), abort(ids, **where))
    update(scheduler, cluster, 1)
    _, _, position = scheduler.batch(0, 2)
    assert not given_up
    update(scheduler, cluster, 2)
    assert given_up and set(given_up) <= set(range(12, 24))
    batch, _, _ = scheduler.batch(position, 1)
    assert set(batch["weight_version"][batch["response_mask"]].tolist()) == {2}


def test_prompts_are_drawn_until_enough_have_a_signal(made: Made) -> None:
    dull = {0, 1, 2, 4, 5, 6, 7, 9, 11, 12}

    def has_signal(rows: DataProto) -> bool:
        assert len(rows) == SAMPLES and len(set(rows["group_id"].tolist())) == 1
        return int(rows["group_id"][0]) not in dull

    scheduler, cluster, prompts = made(size=2, refills=3, has_signal=has_signal)
    update(scheduler, cluster, 1)
    batch, looked_at, position = scheduler.batch(0, 9)
    # of 8 prompts one has a signal
    assert batch["group_id"].unique().tolist() == [3] and position == 8
    assert looked_at["group_id"].unique().tolist() == list(range(8))
    batch, looked_at, position = scheduler.batch(8, 8)
    assert batch["group_id"].unique().tolist() == [8, 10] and position == 11
    batch, looked_at, position = scheduler.batch(11, 7)
    assert batch["group_id"].unique().tolist() == [13, 14] and position == 15
    assert prompts.drawn == list(range(15)), "each once, and no more than it takes"


@pytest.mark.parametrize("fault", ["fail", "hang"])
def test_others_take_over_what_an_engine_had_that_fails(made, fault, caplog) -> None:
    faulty = {"fault": fault, "fault_worker": 1, "fault_after": 5}
    scheduler, cluster, _ = made(
        3, faulty, size=8, on_engine_failure="reroute", request_timeout_s=2.0
    )
    position, lost = 0, 0.0
    for step in range(3):
        update(scheduler, cluster, step + 1)
        batch, _, position = scheduler.batch(position, 3 - step)
        assert batch["sample_id"].tolist() == list(range(24 * step, 24 * step + 24))
        lost += merge_metrics(scheduler.metrics(batch)).get("rollout/engines_lost", 0)
    assert lost == 1
    (said,) = [r.getMessage() for r in caplog.records if "its engine has failed" in r.getMessage()]
    assert "worker 1 of infer, rank 1 on node0" in said and "its last request: sample" in said
    assert ("mock_infer: fails after" if fault == "fail" else "no answer to sample") in said


@pytest.mark.parametrize("fault", ["fail", "hang"])
def test_the_job_ends_with_what_an_engine_failed_of(made, fault) -> None:
    scheduler, cluster, _ = made(2, {"fault": fault, "fault_worker": 1}, request_timeout_s=2.0)
    update(scheduler, cluster, 1)
    with pytest.raises(WorkerError, match=r"infer\.engine failed \(worker 1 of infer, rank 1") as e:
        scheduler.batch(0, 1)
    assert "its last request: sample" in str(e.value)


def test_the_last_engine_to_fail_ends_the_job(made: Made) -> None:
    scheduler, cluster, _ = made(1, {"fault": "fail"}, on_engine_failure="reroute")
    update(scheduler, cluster, 1)
    with pytest.raises(WorkerError, match="as fault says"):
        scheduler.batch(0, 1)


def test_a_request_that_nobody_can_answer_ends_the_job_at_once(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With others that could take over, too: it would be the end of each of them."""

    def refuse(engine: CoreEngine, answers: list[Answer]) -> None:
        (wrong,) = [a.sample_id for a in answers if a.sample_id == 4] or [None]
        if wrong is not None:
            engine._ended.put(Failure("its prompt is too long; lower it", wrong))

    monkeypatch.setattr(CoreEngine, "submit", refuse)
    scheduler, cluster, _ = made(3, on_engine_failure="reroute")
    update(scheduler, cluster, 1)
    with pytest.raises(WorkerError, match=r"infer\.engine failed \(worker 1 of infer, rank 1") as e:
        scheduler.batch(0, 1)
    assert "sample 4 of prompt 1 can't be answered: its prompt is too long; lower it" in str(
        e.value
    )
    assert len(scheduler._router.engines) == 3


def test_an_empty_prompt_is_not_asked(made: Made) -> None:
    scheduler, cluster, prompts = made(2, on_engine_failure="reroute")
    draw = prompts.draw

    def one_empty(position: int, count: int) -> DataProto:
        drawn = draw(position, count)
        drawn["lengths"][2] = 0
        return drawn

    prompts.draw = one_empty
    update(scheduler, cluster, 1)
    with pytest.raises(ValueError, match="prompt 2 is empty; give it a token to start from"):
        scheduler.batch(0, 1)
