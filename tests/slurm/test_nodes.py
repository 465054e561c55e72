"""Jobs on four nodes in a real Slurm: with all of them, and when one is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from tests.dist.harness import roll_td_run
from tests.dist.test_sft import write_sft
from tests.slurm.cluster import START_S, Job, Slurm

CONFIGS = Path(__file__).parents[2] / "configs"
NODE_TIMEOUT_S = 6
END_S = 20
"""What a busy machine may add to the node timeout until all ranks are gone."""
NOTICED_S = 90
"""How long Slurm may take to see that a node is gone: its SlurmdTimeout is 20 s here."""
TWELVE_RANKS_S = 300
"""How long a job of twelve ranks may take on two cores."""
pytestmark = pytest.mark.timeout(4 * START_S)


def write_quickstart(folder: Path) -> Path:
    """Two steps of the quick start with the model's random weights, few prompts, and a reward that
    these answers differ in."""
    made = yaml.safe_load((CONFIGS / "rlvr" / "quickstart.yaml").read_text())
    made["model"] = yaml.safe_load((CONFIGS / "quickstart" / "sft.yaml").read_text())["model"]
    made["model"]["tokenizer"] = str(CONFIGS / "sft" / "tiny" / "tokenizer")
    for name, count in (("train", 8), ("validation", 4)):
        rows = ({"prompt": f"{n}+{n}", "ground_truth": str(2 * n)} for n in range(count))
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        made["data"][name] = str(folder / f"{name}.jsonl")
    made["rewards"]["default"] = {"name": "rlvr_scenarios.digits"}
    made["actor_infer"]["generation"] |= {"num_return_sequences": 4, "max_new_tokens": 8}
    made["validation"]["generation"]["max_new_tokens"] = 8
    made |= {"output_dir": str(folder), "export_dir": None, "batch_size": 8, "max_steps": 2}
    path = folder / "quickstart.yaml"
    path.write_text(yaml.safe_dump(made))
    return path


def learnt(run_dir: Path) -> list[dict[str, float]]:
    """What the steps have measured of policy and answers."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    kinds = ("val/", "reward/", "response/", "actor/")
    return [{k: v for k, v in line.items() if k.startswith(kinds)} for line in lines]


@pytest.mark.timeout(3 * TWELVE_RANKS_S)
def test_roles_apart_or_shared_on_four_nodes_learn_as_on_one(four: Slurm, tmp_path: Path) -> None:
    config = write_quickstart(tmp_path)
    placements = {"shared": ("0-7", "0-7"), "apart": ("0-3", "4-7")}
    for name, (train, infer) in placements.items():
        where = [f"actor_train.device_mapping={train}", f"actor_infer.device_mapping={infer}"]
        job = four.submit(config, name, "--nodes", "4", "num_gpus_per_node=2", *where)
        job.wait("COMPLETED", "FAILED", "TIMEOUT", limit_s=TWELVE_RANKS_S)
        assert job.show("JobState") == "COMPLETED", job.script_said()
        assert len(list((job.run_dir / "logs").glob("*.0/[0-9]*.log"))) == 12
    alone = roll_td_run(config, "exp_name=alone").finish(START_S)
    assert alone.code == 0, alone.out
    wanted = learnt(tmp_path / "alone")
    assert len(wanted) == 4 and all(abs(line["actor/loss"]) > 1e-3 for line in wanted[1:3])
    for name in placements:
        for line, want in zip(learnt(tmp_path / name), wanted, strict=True):
            assert line == pytest.approx(want, rel=1e-5, abs=1e-5), name


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An endless run of two device ranks, with checkpoints."""
    rest = {"eval_steps": 10**6, "keep_checkpoints": 2, "node_timeout_s": NODE_TIMEOUT_S}
    return write_sft(tmp_path_factory.mktemp("runs"), max_steps=10**6, save_steps=5, **rest)


def start(slurm: Slurm, config: Path, name: str) -> tuple[Job, str, str]:
    """A job that has a checkpoint: it, the node of its driver, and the other one."""
    if slurm.mode == "plain":
        pytest.skip("no node can be told from another here: namespaces need CAP_SYS_ADMIN")
    job = slurm.submit(config, name, "--nodes", "2", "num_gpus_per_node=1")
    job.wait_for("saved ")
    first, second = nodes_of(job)
    return job, first, second


def nodes_of(job: Job) -> list[str]:
    found = job.slurm.run("scontrol", "show", "hostnames", job.show("NodeList"), cwd=Path("/"))
    return found.split()


def last_words(job: Job, rank: int) -> str:
    """What a rank of the first start has said last of the job itself."""
    text = (job.run_dir / "logs" / f"{job.number}.0" / f"{rank}.log").read_text()
    return text[text.rindex("roll-td: ") :].splitlines()[0]


def is_queued_again(job: Job) -> None:
    job.until(lambda: job.show("Restarts") == "1", "queued again", NOTICED_S)


def end(job: Job) -> None:
    job.slurm.run("scancel", job.number, cwd=Path("/"))
    job.until(lambda: not job.processes(), "gone", 60)


def test_a_job_that_was_suspended_for_longer_goes_on(four: Slurm, config: Path) -> None:
    job, _, _ = start(four, config, "suspended")
    four.run("scontrol", "suspend", job.number, cwd=Path("/"))
    time.sleep(NODE_TIMEOUT_S + 4)
    steps = job.said().count("step ")
    four.run("scontrol", "resume", job.number, cwd=Path("/"))
    job.until(lambda: job.said().count("step ") > steps + 2, "going on")
    assert job.show("Restarts") == "0"
    end(job)


@pytest.mark.parametrize("victim", ["worker", "driver"])
def test_a_cut_link_ends_the_job_in_time_and_it_comes_back(
    four: Slurm, config: Path, victim: str
) -> None:
    if four.mode != "netns":
        pytest.skip(f"nodes share this machine's network (mode {four.mode}): no link can be cut")
    job, first, second = start(four, config, f"cut-{victim}")
    lost = first if victim == "driver" else second
    four.link(lost, "down")
    try:
        job.until(lambda: not job.processes(), "gone", NODE_TIMEOUT_S + END_S)
        # rank 1 is the driver: neither side reaches the other
        assert f"on {second})" in last_words(job, 1)
        named = f"roll-td: the driver (rank 1 on {first}) can't be reached any more"
        assert last_words(job, 2) == named
        is_queued_again(job)
        if victim == "driver":
            job.wait_for("going on from", 1)
            assert lost not in nodes_of(job)
    finally:
        four.link(lost, "up")
        end(job)


def test_a_node_whose_daemon_is_killed_leaves_no_rank_behind(four: Slurm, config: Path) -> None:
    """The job lives on until Slurm queues it again, and can't end its ranks on that node."""
    job, _, lost = start(four, config, "orphaned")
    ranks = set(job.processes())
    os.kill(four.daemon(lost), signal.SIGKILL)
    is_queued_again(job)
    job.until(lambda: not ranks & set(job.processes()), "gone", END_S)
    end(job)


def test_a_killed_node_ends_the_job_which_names_it_and_comes_back(
    four: Slurm, config: Path
) -> None:
    job, _, lost = start(four, config, "killed")
    for pid in four.processes_on(lost):
        os.kill(pid, signal.SIGKILL)
    job.until(lambda: not job.processes(), "gone", END_S)
    assert f"on {lost})" in last_words(job, 1)
    is_queued_again(job)  # which may end the script before it has told the cause, too
    end(job)
