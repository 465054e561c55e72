"""Real jobs: several gloo processes, started by torchrun or by our own launcher."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.dist.harness import Job, role, torchrun, write_config

TP = "scenarios.TPWorker"
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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_kind_of_call_gives_its_value(name: str, tmp_path: Path) -> None:
    ranks, a, b = LAYOUTS[name]
    config = write_config(tmp_path, "scenarios.Everything", a=role(**a), b=role(**b))
    debug = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if name == "disjoint" else {}  # L09
    ended = torchrun(config, ranks, **debug).finish(100)
    assert ended.code == 0, ended.out
    assert "EVERYTHING CHECKED" in ended.out
    (trace,) = (tmp_path / "runs" / "job" / "trace").iterdir()
    events = json.loads(trace.read_text())
    spans = {(e["pid"], e["name"]) for e in events if e["ph"] == "X"}
    assert {name for _, name in spans} >= {"a.double", "b.total", "late.double"}


@pytest.mark.timeout(60)
def test_slurm_variables_make_a_world(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, "scenarios.Everything", a=role(device_mapping=[0]), b=role(device_mapping=[0])
    )
    processes = [
        Job(
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
    ends = [p.finish(50) for p in processes]
    assert [e.code for e in ends] == [0, 0], ends[0].out + ends[1].out
    assert any("EVERYTHING CHECKED" in e.out for e in ends)


@pytest.mark.timeout(60)
def test_too_few_device_ranks_are_refused_with_what_to_start(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, "scenarios.Everything", a=role(device_mapping="0-3"), b=role(device_mapping=[0])
    )
    ended = torchrun(config, 2).finish(50)
    assert ended.code != 0
    assert "EVERYTHING CHECKED" not in ended.out
    assert "start" in ended.out


@pytest.mark.timeout(60)
def test_ranks_that_step_together_get_a_plan_and_the_driver_keeps_its_draws(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        "scenarios.Planned",
        a=role(device_mapping=[0, 1], worker_cls="scenarios.StepWorker"),
        b=role(device_mapping=[0]),
    )
    ended = torchrun(config, 2).finish(50)  # the driver shares rank 0
    assert ended.code == 0 and "PLANNED" in ended.out, ended.out


@pytest.mark.timeout(90)
def test_a_long_run_holds_on_to_nothing(tmp_path: Path) -> None:
    a = role(device_mapping=[0, 1], worker_cls="scenarios.HousekeepingWorker")
    config = write_config(tmp_path, "scenarios.Housekeeping", a=a, b=role(device_mapping=[0]))
    ended = torchrun(config, 3).finish(80)
    assert ended.code == 0 and "HOUSE KEPT" in ended.out, ended.out


@pytest.mark.timeout(90)
def test_two_jobs_at_once_on_one_machine_and_the_devices_they_see(tmp_path: Path) -> None:
    jobs = []
    for visible in ("4,5", "6,7"):
        folder = tmp_path / visible
        folder.mkdir()
        a, b = role(device_mapping=[0]), role(device_mapping=[1])
        config = write_config(folder, "scenarios.Everything", a=a, b=b)
        jobs.append(torchrun(config, 2, CUDA_VISIBLE_DEVICES=visible))
    for job, devices in zip(jobs, ((4, 5), (6, 7)), strict=True):
        ended = job.finish(80)
        assert ended.code == 0 and "EVERYTHING CHECKED" in ended.out, ended.out
        for logical, physical in enumerate(devices):
            assert f"device {logical} -> physical {physical} (" in ended.out
