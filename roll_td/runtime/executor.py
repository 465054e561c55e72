"""The executor: a rank's end of the command log, and the workers that live on the rank.

The main thread takes commands in order, one at a time. The reader thread (`on_frame`) queues
them, and at once does what must not wait: start a gang, send an answer's bytes, free them.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roll_td.config.classes import import_class, import_object
from roll_td.distributed.topology import mesh_shape
from roll_td.platform import current_platform, physical_device
from roll_td.runtime.answers import Doing, Encoded, Given, Outbox, Unfetched, dump_result, encode
from roll_td.runtime.arrivals import Arrivals, Command
from roll_td.runtime.control import Frame, Kind, Sender
from roll_td.runtime.failure import Cause
from roll_td.runtime.seeding import kept_random_state, seed_command
from roll_td.runtime.together import Here
from roll_td.runtime.transport import Group, Transport
from roll_td.runtime.wire import dumps_whole, loads_whole
from roll_td.runtime.worker import WorkerContext

_IDLE = Doing("", None, "")


@dataclass
class _Seated:
    """A worker of this rank."""

    worker: Any
    role: str
    rank: int
    """Its rank in the role."""
    data_group: Group
    groups: dict[str, Group]
    """The role's groups that it is in, by name."""


class Executor:
    """Carries out the commands of one rank."""

    def __init__(
        self,
        rank: int,
        host: str,
        link: Sender,
        transport: Transport,
        driver_rank: int,
        device: torch.device,
        local_rank: int,
        on_error: Callable[[Cause], None],
    ):
        self.rank, self.host, self.link, self.transport = rank, host, link, transport
        self.driver_rank, self.device, self.local_rank = driver_rank, device, local_rank
        self.on_error = on_error
        self._changed = threading.Condition(threading.RLock())
        # all below is guarded by it, but for the main thread's looks at what only it takes away
        self._queue: deque[Command] = deque()
        self._workers: dict[str, _Seated] = {}
        self._go: set[tuple[int, int]] = set()
        self._released: set[int] = set()
        self._outbox = Outbox(transport, driver_rank)
        self._ahead: Arrivals | None = None
        self._may_prefetch = False
        self._ended = False
        self._failed = False
        self._doing = _IDLE  # the main thread's

    # --- the reader thread ------------------------------------------------------------------

    def on_frame(self, frame: Frame | None) -> None:
        """Handle a frame of the driver. ABORT and the end of file are the caller's to handle."""
        if frame is None:
            return
        try:
            if frame.kind is Kind.REQUEST:
                threading.Thread(target=self._request, args=(frame,), daemon=True).start()
                return
            with self._changed:
                self._handle(frame)
                self._changed.notify_all()
        except BaseException as error:  # a thread's edge: without this only the thread would end
            self._fail(Doing("", None, frame.kind.name), error)

    def _handle(self, frame: Frame) -> None:
        if frame.kind is Kind.COMMAND:
            self._queue.append(Command(frame))
            self._prefetch()
        elif frame.kind is Kind.GO:
            self._go.add(frame.load())
        elif frame.kind is Kind.RELEASE:
            self._released.add(frame.load())
        elif frame.kind is Kind.SEND:
            self._outbox.send(frame.load())
        elif frame.kind is Kind.GOT:
            self._outbox.free(frame.load())
        elif frame.kind is Kind.END:
            self._ended = True

    def _wait(self, ready: Callable[[], Any]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: ready() or self._failed)
            if self._failed:
                raise _Stopped

    # --- the main thread --------------------------------------------------------------------

    def run(self) -> None:
        """Carry out commands until the driver says END, or something fails."""
        current_platform.use(self.device)
        with contextlib.suppress(_Stopped):
            while (command := self._next()) is not None:
                try:
                    self._execute(command)
                except BaseException as error:  # sys.exit in a worker is a failure too
                    return self._fail(self._doing, error)
                del command

    def _next(self) -> Command | None:
        self._doing = _IDLE
        with self._changed:
            while not (self._ended or self._failed or (self._queue and self._outbox.is_ready)):
                self._changed.wait()
            if self._failed:
                raise _Stopped
            self._outbox.settle()
            return self._queue.popleft() if self._queue else None

    def _execute(self, command: Command) -> None:
        self._doing = Doing("", None, "(unpickling a command)")
        number, op, body = command.load()
        started = time.time()
        if op == "call":
            return self._call(command, started)
        if op == "together":
            return self._together(command, started)
        if op == "hold":
            self._doing = Doing("", None, "hold")
            self._let_prefetch()
            self._wait(lambda: number in self._released)
            self._may_prefetch = False
            return self._released.discard(number)
        if op == "groups":
            self._doing = Doing("", None, "groups")
            if self.rank in body["members"]:
                self._gang((number, -1))
            self.transport.make_groups(body["groups"])
            worker = self.rank
        else:
            worker = self._build(body)
        times = (command.received, started, started, time.time())
        self._send(Kind.ANSWER, (number, worker, "none", (), times))

    def _build(self, body: dict[str, Any]) -> int:
        """Make the worker of a role that lives here; gives its rank in the role."""
        role, seats = body["role"], body["seats"]
        seat = next(s for s in seats if s.ranks[0] == self.rank)
        self._doing = Doing(role, seat.worker, "__init__")
        cls: Any = import_class(body["worker_cls"])
        mine = {n: g for n, each in body["groups"].items() for g in each if self.rank in g.ranks}
        groups = {name: self.transport.group(group) for name, group in mine.items()}
        beside = [self.local_rank + r - self.rank for r in seat.ranks]
        context = WorkerContext(
            role=role,
            rank=seat.worker,
            world_size=len(seats),
            rank_info=body["infos"][seat.worker],
            local_rank=self.local_rank,
            host=self.host,
            groups=groups,
            mesh_spec=(*mesh_shape(body["topology"]), tuple(s.ranks[0] for s in seats)),
            device=self.device if seat.devices else torch.device("cpu"),
            devices=seat.devices,
            physical_devices=tuple(physical_device(r) for r in beside) if seat.devices else (),
            master_addr=body["master_addr"],
            master_port=body["master_port"],
        )
        with self._own_draws():
            seed_command(body["seed"], role, seat.worker, -1, "__init__", 0)
            worker = cls.__new__(cls)
            worker.context = context
            worker.__init__(body["worker_config"])
        with self._changed:
            seated = _Seated(worker, role, seat.worker, body["data_group"], mine)
            self._workers[body["cluster"]] = seated
            self._changed.notify_all()
        return int(seat.worker)

    def _call(self, command: Command, started: float) -> None:
        number, _, body = command.load()
        seated = self._workers[body["cluster"]]
        method = body["method"]
        self._doing = Doing(seated.role, seated.rank, method)
        args, kwargs, given = self._receive(command, seated)
        here = time.time()
        self._let_prefetch()
        with self._own_draws():
            seed_command(
                body["seed"], seated.role, seated.rank, body["step"], method, body["count"]
            )
            result = getattr(seated.worker, method)(*args, **kwargs)
            del args, kwargs
            if body["clear_cache"]:
                current_platform.empty_cache()
        self._may_prefetch = False
        times = (command.received, started, here, time.time())
        if result is None or seated.rank not in body["answering"]:
            self._send(Kind.ANSWER, (number, seated.rank, "none", (), times))
        else:
            answer = encode(result, given, self._doing, body["room"])
            self._answer(number, seated, answer, times)

    def _together(self, command: Command, started: float) -> None:
        number, _, body = command.load()
        here = [self._workers[name] for name in body["clusters"] if name in self._workers]
        place, function = body["ranks"].index(self.rank), body["function"]
        self._doing = Doing(here[0].role, here[0].rank, function.rpartition(".")[2])
        self._let_prefetch()
        with self._own_draws():
            if self.rank in body["members"]:
                self._gang((number, -1))
            began = time.time()
            seed_command(body["seed"], body["role"], place, body["step"], function, body["count"])
            workers = {seated.role: seated.worker for seated in here}
            given = Here(self.rank, workers, self.transport)
            result = import_object(function)(given, **body["arguments"])
        self._may_prefetch = False
        answer = encode(result, Given(None, None), self._doing, room=0)
        if answer.sent:
            nbytes = sum(buffer.numel() for buffer in answer.sent)
            raise ValueError(
                f"{function} gave {nbytes} bytes of tensors; leave them with the workers, and "
                "return what the driver decides by"
            )
        times = (command.received, started, began, time.time())
        head = (number, place, answer.kind, tuple(answer.spec), times)
        self._send(Kind.ANSWER, head, answer.inline)

    def _own_draws(self) -> contextlib.AbstractContextManager[None]:
        """What a worker draws does not move the driver's random states."""
        return kept_random_state() if self.rank == self.driver_rank else contextlib.nullcontext()

    # --- what comes in ----------------------------------------------------------------------

    def _gang(self, key: tuple[int, int]) -> None:
        """Start a collective with the other members when all of them have come to it."""
        self._send(Kind.AT, key)
        self._wait(lambda: key in self._go)
        self._go.discard(key)

    def _receive(
        self, command: Command, seated: _Seated
    ) -> tuple[tuple[Any, ...], dict[str, Any], Given]:
        """The arguments of a call, and what they say of its result's rows."""
        arrivals, self._ahead = self._ahead, None
        if arrivals is None:
            arrivals = self._arrivals(command, seated.data_group)
            arrivals.wait()
        elif arrivals.waiter is not None:
            arrivals.waiter.join()
            self._wait(lambda: True)  # stop if it failed
        for index, share, buffers in arrivals.shared():
            assert share.group is not None, "several receivers, and no group for them"
            self._gang((arrivals.number, index))
            for buffer in buffers:
                group = seated.groups[share.group]
                self.transport.broadcast(buffer, share.source, group).wait()
        args, kwargs, inputs = arrivals.arguments()
        # looked at now: the method may change the columns
        given = (Given.of(data) for data in inputs)
        return args, kwargs, next((g for g in given if g.lengths is not None), Given(None, None))

    def _arrivals(self, command: Command, group: Group) -> Arrivals:
        return Arrivals(command, self.transport, self.link, self.driver_rank, group)

    def _let_prefetch(self) -> None:
        """From now on, until `_may_prefetch` is taken back, the rows of the next command may come
        in. Either this thread sees that command in the queue, or the reader sees that it may."""
        self._may_prefetch = True
        if self._queue:
            with self._changed:
                self._prefetch()

    def _prefetch(self) -> None:
        """Post the receives of the next command, if it asks for that. One command ahead. Its user
        holds the lock, and so does who takes the command off the queue."""
        if not self._may_prefetch or not self._queue or self._ahead is not None:
            return
        command = self._queue[0]
        if not len(command.frame.own):
            return  # nothing comes with it
        _, op, body = command.load()
        seated = self._workers.get(body["cluster"]) if op == "call" and body["prefetch"] else None
        if seated is None:
            return
        ahead = self._arrivals(command, seated.data_group)
        if ahead.are_awaited:
            doing = Doing(seated.role, seated.rank, body["method"])
            ahead.waiter = threading.Thread(target=self._wait_for, args=(ahead, doing), daemon=True)
            ahead.waiter.start()
        self._ahead = ahead

    def _wait_for(self, arrivals: Arrivals, doing: Doing) -> None:
        try:
            arrivals.wait()
        except BaseException as error:  # a thread's edge
            self._fail(doing, error)

    # --- what goes out ----------------------------------------------------------------------

    def _send(self, kind: Kind, head: Any, inline: Sequence[memoryview] = ()) -> None:
        self.link.send(kind, pickle.dumps(head, 5), b"", inline)

    def _answer(
        self, number: int, seated: _Seated, answer: Encoded, times: tuple[float, ...]
    ) -> None:
        if answer.sent:
            with self._changed:
                self._outbox.put(number, Unfetched(answer.sent, answer.shared, seated.data_group))
        times = (*times[:3], time.time())
        head = (number, seated.rank, answer.kind, tuple(answer.spec), times)
        self._send(Kind.ANSWER, head, answer.inline)

    # --- requests ---------------------------------------------------------------------------

    def _request(self, frame: Frame) -> None:
        """Call a request method, beside the commands, and stream what it gives."""
        doing = Doing("", None, "(unpickling a request)")
        try:
            number, cluster, method, arguments = frame.load()
            args, kwargs = loads_whole(arguments)
            self._wait(lambda: cluster in self._workers)
            seated = self._workers[cluster]
            doing = Doing(seated.role, seated.rank, method)
            current_platform.use(self.device)
            result = getattr(seated.worker, method)(*args, **kwargs)
            if inspect.isgenerator(result):
                for item in result:
                    self._reply(number, "item", item, doing)
                self._reply(number, "end", None, doing)
            else:
                self._reply(number, "value", result, doing)
        except _Stopped:
            return
        except BaseException as error:  # a thread's edge
            self._fail(doing, error)

    def _reply(self, number: int, kind: str, value: Any, doing: Doing) -> None:
        self._send(Kind.REPLY, (number, kind, dump_result(dumps_whole, value, value, doing)))

    # --- failure ----------------------------------------------------------------------------

    def _fail(self, doing: Doing, error: BaseException) -> None:
        """Report the first error of this rank and stop."""
        with self._changed:
            if self._failed:
                return  # _Stopped, or an error that follows from the first
            self._failed = True
            self._changed.notify_all()
        text = "".join(traceback.format_exception(error))
        where = (doing.role, doing.worker, self.rank, self.host, doing.method)
        cause = Cause("exception", *where, text, time.time())
        with contextlib.suppress(OSError):  # the driver is gone: on_error still hears of it
            self._send(Kind.ERROR, cause)
        self.on_error(cause)


class _Stopped(BaseException):
    """This rank has failed in another thread."""
