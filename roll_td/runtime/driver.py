"""The driver: one ordered command log, and what becomes of each command.

`post` numbers a command and sends it to its ranks under one lock, so that every rank sees the
log in one order. A command waits only for earlier ones: the lowest unfinished one can always
finish. The io thread hears the ranks; the landing thread waits for bytes of answers.
"""

from __future__ import annotations

import itertools
import pickle
import queue
import signal
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from roll_td.placement import WorldLayout
from roll_td.runtime.control import Chunk, Frame, Kind
from roll_td.runtime.failure import Cause, WorkerError
from roll_td.runtime.landing import Answer, Landing
from roll_td.runtime.outgoing import Key, Outgoing, Sending
from roll_td.runtime.parcel import MESSAGE_BYTES, MESSAGES_BYTES, Share, Spec
from roll_td.runtime.trace import TraceWriter
from roll_td.runtime.transport import Group, Ranks, Transport, Work
from roll_td.runtime.wire import Place, Watch, loads_whole

_current: Driver | None = None


def current_driver() -> Driver:
    """The driver of this process; a ValueError outside a job."""
    if _current is None:
        raise ValueError(
            "there is no job here: Clusters and Pipelines live in one. Start it with "
            "`roll-td run CONFIG`, `torchrun … -m roll_td CONFIG` or `python -m roll_td CONFIG`"
        )
    return _current


class Call:
    """A command under way: its answers, and at the end its landing."""

    def __init__(self, number: int, role: str, method: str, group: Group):
        self.number, self.role, self.method, self.group = number, role, method, group
        self.homes: tuple[int, ...] = ()
        self.owned: tuple[int, ...] = ()
        self.answering: tuple[int, ...] = ()
        self.join = False
        self.sent_at_once: list[Key] = []
        self.in_messages = 0
        """Bytes of buffers that went in control messages for being small in all."""
        self.sent_from: list[int] = []
        self.watches: list[Watch] = []
        self.answers: dict[int, Answer] = {}
        self.landing: Landing | None = None
        self.done = threading.Event()
        self.posted_s = time.time()


