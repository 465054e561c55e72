"""One rank of a job, from its start to its end. Every rank runs `run_job`; one is the driver too.

Main thread: the executor. Daemon threads: a reader of the control channel, a watch over the
lifeline, a listener to signals, and on the driver's rank the hub and the pipeline itself.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from typing import Any

import torch

from roll_td.config.base import BaseConfig
from roll_td.config.schema import ConfigError
from roll_td.distributed.world import World
from roll_td.platform import current_platform, keep_freed_memory
from roll_td.runtime.control import Connection, Frame, Hub, Kind, is_lost
from roll_td.runtime.driver import Driver
from roll_td.runtime.executor import Executor
from roll_td.runtime.failure import Cause, Undertaker, end_process, say, write_error_file
from roll_td.runtime.notices import Stopped, await_notices, leave_notices
from roll_td.runtime.process import end_with, outlive_lifelines, pass_signals_on
from roll_td.runtime.rendezvous import Meeting, join_collectives, meet, open_channel
from roll_td.runtime.transport import GlooTransport

logger = logging.getLogger(__name__)

ABORT_S = 7.0
"""How long a rank that has failed waits for the driver to end it: longer than DRIVER_GRACE_S."""
SIGNAL_S = 8.0
"""How long a signalled rank waits for the driver to end the job."""
END_S = 10.0
"""How long the driver's rank waits for the others at the end."""
DRIVER_GRACE_S = 5
"""How long the driver may outlive a rank; it needs up to 3 s to tell all and to print why."""
FOLLOWS_S = 1.0
"""How soon after the driver's end a rank that waits on it fails."""
RANK_GRACE_S = 3
"""How long a rank may outlive the driver."""


