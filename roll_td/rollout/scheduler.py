"""Answers by requests, ahead of training: the driver's side of engines that never stop.

    pipeline's thread      batch(): waits for a whole batch │ trains │ updating(): new weights │ …
    a thread an engine     an answer has ended → Router: is a group whole? what to send next?
    the scoring thread     whole groups → rewards → Window: is a batch whole? what to draw next?

What goes where is decided by Window and Router, which know no threads; one lock guards them here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from roll_td.config.model import GenerationConfig
from roll_td.config.scheduling import SchedulingConfig
from roll_td.metrics import Metric, Sum
from roll_td.protocol import DataProto
from roll_td.rollout import groups
from roll_td.rollout.activity import Activity
from roll_td.rollout.groups import Lengths
from roll_td.rollout.routing import Group, Router
from roll_td.rollout.window import Window
from roll_td.runtime.cluster import Cluster
from roll_td.runtime.driver import current_driver
from roll_td.runtime.failure import Cause, WorkerError
from roll_td.strategies.engine import Failure

logger = logging.getLogger(__name__)
LOOK_S = 0.2
"""How often it is looked whether an engine has been silent for too long."""


class Source(Protocol):
    """Where prompts come from; data.Loader is one."""

    def draw(self, position: int, count: int) -> DataProto:
        """Prompts with input_ids, lengths and group_id, their place in the stream."""


Score = Callable[[DataProto], dict[str, Metric]]
"""Adds scores to the rows of whole groups; gives metrics of them."""
HasSignal = Callable[[DataProto], bool]
"""Whether there is something to learn from a group, given its scored rows; asked with refills."""


class Scheduler:
    """Has prompts answered and scored, up to async_generation_ratio batches ahead."""

    def __init__(
        self,
        engines: Cluster,
        source: Source,
        score: Score,
        has_signal: HasSignal,
        config: SchedulingConfig,
        generation: GenerationConfig,
        batch_size: int,
        max_refills: int,
        seed: int,
        end: int | None = None,
    ) -> None:
        """`engines` is a role of GenerationWorkers; `generation` and `seed` say how they sample;
        batch_size, max_refills and `end`, of the stream, what a batch is: see Window."""
        self._engines, self._source, self._score = engines, source, score
        self._has_signal, self._config, self._generation = has_signal, config, generation
        self._batch_size, self._max_refills, self._end = batch_size, max_refills, end
        self._driver = current_driver()
        self._changed = threading.Condition(threading.RLock())
        # all below is guarded by it
        self._window: Window | None = None
        self._router = Router(engines.world_size, config.in_flight_per_engine)
        self._lengths, self._activity = Lengths(), Activity(engines)
        self._prompts: dict[int, DataProto] = {}
        """Prompts that were drawn, a row each, by place in the stream."""
        self._whole: list[Group] = []
        self._scored: dict[int, tuple[Group, DataProto]] = {}
        self._metrics: list[dict[str, Metric]] = []
        self._version = 0
        self._batches = 0.0
        """How many may be drawn, counted from the next one."""
        self._paused_s: float | None = None
        self._is_closed = False
        self._error: BaseException | None = None
        engines.open_engine(generation, seed)
        bodies = [self._score_groups, *(self._reader(e) for e in range(engines.world_size))]
        for body in bodies:
            thread = threading.Thread(target=self._guarded, args=(body,), daemon=True)
            thread.name = "roll-td scheduler"
            thread.start()

    # --- the pipeline's thread --------------------------------------------------------------

    def batch(self, position: int, left: int) -> tuple[DataProto, DataProto, int]:
        """The batch that begins at this place in the stream of prompts; `left` more are wanted, it
        included. Blocks.

        Returns the rows to learn from, those of all prompts that were looked at for it, both by
        place in the stream, and the place that the next batch begins at.
        """
        with self._changed:
            if self._window is None:
                size, refills = self._batch_size, self._max_refills
                self._window = Window(size, refills, position, self._end)
            assert self._window.position == position, "batches follow each other"
            ratio = self._config.async_generation_ratio
            self._batches = min(1 + ratio, left)
            self._draw()
            while (taken := self._window.take()) is None:
                self._look()
                self._changed.wait(LOOK_S)
            self._batches = min(ratio, left - 1)
            self._draw()
            found = {number: self._scored.pop(number)[1] for number in taken.looked_at}
            for number in taken.looked_at:
                del self._prompts[number]
            position = self._window.position
        looked_at = DataProto.concat(list(found.values()))
        if taken.learnt_from == taken.looked_at:
            return looked_at, looked_at, position
        learnt_from = DataProto.concat([found[number] for number in taken.learnt_from])
        return learnt_from, looked_at, position

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Engines rest inside, where they get the weights of this version."""
        with self._changed:
            self._version = version
        self._engines.pause_engine(self._config.in_flight == "abort")
        with self._changed:
            self._paused_s = time.monotonic()
            self._activity.note([])
        yield
        self._engines.resume_engine()
        with self._changed:
            self._router.shift(time.monotonic() - self._paused_s)
            self._paused_s = None
            for number in [n for n, (group, _) in self._scored.items() if self._stale(group)]:
                assert self._window is not None, "something was scored"
                self._window.refused(number)
                self._refuse(self._scored.pop(number)[0])
            if self._refuses:  # they come back, and begin anew
                for engine, late in self._router.older(self._oldest).items():
                    self._engines.abort(late, worker=engine, blocking=False)
            self._send()

    def metrics(self, batch: DataProto) -> list[dict[str, Metric]]:
        """Of the batch that was given last, and of what has happened since the one before."""
        with self._changed:
            found, self._metrics = self._metrics, []
            found.append(self._activity.metrics())
            version = self._version
        # weights that nothing has changed are never behind
        return [*found, groups.staleness(batch, version)] if version else found

    def close(self) -> None:
        """Have the engines end; what is in flight is dropped."""
        with self._changed:
            self._is_closed = True
            self._activity.note([])
            self._changed.notify_all()
        for engine in range(self._engines.world_size):
            self._engines.close_engine(worker=engine)

    # --- what happens by itself; the lock is held ---------------------------------------------

    def _draw(self) -> None:
        assert self._window is not None, "the first batch has been asked for"
        numbers = self._window.draw(self._batches)
        if numbers:
            prompts = self._source.draw(numbers.start, len(numbers))
            samples = self._generation.num_return_sequences
            for row, number in enumerate(numbers):
                prompt = self._prompts[number] = prompts[row : row + 1]
                batch = number // self._batch_size
                self._router.add(groups.new_group(prompt, samples, batch, self._lengths))
        self._send()

    def _send(self) -> None:
        if self._is_closed:
            return
        for engine, answers in self._router.assign(time.monotonic(), self._version).items():
            for answer in answers:
                if self._refuses and groups.is_stale(answer, self._oldest):
                    answer.tokens, answer.log_probs, answer.versions = [], [], []
                    self._metrics.append({"rollout/refused": Sum(1)})
            self._engines.submit(answers, worker=engine, blocking=False)
        if self._paused_s is None:
            self._activity.note([e for e in self._router.engines if self._router.in_flight(e)])

    @property
    def _refuses(self) -> bool:
        return self._config.stale == "refuse"

    @property
    def _oldest(self) -> int:
        """The earliest version that a token may be of."""
        return self._version - self._config.oldest

    def _stale(self, group: Group) -> list[int]:
        """Its samples that have to be made anew."""
        if not self._refuses:
            return []
        return [n for n, a in group.answers.items() if groups.is_stale(a, self._oldest)]

    def _refuse(self, group: Group) -> None:
        stale = self._stale(group)
        self._metrics.append({"rollout/refused": Sum(len(stale))})
        groups.begin_anew(group, stale)
        self._router.add(group)

    def _look(self) -> None:
        """Raise what has gone wrong; give up an engine that has been silent for too long."""
        if self._error is not None:
            raise self._error
        now_s = time.monotonic() if self._paused_s is None else self._paused_s
        timeout_s = self._config.request_timeout_s
        late = self._router.overdue(now_s - timeout_s)
        if late is not None:
            what = f"no answer to sample {late.sample_id} after {now_s - late.sent_s:.1f} s"
            self._lose(late.engine, f"{what}; request_timeout_s is {timeout_s:g}")

    def _heard_of(self, engine: int, failure: Failure) -> None:
        text, sample = failure.text.rstrip(), failure.sample_id
        if sample is None:
            return self._lose(engine, text)
        number = sample // self._generation.num_return_sequences
        self._fail(engine, f"sample {sample} of prompt {number} can't be answered: {text}")

    def _lose(self, engine: int, why: str) -> None:
        """An engine has failed: the others take over what it had, or the job ends."""
        last = self._router.last(engine)
        if last is not None:
            ago_s = time.monotonic() - last.sent_s
            number, sample = last.group.number, last.sample_id
            why += f"; its last request: sample {sample} of prompt {number}, {ago_s:.1f} s before"
        if self._config.on_engine_failure == "fail" or len(self._router.engines) == 1:
            return self._fail(engine, why)
        role, rank, host = self._place(engine)
        text = "worker %d of %s, rank %d on %s: its engine has failed, others take over: %s"
        logger.warning(text, engine, role, rank, host, why)
        self._router.drop(engine)
        self._metrics.append({"rollout/engines_lost": Sum(1)})
        self._engines.close_engine(worker=engine, blocking=False)
        self._send()

    def _fail(self, engine: int, why: str) -> None:
        """The job ends of what has happened at an engine."""
        role, rank, host = self._place(engine)
        cause = Cause("exception", role, engine, rank, host, "engine", why, time.time())
        self._error = self._error or WorkerError(cause.render())
        self._changed.notify_all()
        self._driver.fail(cause)

    def _place(self, engine: int) -> tuple[str, int, str]:
        """Role, rank and host."""
        rank = self._engines.placement.seats[engine].ranks[0]
        return self._engines.name, rank, self._driver.places[rank].host

    # --- threads ----------------------------------------------------------------------------

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # a thread's edge
            with self._changed:
                is_first = self._error is None and self._driver.failed is None
                self._error = self._error or error
                self._changed.notify_all()
            if is_first:
                self._driver.fail(Cause.of(error, "driver", self._driver.transport.rank))

    def _reader(self, engine: int) -> Callable[[], None]:
        def read() -> None:
            for item in self._engines.ended(worker=engine):
                with self._changed:
                    if isinstance(item, Failure):
                        if engine in self._router.engines and not self._is_closed:
                            self._heard_of(engine, item)
                        return
                    for group in self._router.ended(engine, item):
                        self._take(group)
                    self._send()

        return read

    def _take(self, group: Group) -> None:
        if self._stale(group):
            return self._refuse(group)
        self._lengths.observe(group)
        self._whole.append(group)
        self._changed.notify_all()

    def _score_groups(self) -> None:
        while True:
            with self._changed:
                while not self._whole and not self._is_closed:
                    self._look()
                    self._changed.wait(LOOK_S)
                if self._is_closed:
                    return
                whole, self._whole = self._whole, []
                parts = [groups.rows_of(self._prompts[g.number], g) for g in whole]
            rows = DataProto.concat(parts)
            metrics = self._score(rows)
            with self._changed:
                self._metrics.append(metrics)
                self._settle(whole, rows)

    def _settle(self, whole: list[Group], rows: DataProto) -> None:
        """Groups have their scores."""
        assert self._window is not None, "the first batch has been asked for"
        samples = self._generation.num_return_sequences
        for place, group in enumerate(whole):
            if self._stale(group):
                self._refuse(group)
                continue
            own = rows[place * samples : (place + 1) * samples]
            self._scored[group.number] = group, own
            has_signal = self._max_refills == 0 or self._has_signal(own)
            self._window.answered(group.number, has_signal)
        self._draw()
        self._changed.notify_all()
