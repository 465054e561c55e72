"""Real jobs: several gloo processes, started by torchrun or by our own launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("harness", Path(__file__).parent / "harness.py")
assert _spec and _spec.loader
harness = importlib.util.module_from_spec(_spec)
sys.modules["harness"] = harness
_spec.loader.exec_module(harness)

ECHO, TP = "scenarios.EchoWorker", "scenarios.TPWorker"
LAYOUTS = {
    "one process, driver shared": (1, {"device_mapping": [0]}, {"device_mapping": [0]}),
    "shared on two": (3, {"device_mapping": [0, 1]}, {"device_mapping": [0, 1]}),
    "disjoint": (5, {"device_mapping": [0, 1]}, {"device_mapping": [2, 3]}),
    "overlapping, cpu role": (5, {"device_mapping": [0, 1]}, {"world_size": 2}),
    "tp two, overlapping": (
        8,
        {"device_mapping": "0-3", "worker_cls": TP},
        {"device_mapping": [2, 3, 4, 5]},
    ),
    "multi-device workers": (
        5,
        {"device_mapping": "list(range(0, 4))", "num_gpus_per_worker": 2},
        {"device_mapping": [1, 2]},
    ),
}


def role(**given: object) -> dict[str, object]:
    return {"worker_cls": ECHO} | given


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_kind_of_call_gives_its_value(name: str, tmp_path: Path) -> None:
    ranks, a, b = LAYOUTS[name]
    config = harness.write_config(tmp_path, "Everything", a=role(**a), b=role(**b))
    debug = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if name == "disjoint" else {}  # L09
    ended = harness.run(config, ranks, timeout_s=100, **debug)
    assert ended.code == 0, ended.out
    assert "EVERYTHING CHECKED" in ended.out
    (trace,) = (tmp_path / "runs" / "job" / "trace").iterdir()
    events = json.loads(trace.read_text())
    spans = {(e["pid"], e["name"]) for e in events if e["ph"] == "X"}
    assert {name for _, name in spans} >= {"a.double", "b.total", "late.double"}


CAUSES = {
    "raise": ("a.fail_on", "ValueError: seven is not a vegetable"),
    "kill": ("a.fail_on", "died without a word"),
    "exit": ("a.fail_on", "SystemExit: 3"),
    "lock": ("a.fail_on", "['bad']"),
    "driver": ("driver", "KeyError: 'no such vegetable'"),
    "driver_kill": ("driver", "rank"),
    "uneven": ("a.uneven", "don't fit together"),
    "missing": ("dubble", "did you mean double"),
    "argument": ("a.total", "['lock']"),
}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", list(CAUSES))
def test_the_first_failure_ends_the_job_and_is_its_last_word(how: str, tmp_path: Path) -> None:
    config = harness.write_config(
        tmp_path,
        "Fails",
        a=role(device_mapping=[0, 1]),
        b=role(device_mapping=[2]),
    )
    program = "import sys; from roll_td.cli import main; sys.exit(main())"
    process = harness.start(["-c", program, "run", str(config), f"how={how}"])
    assert process.stdout is not None
    for line in process.stdout:
        if "READY" in line:
            break
    ready = time.monotonic()
    ended = harness.finish(process)
    assert time.monotonic() - ready < 10
    assert ended.code not in (0, None)
    assert "A CALL RETURNED" not in ended.out
    where, what = CAUSES[how]
    last = ended.out[ended.out.rindex("roll-td:") :]
    assert where in last and what in last, ended.out


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job(number: int, tmp_path: Path) -> None:
    config = harness.write_config(
        tmp_path, "Fails", a=role(device_mapping=[0, 1]), b=role(device_mapping=[0])
    )
    program = "import sys; from roll_td.cli import main; sys.exit(main())"
    process = harness.start(["-c", program, "run", str(config), "how=nap"])
    assert process.stdout is not None
    for line in process.stdout:
        if "READY" in line:
            break
    began = time.monotonic()
    os.killpg(process.pid, number)
    ended = harness.finish(process)
    assert time.monotonic() - began < 10
    assert ended.code == 128 + number
    assert number == signal.SIGINT or "SIGTERM" in ended.out


@pytest.mark.timeout(60)
def test_slurm_variables_make_a_world(tmp_path: Path) -> None:
    config = harness.write_config(
        tmp_path, "Everything", a=role(device_mapping=[0]), b=role(device_mapping=[0])
    )
    processes = [
        harness.start(
            ["-m", "roll_td", str(config)],
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_NODEID="0",
            SLURM_NTASKS="2",
            SLURM_STEP_NUM_TASKS="2",
            SLURM_TASKS_PER_NODE="2",
            SLURM_JOB_ID=str(os.getpid()),
            SLURM_STEP_ID="0",
            SLURM_NNODES="1",
            SLURM_JOB_NUM_NODES="1",
            SLURM_JOB_NODELIST="localhost",
            SLURM_STEP_NODELIST="localhost",
        )
        for rank in range(2)
    ]
    ends = [harness.finish(p) for p in processes]
    assert [e.code for e in ends] == [0, 0], ends[0].out + ends[1].out
    assert any("EVERYTHING CHECKED" in e.out for e in ends)


@pytest.mark.timeout(60)
def test_too_few_device_ranks_are_refused_with_what_to_start(tmp_path: Path) -> None:
    config = harness.write_config(
        tmp_path, "Everything", a=role(device_mapping="0-3"), b=role(device_mapping=[0])
    )
    ended = harness.run(config, 2)
    assert ended.code != 0
    assert "EVERYTHING CHECKED" not in ended.out
    assert "start" in ended.out


@pytest.mark.timeout(60)
def test_ranks_that_step_together_get_a_plan_and_the_driver_keeps_its_draws(tmp_path: Path) -> None:
    config = harness.write_config(
        tmp_path,
        "Planned",
        a=role(device_mapping=[0, 1], worker_cls="scenarios.StepWorker"),
        b=role(device_mapping=[0]),
    )
    ended = harness.run(config, 2)  # the driver shares rank 0
    assert ended.code == 0 and "PLANNED" in ended.out, ended.out