class Driver:
    """The state of the log. Frames come by `on_frame`, from one io thread."""

    def __init__(
        self,
        layout: WorldLayout,
        hub: Any,
        transport: Transport,
        fail: Callable[[Cause], None],
        places: Sequence[Any],
        seed: int = 0,
        transfer_timeout_s: float = 1800.0,
    ):
        self.layout, self.hub, self.transport = layout, hub, transport
        self.fail, self.places, self.seed = fail, places, seed
        self.transfer_timeout_s = transfer_timeout_s
        self._step = self._highest_step = 0
        self.trace: TraceWriter | None = None
        self.notices: list[signal.Signals] = []
        """What the launcher has given notice by: the run is to end at the next step."""
        self.restarts = 0
        """How often the launcher has started the ranks again."""
        self.failed: Cause | None = None
        self.pickled = 0
        self.sending = Sending(transport)
        self._log = threading.Lock()
        self._numbers = itertools.count(1)
        self._request_ids = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._gangs: dict[tuple[int, int, int], tuple[Ranks, set[int]]] = {}
        # (command, parcel, member) -> the gang and who has come; all members share one entry
        # held by those who read them: a stream that is dropped is forgotten
        self._replies: weakref.WeakValueDictionary[int, queue.SimpleQueue[Any]] = (
            weakref.WeakValueDictionary()
        )
        self._counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._running: dict[int, dict[int, Call]] = defaultdict(dict)
        self._ended = False
        self._landings: queue.SimpleQueue[tuple[Call, list[Work]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._guard, args=(self._land,), daemon=True).start()

    def install(self) -> None:
        """Make this the driver that Clusters find."""
        global _current
        _current = self

    def _guard(self, body: Callable[[], None]) -> None:
        """An exception in a thread of ours ends the job; by itself it would end only the thread."""
        try:
            body()
        except BaseException as error:  # the driver's edge
            self.fail(Cause.of(error, "driver", self.transport.rank))

    # --- the log ---------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The pipeline's step: what commands do at random follows from it."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        if step > self._highest_step:  # a step that comes again goes on counting
            self._highest_step = step
            self._counts.clear()

    def count_call(self, role: str, method: str) -> int:
        """How often this method was called in this step before."""
        self._counts[role, method] += 1
        return self._counts[role, method] - 1

    def post(
        self,
        op: str,
        body: dict[str, Any],
        call: Call,
        ranks: Sequence[int],
        outgoing: Sequence[Outgoing] = (),
        gang: Ranks = (),
    ) -> Call:
        """Number a command and send it to `ranks`, each with its shares."""
        with self._log:
            if self.failed is not None:
                raise WorkerError(self.failed.render())
            call.number = next(self._numbers)
            head = pickle.dumps((call.number, op, body), 5)
            self.pickled += 1
            try:
                self._calls[call.number] = call
                self._expect_gang(call.number, -1, gang)
                self._send(call, head, ranks, outgoing)
            except BaseException as error:  # some ranks have it: no later command could be in order
                self.fail(Cause.of(error, "driver", self.transport.rank))
                raise
        return call

    def _send(
        self, call: Call, head: bytes, ranks: Sequence[int], outgoing: Sequence[Outgoing]
    ) -> None:
        per_rank: defaultdict[int, list[Outgoing]] = defaultdict(list)
        for out in outgoing:
            for rank in out.receivers:
                per_rank[rank].append(out)
        told: dict[Key, Share] = {}
        owns: dict[tuple[int, ...], tuple[bytes, list[Chunk]]] = {}  # made once, not once a rank
        for rank in ranks:
            mine = per_rank.get(rank, [])
            key = tuple(map(id, mine))
            if key not in owns:
                shares = self._expect(call, mine, told)
                own = pickle.dumps([tuple(share) for share in shares], 5) if mine else b""
                pairs = zip(mine, shares, strict=True)
                owns[key] = own, [chunk for o, share in pairs for chunk in o.inline(share.places)]
            self._running[rank][call.number] = call  # before its answer can come
            self.hub.sender(rank).send(Kind.COMMAND, head, *owns[key])
        hold = pickle.dumps((call.number, "hold", {}), 5) if call.owned else b""
        for rank in call.owned:
            self._running[rank][call.number] = call
            self.hub.sender(rank).send(Kind.COMMAND, hold)
        for at_once in call.sent_at_once:
            self.sending.ready(at_once)

    def _expect(self, call: Call, mine: Sequence[Outgoing], told: dict[Key, Share]) -> list[Share]:
        """Expect what the receivers of shares will say, and give the shares as they are told. A
        rank counts its own shares; those of one gang have the same count on all its members."""
        shares = []
        for index, out in enumerate(mine):
            share, key = out.share, (call.number, out.share.source << 8 | index)
            if key in told:
                share = told[key]
            elif share.is_sent:
                share = told[key] = self._offer(call, key, out)
                if share.copies > 1:
                    self._expect_gang(call.number, index, out.receivers)
            shares.append(share)
        return shares

    def _offer(self, call: Call, key: Key, out: Outgoing) -> Share:
        """How a share is sent that does not go in the control message for its small buffers."""
        share, size = out.share, sum(out.share.sizes)
        is_idle = not self._running[share.source]
        if is_idle and share.copies == 1 and size <= MESSAGE_BYTES:
            call.in_messages += size
            if call.in_messages <= MESSAGES_BYTES:
                return share._replace(in_message=True)
        if is_idle and not out.copies:
            share = share._replace(at_once=True)
            call.sent_at_once.append(key)
        self.sending.offer(key, out, call.group)
        call.watches.append(out.watch)
        return share

    # --- what the ranks say ------------------------------------------------------------------

    def on_frame(self, rank: int, frame: Frame | None) -> None:
        """Handle a frame of a rank; None is its death, unless the job has ended."""
        if frame is None:
            if not self._ended:
                self.fail(self._death(rank))
            return
        if frame.kind is Kind.ANSWER:
            number, worker, kind, spec, times = frame.load()
            self._answer(number, Answer(worker, rank, kind, Spec(*spec), times, frame.inline))
        elif frame.kind is Kind.READY:
            number, index = frame.load()
            self.sending.ready((number, rank << 8 | index))
        elif frame.kind is Kind.ACK:
            number, index = frame.load()
            self.sending.arrived((number, rank << 8 | index))
        elif frame.kind is Kind.AT:
            self._at(rank, frame.load())
        elif frame.kind is Kind.REPLY:
            request, kind, value = frame.load()
            replies = self._replies.get(request)
            if replies is not None:
                replies.put((kind, value))
        elif frame.kind is Kind.ERROR:
            self.fail(frame.load())
        elif frame.kind is Kind.SIGNAL:
            name, at, host = frame.load()
            text = f"the job was told to end by {name}"
            self.fail(Cause("signal", "", None, at, host, name, text, time.time()))

    def _death(self, rank: int) -> Cause:
        host = self.places[rank].host
        running = (f"{call.role}.{call.method}" for call in list(self._running[rank].values()))
        doing = ", ".join(running) or "nothing"
        text = (
            f"rank {rank} died without a word (killed, out of memory, a crash in native code), or "
            f"its machine can't be reached; commands it had not answered: {doing}"
        )
        return Cause("death", "", None, rank, host, doing, text, time.time())

    def _expect_gang(self, number: int, index: int, members: Ranks) -> None:
        gang: tuple[Ranks, set[int]] = (members, set())
        for member in members:
            self._gangs[number, index, member] = gang

    def _at(self, rank: int, key: tuple[int, int]) -> None:
        """A gang starts when all of its members have come to it."""
        members, here = self._gangs[(*key, rank)]
        here.add(rank)
        if len(here) == len(members):
            for member in members:
                del self._gangs[(*key, member)]
                self.hub.sender(member).send(Kind.GO, pickle.dumps(key, 5))

    def _answer(self, number: int, answer: Answer) -> None:
        call = self._calls[number]
        call.answers[answer.worker] = answer
        self._running[answer.rank].pop(number, None)
        if len(call.answers) < len(call.homes):
            return
        for rank in call.owned:
            self._running[rank].pop(number, None)
            self.hub.sender(rank).send(Kind.RELEASE, pickle.dumps(number))
        for key in call.sent_at_once:
            self.sending.arrived(key)
        answers = [call.answers[w] for w in call.answering]
        call.landing = Landing(answers, call.join)
        works = call.landing.receive(self.transport, call.group, number & 0x7FFFFFFF)
        call.sent_from = [a.rank for a in answers if Place.SENT in a.spec.places]
        for rank in call.sent_from:
            self.hub.sender(rank).send(Kind.SEND, pickle.dumps(number))
        if works:
            self._landings.put((call, works))
        else:
            self._finish(call)

    def _land(self) -> None:
        while (item := self._landings.get()) is not None:
            call, works = item
            for work in works:
                work.wait()
            self._finish(call)
            for rank in call.sent_from:
                self.hub.sender(rank).send(Kind.GOT, pickle.dumps(call.number))
            del call, works, item, work  # a result lives no longer than its Refs

    def _finish(self, call: Call) -> None:
        if self.trace is not None:
            runs = [(a.rank, a.times) for a in call.answers.values()]
            name, end_s = f"{call.role}.{call.method}", time.time()
            rank = self.layout.driver_rank
            self.trace.call(name, call.role, call.number, rank, call.posted_s, end_s, runs)
        del self._calls[call.number]
        call.done.set()

    # --- waiting -------------------------------------------------------------------------------

    def wait(self, call: Call) -> Landing:
        """Block until the call has landed. A failure ends the job: then nothing returns."""
        if self.failed is None:
            call.done.wait()
        if self.failed is not None:
            raise WorkerError(self.failed.render())
        for watch in call.watches:
            watch.check(f"{call.role}.{call.method}")
        assert call.landing is not None
        return call.landing

    def on_failure(self, cause: Cause) -> None:
        """Where the job is threads of one process: every waiting call raises."""
        self.failed = self.failed or cause
        for call in list(self._calls.values()):
            call.done.set()
        for replies in list(self._replies.values()):
            replies.put(("failed", b""))

    def request(self, rank: int, cluster: str, method: str, arguments: bytes) -> Iterator[Any]:
        """Call a request method of the worker on `rank` with pickled (args, kwargs); yields what
        it gives."""
        number = next(self._request_ids)
        replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._replies[number] = replies
        head = pickle.dumps((number, cluster, method, arguments), 5)
        self.hub.sender(rank).send(Kind.REQUEST, head)
        return self._stream(replies)

    def _stream(self, replies: queue.SimpleQueue[Any]) -> Iterator[Any]:
        while True:
            kind, value = replies.get()
            if kind == "failed":
                assert self.failed is not None
                raise WorkerError(self.failed.render())
            if kind != "end":
                yield loads_whole(value)
            if kind != "item":
                return

    def drain(self) -> None:
        """Wait until every posted command has finished."""
        for call in list(self._calls.values()):
            self.wait(call)

    def end(self) -> None:
        """Tell every rank that the job is over."""
        self._ended = True
        self._landings.put(None)
        for rank in range(len(self.layout.slots)):
            self.hub.sender(rank).send(Kind.END, b"")
