"""One rank of a job, from its start to its end. Every rank runs `run_job`; one is the driver too.

Main thread: the executor. Daemon threads: a reader of the control channel, a listener to
signals, and on the driver's rank the hub and the pipeline itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from roll_td.config.base import BaseConfig
from roll_td.distributed.world import World, read_world
from roll_td.placement import WorldLayout, world_layout
from roll_td.platform import current_platform, physical_device
from roll_td.runtime import control
from roll_td.runtime.control import Connection, Frame, Hub, Kind
from roll_td.runtime.driver import Driver
from roll_td.runtime.executor import Executor
from roll_td.runtime.failure import Cause, Undertaker, end_process, say, write_error_file
from roll_td.runtime.transport import GlooTransport

logger = logging.getLogger(__name__)

JOIN_S = 300.0
"""How long ranks wait for each other at the start."""
ABORT_S = 5.0
"""How long a rank that has failed waits for the driver to end it."""
SIGNAL_S = 8.0
"""How long a signalled rank waits for the driver to end the job."""
END_S = 10.0
"""How long the driver's rank waits for the others at the end."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs."""

    node: int
    local_rank: int
    host: str
    device: str | None
    """The physical device of its local rank; None without a list of visible ones."""
    pid: int


def run_job(pipeline_cls: type, config: BaseConfig) -> int:
    """Be one rank of the job that the environment tells of. To be called from the main thread.

    Ends the process when the job ends; returns an exit code only if the job can't start.
    """
    world = read_world(os.environ)
    _die_with_parent(world)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a driver can be told
    try:
        store = _join(world)
        places = _exchange_places(store, world)
        layout = _make_layout(store, world, places, config)
        if layout is None:
            return 1
        link, hub = _open_channel(store, world, layout)
        rank = _Rank(world, places, layout, link, config)
    except Exception as error:
        text = Cause.of(error, "exception", world.rank, method="joining the job").render()
        say(text)
        write_error_file(text, full=True)
        end_process(1)
    rank.watch_signals()
    if hub is not None:
        rank.start_driver(hub, pipeline_cls)
    rank.work()
    return 0


