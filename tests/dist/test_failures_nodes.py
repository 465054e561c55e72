"""Two nodes: two torchrun agents on this machine, each with ranks of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.dist.harness import END_S, Ended, Job, agents, role, write_config

TWO_NODES = {"num_nodes": 2, "num_gpus_per_node": 1}


def fails(folder: Path, how: str) -> Path:
    a = role(device_mapping=[0, 1], worker_cls="failing.FailingWorker")
    return write_config(folder, "failing.Fails", a=a, how=how, **TWO_NODES)


def finish(nodes: Sequence[Job]) -> list[Ended]:
    """All nodes end within END_S, none of them well."""
    deadline = time.monotonic() + END_S
    ended = [node.finish(deadline - time.monotonic()) for node in nodes]
    assert all(e.code == 1 for e in ended)
    assert not any("A CALL RETURNED" in e.out for e in ended)
    return ended


@pytest.mark.timeout(120)
def test_every_kind_of_call_gives_its_value_across_nodes(tmp_path: Path) -> None:
    a, b = role(device_mapping=[0, 1]), role(world_size=1)
    config = write_config(tmp_path, "scenarios.Everything", a=a, b=b, **TWO_NODES)
    ended = [node.finish(100) for node in agents(config, [2, 2])]
    assert [e.code for e in ended] == [0, 0], ended[0].out + ended[1].out
    assert "EVERYTHING CHECKED" in ended[0].out


@pytest.mark.timeout(90)
def test_an_exception_on_one_node_ends_all(tmp_path: Path) -> None:
    nodes = agents(fails(tmp_path, "raise"), [1, 1])  # the driver shares rank 0
    nodes[0].wait_for("READY")
    ended = finish(nodes)
    for e in ended:  # torchrun repeats it on every node
        assert "a.fail_on failed (worker 1 of a, rank 1 on " in e.cause
        assert "ValueError: seven is not a vegetable" in e.cause


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("who", "says"), [("worker 1", 0), ("driver", 1)])
def test_a_rank_that_is_killed_on_one_node_ends_all(who: str, says: int, tmp_path: Path) -> None:
    nodes = agents(fails(tmp_path, "nap"), [1, 1])
    nodes[0].wait_for("READY")
    os.kill(nodes[0].pid_of(who), signal.SIGKILL)
    ended = finish(nodes)
    assert "died without a word" in ended[says].cause
    assert who == "driver" or "a.nap" in ended[0].cause


@pytest.mark.timeout(90)
def test_a_node_with_too_few_ranks_is_refused_before_any_worker_starts(tmp_path: Path) -> None:
    a = role(device_mapping="0-3")
    given = {"num_nodes": 2, "num_gpus_per_node": 2}
    config = write_config(tmp_path, "failing.Fails", a=a, how="raise", **given)
    ended = [node.finish(40) for node in agents(config, [1, 2])]
    assert [e.code for e in ended] == [1, 1]
    assert "STARTED" not in ended[0].out + ended[1].out
    assert "roll-td: node 0 has 1 ranks, its 2 devices (num_gpus_per_node=2)" in ended[0].cause


@pytest.mark.timeout(90)
def test_a_node_that_cannot_load_the_users_code_stops_the_other(tmp_path: Path) -> None:
    nodes = agents(fails(tmp_path, "raise"), [1, 1], RAISE_AT_IMPORT_ON="1")
    ended = [node.finish(40) for node in nodes]
    assert [e.code for e in ended] == [1, 1]
    assert "STARTED" not in ended[0].out
    assert "job.yaml failed (rank 1 on " in ended[0].cause.splitlines()[0]
    assert "RuntimeError: turnips are out" in ended[0].cause
