"""What the environment says of this process."""

from __future__ import annotations

import pytest

from roll_td.distributed.world import World, expand_nodelist, read_world

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node001",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_NODELIST": "node[001-004]",
    "SLURM_STEP_NODELIST": "node[002-004]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
USER = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"}


def test_torchrun() -> None:
    assert read_world(TORCHRUN) == World(5, 8, 1, 4, 1, 2, "node001", 29500, "torchrun", True, 2)


def test_torchrun_inside_slurm_is_torchrun() -> None:
    assert read_world(SLURM | TORCHRUN) == read_world(TORCHRUN)


def test_slurm() -> None:
    port = 10000 + (31 * 1234 + 3) % 20000
    assert read_world(SLURM) == World(3, 5, 1, 2, 1, 3, "node002", port, "slurm", False, 0)


def test_slurm_without_step_variables() -> None:
    env = {key: value for key, value in SLURM.items() if "STEP" not in key}
    world = read_world(env | {"SLURM_NTASKS": "6"})
    assert (world.world_size, world.local_world_size, world.num_nodes) == (6, 2, 3)
    assert world.master_addr == "node001"


def test_slurm_step_smaller_than_its_job() -> None:
    assert read_world(SLURM | {"SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "5"}).world_size == 5


def test_k08_master_is_the_first_compute_host() -> None:
    env = SLURM | {"SLURM_LAUNCH_NODE_IPADDR": "login", "SLURM_SUBMIT_HOST": "login"}
    assert read_world(env).master_addr == "node002"


def test_ports_of_neighbouring_jobs_and_steps_differ() -> None:
    jobs = [SLURM | {"SLURM_JOB_ID": str(job)} for job in range(1000, 1100)]
    steps = [SLURM | {"SLURM_STEP_ID": str(step)} for step in range(20)]
    assert len({read_world(env).master_port for env in jobs}) == 100
    assert len({read_world(env).master_port for env in steps}) == 20
    assert all(10000 <= read_world(env).master_port < 30000 for env in jobs)


def test_the_users_own_settings_win_over_slurm() -> None:
    world = read_world(SLURM | USER)
    assert (world.rank, world.world_size, world.launcher) == (1, 2, "user")
    assert (world.master_addr, world.master_port) == ("h", 5)
    assert (world.local_rank, world.node) == (1, 1)
    port_only = read_world(SLURM | {"MASTER_PORT": "77"})
    assert (port_only.master_addr, port_only.master_port, port_only.rank) == ("node002", 77, 3)


def test_a_users_ranks_on_one_node() -> None:
    assert read_world(USER) == World(1, 2, 1, 2, 0, 1, "h", 5, "user", False, 0)


def test_a_users_ranks_on_several_nodes() -> None:
    env = USER | {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    world = read_world(env)
    assert (world.node, world.num_nodes, world.local_rank) == (2, 3, 1)


def test_nothing_set_is_a_world_of_1() -> None:
    expected = World(0, 1, 0, 1, 0, 1, "127.0.0.1", 0, "single", False, 0)
    assert read_world({}) == expected
    alone = read_world({"RANK": "0", "WORLD_SIZE": "1"})
    assert (alone.master_addr, alone.master_port, alone.launcher) == ("127.0.0.1", 0, "user")


def test_a_shell_inside_an_allocation_is_a_single_process() -> None:
    salloc = {key: value for key, value in SLURM.items() if key != "SLURM_PROCID"}
    batch = {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    batch |= {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "a[1-2]"}
    for env in (salloc, batch):
        world = read_world(env)
        assert (world.launcher, world.world_size, world.master_addr) == ("single", 1, "127.0.0.1")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "RANK=0, WORLD_SIZE=None: one without the other"),
        ({"WORLD_SIZE": "2"}, "RANK=None, WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2 without MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "MASTER_PORT is not set"),
        (USER | {"LOCAL_RANK": "0"}, "LOCAL_RANK=0, LOCAL_WORLD_SIZE=None"),
        (USER | {"RANK": "2"}, "rank=2 of world_size=2"),
        (USER | {"RANK": "one"}, "RANK='one' is not a whole number"),
        (USER | {"WORLD_SIZE": "-1"}, "rank=1 of world_size=-1"),
        ({"SLURM_PROCID": "0"}, "SLURM_NTASKS is not set"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
            "SLURM_PROCID without SLURM_STEP_NODELIST",
        ),
    ],
)
def test_half_told(env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_world(env)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[001-004,007]", "node001 node002 node003 node004 node007"),
        ("node[8-10]", "node8 node9 node10"),
        ("node[08-10]", "node08 node09 node10"),
        ("b04-[09-10]", "b04-09 b04-10"),
        (
            "gpu[1-2,9],rack[01-02]-n[1-3],login1",
            "gpu1 gpu2 gpu9 rack01-n1 rack01-n2 rack01-n3 rack02-n1 rack02-n2 rack02-n3 login1",
        ),
        ("login1", "login1"),
        ("n[099-101].site", "n099.site n100.site n101.site"),
    ],
)
def test_k01_nodelists(text: str, hosts: str) -> None:
    assert expand_nodelist(text) == hosts.split()


@pytest.mark.parametrize("text", ["", "node[1-", "node[3-1]", "node[a]", "a,,b", "n]1", "n[]"])
def test_nonsense_nodelists(text: str) -> None:
    with pytest.raises(ValueError, match="is not a Slurm node list"):
        expand_nodelist(text)