def _die_with_parent(world: World) -> None:
    """A launcher that is killed takes its ranks along."""
    if world.launcher not in ("torchrun", "slurm"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


# --- finding each other ----------------------------------------------------------------------


def _join(world: World) -> Any:
    timeout = timedelta(seconds=JOIN_S)
    tcp = dist.TCPStore(
        world.master_addr,
        world.master_port,
        world.world_size,
        is_master=world.rank == 0 and not world.agent_store,
        timeout=timeout,
        wait_for_workers=False,
    )
    store = dist.PrefixStore(f"roll_td/{world.restart}", tcp)
    dist.init_process_group(
        "gloo", store=store, rank=world.rank, world_size=world.world_size, timeout=timeout
    )
    return store


def _exchange_places(store: Any, world: World) -> list[RankPlace]:
    """Everybody's place, through rank 0: each reads one key, not one of every rank."""
    device = physical_device(world.local_rank)
    mine = RankPlace(world.node, world.local_rank, socket.gethostname(), device, os.getpid())
    store.set(f"place/{world.rank}", pickle.dumps(mine))
    if world.rank == 0:
        keys = [f"place/{rank}" for rank in range(world.world_size)]
        store.set("places", pickle.dumps([pickle.loads(p) for p in store.multi_get(keys)]))
    places: list[RankPlace] = pickle.loads(store.get("places"))
    return places


def _make_layout(
    store: Any, world: World, places: list[RankPlace], config: BaseConfig
) -> WorldLayout | None:
    """The layout; None where the world doesn't fit the config, which rank 0 has then said."""
    try:
        return world_layout(
            [(p.node, p.local_rank) for p in places],
            config.num_nodes,
            config.num_gpus_per_node or 0,
        )
    except ValueError as error:
        text = f"roll-td: {error}"
    if world.rank == 0:
        say(text)
    write_error_file(text, full=True)
    # a launcher ends all ranks once one has gone: nobody goes before rank 0 has spoken, and rank
    # 0, which may host the store, goes last
    with contextlib.suppress(Exception):
        if world.rank == 0:
            store.set("told", b"1")
            _wait_count(store, "heard", world.world_size - 1)
        else:
            store.wait(["told"], timedelta(seconds=ABORT_S))
            store.add("heard", 1)
    return None


def _wait_count(store: Any, key: str, count: int) -> None:
    deadline = time.monotonic() + ABORT_S
    while store.add(key, 0) < count and time.monotonic() < deadline:
        time.sleep(0.02)


def _open_channel(store: Any, world: World, layout: WorldLayout) -> tuple[Connection, Hub | None]:
    """This rank's link to the driver, and on the driver's rank the hub."""
    server = None
    if world.rank == layout.driver_rank:
        server = control.listen()
        token = secrets.token_hex(16)
        addresses = _own_addresses(world, layout.num_nodes)
        store.set("driver", pickle.dumps((addresses, server.getsockname()[1], token)))
    addresses, port, token = pickle.loads(store.get("driver"))
    link = control.connect(addresses, port, token, world.rank)
    if server is None:
        return link, None
    with server:
        return link, Hub(control.accept(server, token, world.world_size, JOIN_S))


def _own_addresses(world: World, num_nodes: int) -> list[str]:
    """Where other ranks may reach this one, best first."""
    if num_nodes == 1:
        return ["127.0.0.1", socket.gethostname()]
    found = []
    with contextlib.suppress(OSError):
        info = socket.getaddrinfo(
            world.master_addr, world.master_port or 9, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
            probe.connect(info[4])  # sends nothing; picks the interface
            found.append(str(probe.getsockname()[0]))
    found.append(socket.gethostname())
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return [*dict.fromkeys(a for a in found if not a.startswith("127.")), "127.0.0.1"]


# --- being a rank ----------------------------------------------------------------------------


class _Rank:
    """What one process of the job consists of."""

    def __init__(
        self,
        world: World,
        places: list[RankPlace],
        layout: WorldLayout,
        link: Connection,
        config: BaseConfig,
    ):
        self.world, self.places, self.layout = world, places, layout
        self.link, self.config = link, config
        self.rank, self.host = world.rank, places[world.rank].host
        self.driver_rank = layout.driver_rank
        self.is_driver = self.rank == self.driver_rank
        self.aborting = threading.Event()
        """This rank has failed, or is being ended: signals have nothing to add."""
        self.ended = threading.Event()
        self.undertaker: Undertaker | None = None
        self.driver_thread: threading.Thread | None = None
        self.reader: threading.Thread | None = None
        self.transport = GlooTransport(self.rank)
        on_device = layout.slots[self.rank].device is not None
        device = current_platform.device(world.local_rank) if on_device else torch.device("cpu")
        self.executor = Executor(
            rank=self.rank,
            host=self.host,
            link=link,
            transport=self.transport,
            driver_rank=self.driver_rank,
            device=device,
            local_rank=world.local_rank,
            on_error=self.on_error,
        )

    def work(self) -> None:
        """Run commands until the job ends, then end the process."""
        self.reader = _start("reader", self._read)
        try:
            self.executor.run()
        except BaseException as error:  # the rank's edge
            self._report(error, "the executor")
        if not self.ended.is_set():
            self._give_up()  # another thread of this rank has failed, and reported it
        if self.driver_thread is not None:
            self.driver_thread.join(END_S)
        if self.undertaker is not None:
            # an early end could reset connections whose END has not been read, and may take the
            # store along
            self.undertaker.wait_gone(END_S)
            if self.undertaker.ending:
                threading.Event().wait()  # it ends the process
        end_process(0)

    def on_error(self, *_: Any) -> None:
        """This rank has told the driver of its failure, and waits to be ended."""
        self.aborting.set()
        if threading.current_thread() is self.reader:
            _start("failed", self._give_up)  # the reader has to hear the abort
        else:
            self._give_up()

    def _give_up(self) -> None:
        self.aborting.set()
        threading.Event().wait(ABORT_S)
        if self.undertaker is not None and self.undertaker.ending:
            threading.Event().wait(ABORT_S)
        os._exit(1)

    def _report(self, error: BaseException, doing: str) -> None:
        self.aborting.set()
        cause = Cause.of(error, "exception", self.rank, method=doing, host=self.host)
        with contextlib.suppress(OSError):
            self.link.send(Kind.ERROR, pickle.dumps(cause, 5))
        self._give_up()

    # --- the control channel -----------------------------------------------------------------

    def _read(self) -> None:
        try:
            while (frame := self.link.receive()) is not None:
                if frame.kind is Kind.ABORT:
                    if self.is_driver:
                        continue  # the undertaker ends this process, last
                    self._aborted(frame.load())
                if frame.kind is Kind.END:
                    self.ended.set()
                self.executor.on_frame(frame)
        except BaseException as error:  # else the rank would be deaf
            self._report(error, "the reader of the control channel")
        if not self.ended.is_set() and not self.is_driver:
            self._orphaned()

    def _aborted(self, text: str) -> None:
        had_failed = self.aborting.is_set()
        self.aborting.set()
        write_error_file(text, full=had_failed or self.world.local_rank == 0)
        end_process(1)

    def _orphaned(self) -> None:
        self.aborting.set()
        driver_host = self.places[self.driver_rank].host
        text = (
            f"roll-td: the driver is gone: rank {self.driver_rank} on {driver_host} died without a "
            "word (killed, out of memory, or a crash in native code)"
        )
        others = [
            p.local_rank
            for rank, p in enumerate(self.places)
            if p.node == self.world.node and rank != self.driver_rank
        ]
        speaks = self.world.local_rank == min(others)
        if speaks:
            say(text)
        write_error_file(text, full=speaks)
        end_process(1)

    # --- signals -----------------------------------------------------------------------------

    def watch_signals(self) -> None:
        """Pass SIGTERM and SIGINT on to the driver, even while the main thread is in C++."""
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self._wakeup = writing  # open as long as the process
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        _start("signals", lambda: self._pass_on(reading))

    def _pass_on(self, reading: socket.socket) -> None:
        while data := reading.recv(64):
            numbers = [n for n in data if n in (signal.SIGTERM, signal.SIGINT)]
            if not numbers or self._is_ending():
                continue
            timer = threading.Timer(SIGNAL_S, os._exit, (128 + numbers[0],))
            timer.daemon = True
            timer.start()
            head = pickle.dumps((signal.Signals(numbers[0]).name, self.rank, self.host), 5)
            # by a thread: the link may be held by a send that waits
            _start("signal", lambda head=head: self._tell(head))

    def _tell(self, head: bytes) -> None:
        with contextlib.suppress(OSError):
            self.link.send(Kind.SIGNAL, head)

    def _is_ending(self) -> bool:
        by_driver = self.undertaker is not None and self.undertaker.ending
        return by_driver or self.aborting.is_set()

    # --- the driver --------------------------------------------------------------------------

    def start_driver(self, hub: Hub, pipeline_cls: type) -> None:
        """Start hub and pipeline in threads of their own."""
        self._announce()
        hosts = [p.host for p in self.places]
        undertaker = Undertaker(hub, hosts, lambda _: self.aborting.set(), own_rank=self.rank)
        self.undertaker = undertaker
        driver = Driver(
            self.layout,
            hub,
            self.transport,
            undertaker.fail,
            self.places,
            seed=self.config.seed,
            transfer_timeout_s=self.config.transfer_timeout_s,
        )
        driver.install()
        _start("hub", lambda: self._serve(hub, driver, undertaker))
        self.driver_thread = _start("driver", lambda: self._drive(driver, pipeline_cls, undertaker))

    def _announce(self) -> None:
        for slot in self.layout.slots:
            place = self.places[slot.rank]
            if slot.device is not None and place.device is not None:
                print(f"device {slot.device} -> physical {place.device} ({place.host})", flush=True)
        for warning in self.layout.warnings:
            logger.warning(warning)
        if self.layout.slots[self.rank].device is not None:
            # a thread that computes in Python otherwise holds the others up by 5 ms each time
            sys.setswitchinterval(5e-6)

    def _serve(self, hub: Hub, driver: Driver, undertaker: Undertaker) -> None:
        def on_frame(rank: int, frame: Frame | None) -> None:
            if frame is None:
                undertaker.eof(rank)
            driver.on_frame(rank, frame)

        try:
            hub.serve(on_frame)
        except BaseException as error:  # else the job would hang
            undertaker.fail(Cause.of(error, "driver", self.rank, host=self.host))
            _wait_ends(hub, undertaker)

    def _drive(self, driver: Driver, pipeline_cls: type, undertaker: Undertaker) -> None:
        try:
            pipeline = pipeline_cls(self.config)
            pipeline.run()
            if hasattr(pipeline, "close"):
                pipeline.close()
            driver.drain()
            if not undertaker.ending:
                driver.end()
        except BaseException as error:  # the driver's edge
            undertaker.fail(Cause.of(error, "driver", self.rank, host=self.host))


def _wait_ends(hub: Hub, undertaker: Undertaker) -> None:
    """Only ends of file matter any more: frames may be torn, sockets don't wait."""
    with selectors.DefaultSelector() as selector:
        for rank, connection in enumerate(hub.connections):
            selector.register(connection.sock, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                try:
                    ended = not sock.recv(1 << 16)
                except BlockingIOError:
                    continue
                except OSError:
                    ended = True
                if ended:
                    selector.unregister(sock)
                    undertaker.eof(key.data)


def _start(name: str, target: Any) -> threading.Thread:
    thread = threading.Thread(target=target, name=f"roll-td {name}", daemon=True)
    thread.start()
    return thread