def run_job(world: World, pipeline_cls: type, config: BaseConfig) -> int:
    """Be one rank of the job. To be called from the main thread.

    Ends the process when the job ends; returns an exit code only if the job can't start.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a driver can be told
    keep_freed_memory()
    try:
        meeting = meet(world, config)
        if meeting is None:
            return 1
        link, lifeline, hub = open_channel(meeting, config.node_timeout_s)
        rank = _Rank(meeting, link, lifeline, config)
    except Exception as error:  # the rank's edge: nobody else can end it yet
        text = Cause.of(error, "exception", world.rank, method="joining the job").render()
        say(text)
        write_error_file(text, full=True)
        end_process(1)
    pass_signals_on(rank.on_signal)
    await_notices(os.environ, rank.on_notice)
    gc.freeze()  # else a collection looks through all that imports have made: 35 ms
    if hub is not None:
        rank.start_driver(hub, pipeline_cls)
    rank.work()
    return 0


class _Rank:
    """What one process of the job consists of."""

    def __init__(
        self, meeting: Meeting, link: Connection, lifeline: socket.socket, config: BaseConfig
    ):
        self.meeting, self.link, self.lifeline, self.config = meeting, link, lifeline, config
        self.world, self.places, self.layout = meeting.world, meeting.places, meeting.layout
        self.rank, self.host = self.world.rank, self.places[self.world.rank].host
        self.driver_rank = self.layout.driver_rank
        self.is_driver = self.rank == self.driver_rank
        self.aborting = threading.Event()
        """This rank has failed, or is being ended: signals have nothing to add."""
        self.own_cause: Cause | None = None
        """Why this rank has failed, if it has."""
        self.ended = threading.Event()
        self.undertaker: Undertaker | None = None
        self.driver: Driver
        """Of the driver's rank."""
        self.driver_thread: threading.Thread | None = None
        self.reader: threading.Thread | None = None
        self.transport = GlooTransport(self.rank)
        on_device = self.layout.slots[self.rank].device is not None
        local = self.world.local_rank
        self.executor = Executor(
            rank=self.rank,
            host=self.host,
            link=link,
            transport=self.transport,
            driver_rank=self.driver_rank,
            device=current_platform.device(local) if on_device else torch.device("cpu"),
            local_rank=local,
            on_error=self.on_error,
        )

    def work(self) -> None:
        """Run commands until the job ends, then end the process."""
        self.reader = _start("reader", self._read)
        if not self.is_driver:
            end_with(self.lifeline, RANK_GRACE_S)
            _start("lifeline", self._watch)
        doing = "joining the job"
        try:
            join_collectives(self.meeting)
            doing = "the executor"
            self.executor.run()
        except BaseException as error:  # the rank's edge
            self._report(error, doing)
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

    # --- failure -----------------------------------------------------------------------------

    def on_error(self, cause: Cause) -> None:
        """This rank has told the driver of its failure, and waits to be ended."""
        self.own_cause = cause
        self.aborting.set()
        if threading.current_thread() is self.reader:
            _start("failed", self._give_up)  # the reader has to hear the abort
        else:
            self._give_up()

    def _report(self, error: BaseException, doing: str) -> None:
        self.aborting.set()
        cause = Cause.of(error, "exception", self.rank, method=doing, host=self.host)
        with contextlib.suppress(OSError):  # the driver is gone
            self.link.send(Kind.ERROR, pickle.dumps(cause, 5))
        self.on_error(cause)

    def _give_up(self) -> None:
        """Wait to be ended, by the abort; it does not come from a driver that is stuck in C."""
        self.aborting.set()
        self._cut_lifeline()
        threading.Event().wait(ABORT_S)
        if self.undertaker is not None and self.undertaker.ending:
            threading.Event().wait(ABORT_S)
        self._orphaned("does not answer")

    def _cut_lifeline(self) -> None:
        """Have the driver end within DRIVER_GRACE_S, if only by force."""
        if not self.is_driver:
            with contextlib.suppress(OSError):  # the driver is gone
                self.lifeline.shutdown(socket.SHUT_WR)

    def _aborted(self, text: str) -> None:
        had_failed = self.aborting.is_set()
        self.aborting.set()
        write_error_file(text, full=had_failed or self.world.local_rank == 0)
        end_process(1)

    def _orphaned(self, how: str) -> None:
        """End without the driver: nobody else can say why."""
        self.aborting.set()
        host = self.places[self.driver_rank].host
        text = f"roll-td: the driver (rank {self.driver_rank} on {host}) {how}"
        others = [
            p.local_rank
            for rank, p in enumerate(self.places)
            if p.node == self.world.node and rank != self.driver_rank
        ]
        speaks = self.world.local_rank == min(others, default=0)
        # an error of just now may follow from the driver's end
        if self.own_cause is not None and time.time() - self.own_cause.time_s > FOLLOWS_S:
            text, speaks = self.own_cause.render(), True
        if speaks:
            say(text)
        write_error_file(text, full=speaks)
        end_process(1)

    # --- the driver's words, and its silence -------------------------------------------------

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
            self._orphaned("died without a word (killed, out of memory, or a crash in native code)")

    def _watch(self) -> None:
        if is_lost(self.lifeline):
            self._orphaned("can't be reached any more")

    def on_signal(self, number: signal.Signals) -> None:
        """Pass a signal on to the driver, which ends the job."""
        if self.aborting.is_set() or (self.undertaker is not None and self.undertaker.ending):
            return
        timer = threading.Timer(SIGNAL_S, os._exit, (128 + number,))
        timer.daemon = True
        timer.start()
        self._cut_lifeline()
        # by a thread: the link may be held by a send that waits
        _start("signal", lambda: self._tell(pickle.dumps((number.name, self.rank, self.host), 5)))

    def on_notice(self, number: signal.Signals) -> None:
        """Pass a notice on to the driver, which ends the run at its next step."""
        _start("notice", lambda: self._tell(pickle.dumps(int(number), 5), Kind.NOTICE))

    def _tell(self, head: bytes, kind: Kind = Kind.SIGNAL) -> None:
        with contextlib.suppress(OSError):  # the driver is gone, and with it the job
            self.link.send(kind, head)

    # --- the driver --------------------------------------------------------------------------

    def start_driver(self, hub: Hub, pipeline_cls: type) -> None:
        """Start hub and pipeline in threads of their own."""
        self._announce()
        hosts = [p.host for p in self.places]
        undertaker = Undertaker(hub, hosts, self.aborting.set, self._save_trace, self.rank)
        self.undertaker = undertaker
        self.driver = Driver(
            self.layout,
            hub,
            self.transport,
            undertaker.fail,
            self.places,
            seed=self.config.seed,
            transfer_timeout_s=self.config.transfer_timeout_s,
        )
        self.driver.restarts = self.world.restart + int(os.environ.get("ROLL_TD_RESTARTS", "0"))
        self.driver.install()
        for rank, lifeline in enumerate(hub.lifelines):
            if rank != self.rank:
                end_with(lifeline, DRIVER_GRACE_S)
        _start("hub", lambda: self._serve(hub, undertaker))
        self.driver_thread = _start("driver", lambda: self._drive(pipeline_cls, undertaker))

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

    def _serve(self, hub: Hub, undertaker: Undertaker) -> None:
        def on_frame(rank: int, frame: Frame | None) -> None:
            if frame is None:
                undertaker.eof(rank)
            elif frame.kind is Kind.NOTICE:
                self._note(signal.Signals(frame.load()))
                return
            self.driver.on_frame(rank, frame)

        def only_ends(rank: int, frame: Frame | None) -> None:
            if frame is None:
                undertaker.eof(rank)

        try:
            hub.serve(on_frame)
        except BaseException as error:  # else the job would hang
            undertaker.fail(Cause.of(error, "driver", self.rank, host=self.host))
            hub.serve(only_ends)

    def _drive(self, pipeline_cls: type, undertaker: Undertaker) -> None:
        try:
            if problems := self.config.outside_problems():  # where torchrun or srun start the ranks
                raise ConfigError(problems)  # nobody else has looked
            pipeline = pipeline_cls(self.config)
            is_stopped = _runs_until_stopped(pipeline)
            if hasattr(pipeline, "close"):
                pipeline.close()
            self.driver.drain()
            if is_stopped:
                leave_notices(os.environ, self.driver.notices)
            if not undertaker.ending:
                outlive_lifelines()
                self.driver.end()
        except BaseException as error:  # the driver's edge
            undertaker.fail(Cause.of(error, "driver", self.rank, host=self.host))

    def _note(self, number: signal.Signals) -> None:
        """Remember a notice, which each rank passes on; a repeated one says nothing new."""
        if number not in self.driver.notices:
            logger.info("%s: the run ends after this step, with a checkpoint", number.name)
            self.driver.notices.append(number)

    def _save_trace(self) -> None:
        if self.driver.trace is not None:
            with contextlib.suppress(OSError):  # the disk is full: that may be why we are here
                self.driver.trace.close()


def _runs_until_stopped(pipeline: Any) -> bool:
    """Run a pipeline; whether a notice has ended it."""
    try:
        pipeline.run()
    except Stopped as stopped:
        logger.info("%s", stopped)
        return True
    return False


def _start(name: str, target: Any) -> threading.Thread:
    thread = threading.Thread(target=target, name=f"roll-td {name}", daemon=True)
    thread.start()
    return thread
