"""Failures: which rank, method and field; every waiting call hears of it; nothing hangs."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from roll_td import DataProto, Dispatch, Worker, WorkerError, get, register, register_request
from roll_td.config.base import WorkerConfig
from roll_td.placement import planned_places
from roll_td.runtime.cluster import Cluster, ResourceManager
from roll_td.runtime.inprocess import LocalJob
from roll_td.runtime.transport import LocalTransport

MakeRole = Callable[..., Cluster]


class Fails(Worker):
    release = threading.Event()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raises_on(self, rank: int) -> Any:
        if self.rank == rank:
            raise ValueError("seven is not a vegetable")
        return Fails.release.wait(2)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gives(self, what: str) -> Any:
        lock = threading.Lock()
        if self.rank != 1:
            return None
        return {
            "nested": {"fine": 1, "deep": [1, (lock,)]},
            "batch": DataProto({"x": torch.ones(1)}, {"o": [{"k": lock}]}),
            "meta": DataProto(None, None, {"config": {"lock": lock}}),
            "function": lambda: 1,
        }[what]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def takes(self, *args: Any, **kwargs: Any) -> int:
        return len(args) + len(kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def exits(self) -> None:
        raise SystemExit(3)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def split(self, data: DataProto) -> Any:
        return data

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def uneven(self, data: DataProto, how: str) -> Any:
        odd = self.rank == 1
        n = len(data)
        return {
            "name": DataProto({"b" if odd else "a": torch.zeros(n)}),
            "dtype": DataProto({"a": torch.zeros(n, dtype=torch.int32 if odd else torch.float32)}),
            "shape": DataProto({"a": torch.zeros(n, 3 if odd else 2)}),
            "kind": DataProto(None, {"a": [0] * n}) if odd else DataProto({"a": torch.zeros(n)}),
            "type": [1] * n if odd else data,
            "meta": DataProto(meta_info={"eos": 2 if odd else 1}),
            "metric": DataProto(meta_info={"metrics": {"m": "text" if odd else 1.0}}),
        }[how]

    @register_request
    def ask(self) -> None:
        raise KeyError("no door")

    @register_request
    def locked(self) -> Any:
        return [threading.Lock()]


class BadInit(Worker):
    def __init__(self, worker_config: WorkerConfig):
        super().__init__(worker_config)
        if self.rank == 1:
            raise RuntimeError("no room")


def failing(worker_cls: type = Fails, act: Callable[[Cluster], Any] = lambda c: None) -> str:
    """The message of the WorkerError that `act` meets in a job of three workers."""
    Fails.release.clear()
    try:
        with pytest.raises(WorkerError) as caught, LocalJob(planned_places(1, 3, 1), 1, 3):
            config = WorkerConfig(name="role", device_mapping=[0, 1, 2])
            act(Cluster("role", worker_cls, ResourceManager(1, 3), config))
    finally:
        Fails.release.set()  # its threads must not reach into the tests that follow
    return str(caught.value)


def test_an_exception_names_role_method_worker_rank_and_shows_the_traceback() -> None:  # B05
    text = failing(act=lambda c: c.raises_on(1))
    first, *_, last = text.splitlines()
    assert first == (
        "roll-td: role.raises_on failed (worker 1 of role, rank 1 on node0): "
        "ValueError: seven is not a vegetable"
    )
    assert last == "ValueError: seven is not a vegetable"
    assert 'raise ValueError("seven is not a vegetable")' in text and "Traceback" in text


def test_a_failure_reaches_every_call_that_waits_and_all_later_ones() -> None:  # B15
    heard: list[str] = []

    def act(cluster: Cluster) -> None:
        pending = [cluster.takes(1, blocking=False), cluster.raises_on(0, blocking=False)]

        def wait() -> None:
            with pytest.raises(WorkerError) as caught:
                get(cluster.raises_on(2, blocking=False))
            heard.append(str(caught.value))

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(5)
        with pytest.raises(WorkerError, match="seven is not"):
            get(pending)
        cluster.takes(2)

    text = failing(act=act)
    assert heard == [text] and "worker 0 of role" in text


def test_a_failure_nobody_waits_for_comes_at_the_end() -> None:
    assert "seven is not" in failing(act=lambda c: c.raises_on(2, blocking=False))


@pytest.mark.parametrize(
    ("act", "where"),
    [
        (lambda c: c.gives("nested"), "role.gives failed (worker 1 of role, rank 1 on node0)"),
        (lambda c: c.gives("nested"), "result['deep'][1][0] (a lock)"),
        (lambda c: c.gives("batch"), "result.non_tensor_batch['o'][0]['k'] (a lock)"),
        (lambda c: c.gives("meta"), "result.meta_info['config']['lock'] (a lock)"),
        (lambda c: c.gives("function"), "result (a function)"),
        (lambda c: c.locked(worker=2), "role.locked (worker 2) gave what can't be sent"),
        (lambda c: c.locked(worker=2), "result[0] (a lock)"),
        (lambda c: c.ask(worker=1), "role.ask failed (worker 1 of role"),
        (lambda c: c.ask(worker=1), "KeyError: 'no door'"),
        (lambda c: c.exits(), "SystemExit: 3"),
    ],
)
def test_what_fails_is_named(act: Callable[[Cluster], Any], where: str) -> None:  # B08
    assert where in failing(act=act)


def test_a_worker_that_cannot_be_made_is_named() -> None:
    text = failing(BadInit)
    assert "role.__init__ failed (worker 1 of role, rank 1 on node0): RuntimeError: no room" in text


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (([1, threading.Lock()], {}), "arguments['argument 0'][1] (a lock)"),
        (((), {"key": {"a": (threading.Lock(),)}}), "arguments['key']['a'][0] (a lock)"),
        ((lambda: 1, {}), "arguments['argument 0'] (a function)"),
    ],
)
def test_an_argument_that_cannot_be_sent_is_named_and_the_job_goes_on(
    role: MakeRole, given: Any, where: str
) -> None:
    cluster = role(Fails, 2)
    args, kwargs = given
    args = () if args == () else (args,)
    with pytest.raises(TypeError, match=r"role.takes: " + re.escape(where)) as caught:
        cluster.takes(*args, **kwargs)
    assert "Send plain data" in str(caught.value)
    assert cluster.takes(1, k=2) == [2, 2]


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda c, d, lock: c.split(DataProto(d, None, {"m": [lock]})), ".meta_info['m'][0]"),
        (lambda c, d, lock: c.split(DataProto(d, {"o": [1, lock]})), ".non_tensor_batch['o'][1]"),
        (lambda c, d, lock: c.ask({"k": lock}), "['k']"),
    ],
)
def test_so_is_one_in_a_batch_or_a_request(
    role: MakeRole, call: Callable[..., Any], where: str
) -> None:  # B08
    cluster = role(Fails, 2)
    with pytest.raises(TypeError, match=r"role\..*" + re.escape(where) + r" \(a lock\)"):
        call(cluster, {"x": torch.arange(2)}, threading.Lock())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("name", r"part 1 lacks 'a', it has \['b'\]"),
        ("dtype", r"'a' has dtypes \['torch.float32', 'torch.int32'\]"),
        ("shape", r"'a' has shapes \[\[2, 2\], \[2, 3\]\]"),
        ("kind", r"'a' has dtypes \['torch.float32', 'object'\]"),
        ("type", "DataProto from dp ranks .0., list from dp ranks .1."),
        ("meta", "meta_info 'eos' differs: 1 and 2"),
    ],
)
def test_answers_that_do_not_fit_together_name_the_columns(
    role: MakeRole, how: str, message: str
) -> None:
    cluster = role(Fails, 2)
    data = DataProto({"x": torch.arange(4)})
    start = r"role.uneven: the answers of workers \[0, 1\] don't fit together: .*"
    with pytest.raises(ValueError, match=start + message):
        cluster.uneven(data, how)
    refs = cluster.uneven(data, how, blocking=False)
    assert refs[0].get() is not None and refs[1].get() is not None, "each is there by itself"
    assert cluster.split(data)["x"].tolist() == [0, 1, 2, 3], "the driver decides what it means"


def test_a_metric_that_is_no_number_names_method_and_key(role: MakeRole) -> None:
    with pytest.raises((TypeError, ValueError), match="metric 'm' is 'text'"):
        role(Fails, 2).uneven(DataProto({"x": torch.arange(4)}), "metric")


def broken_send(*_: Any) -> Any:
    raise ConnectionError("the store is closed")


def test_a_send_that_fails_fails_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:  # B07
    with contextlib.suppress(WorkerError), LocalJob(planned_places(1, 1, 1), 1, 1):
        config = WorkerConfig(name="role", device_mapping=[0])
        cluster = Cluster("role", Fails, ResourceManager(1, 1), config)
        data = DataProto({"x": torch.zeros(50_000)})
        assert cluster.split(data)["x"].shape == (50_000,)
        monkeypatch.setattr(LocalTransport, "isend", broken_send)
        with pytest.raises((WorkerError, ConnectionError), match="the store is closed"):
            cluster.split(data)
        raise WorkerError("the job has failed; don't wait for it")


def test_after_a_failed_send_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:  # B07
    heard: list[str] = []
    with contextlib.suppress(WorkerError), LocalJob(planned_places(1, 1, 1), 1, 1):
        config = WorkerConfig(name="role", device_mapping=[0])
        cluster = Cluster("role", Fails, ResourceManager(1, 1), config)
        monkeypatch.setattr(LocalTransport, "isend", broken_send)
        with contextlib.suppress(WorkerError, ConnectionError):
            cluster.split(DataProto({"x": torch.zeros(50_000)}))

        def call() -> None:
            with pytest.raises(WorkerError, match="the store is closed"):
                cluster.takes(1)
            heard.append("refused")

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(1)
        raise WorkerError("the job has failed; don't wait for it")
    assert heard == ["refused"]


def test_a_receive_that_fails_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:  # B07
    class Broken:
        def wait(self) -> None:
            raise ConnectionError("the peer is gone")

    def act(cluster: Cluster) -> None:
        data = DataProto({"x": torch.zeros(50_000)})
        monkeypatch.setattr(LocalTransport, "irecv", lambda *_, **__: Broken())
        cluster.split(data)

    assert "ConnectionError: the peer is gone" in failing(act=act)
