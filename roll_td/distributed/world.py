"""Who am I? The one reader of RANK, LOCAL_RANK, MASTER_ADDR, TORCHELASTIC_*, SLURM_*."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

Launcher = Literal["torchrun", "slurm", "user", "single"]


@dataclass(frozen=True)
class World:
    """This process among those of the job."""

    rank: int
    """Global rank."""
    world_size: int
    """Ranks of the job."""
    local_rank: int
    """Rank within the node."""
    local_world_size: int
    """Ranks of this node."""
    node: int
    """Number of this node."""
    num_nodes: int | None
    """Nodes of the job; None if the environment doesn't tell."""
    master_addr: str
    """Host of rank 0."""
    master_port: int
    """Port of the store; 0 in a world of 1: any."""
    launcher: Launcher
    """Who started the ranks."""
    agent_store: bool
    """Whether torchrun's agent already hosts the store."""
    restart: int
    """How often torchrun has restarted the ranks."""

    def __post_init__(self) -> None:
        pairs = (("rank", "world_size"), ("local_rank", "local_world_size"))
        for name, size_name in pairs:
            value, size = getattr(self, name), getattr(self, size_name)
            if not 0 <= value < size:
                raise ValueError(
                    f"{name}={value} of {size_name}={size} ({self.launcher}): a rank counts from "
                    f"0 to {size_name} - 1; mend the environment"
                )


def read_world(env: Mapping[str, str]) -> World:
    """The world that the environment tells of.

    RANK, WORLD_SIZE and MASTER_* win; then Slurm's step; else a world of 1. Raises ValueError
    where they tell only half.
    """
    rank, size = env.get("RANK"), env.get("WORLD_SIZE")
    if (rank is None) != (size is None):
        raise ValueError(
            f"RANK={rank}, WORLD_SIZE={size}: one without the other; "
            "set both, or unset both for a single process"
        )
    if rank is not None:
        return _explicit_world(env)
    if _in_slurm_step(env):
        return _slurm_world(env)
    address, port = env.get("MASTER_ADDR", "127.0.0.1"), _integer(env, "MASTER_PORT", 0)
    return World(0, 1, 0, 1, 0, 1, address, port, "single", False, 0)


def _explicit_world(env: Mapping[str, str]) -> World:
    rank, size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    in_slurm = _in_slurm_step(env)
    if "LOCAL_RANK" in env or not in_slurm:
        local, local_size = _explicit_local(env, rank, size)
        node = _integer(env, "GROUP_RANK", rank // max(local_size, 1))
        even = size // max(local_size, 1) if local_size and size % local_size == 0 else None
        num_nodes = _integer(env, "GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in env else even
    else:
        local, local_size, node, num_nodes = _slurm_local(env, size)
    address, port = _master(env, size)
    elastic = "TORCHELASTIC_RUN_ID" in env
    agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restart = _integer(env, "TORCHELASTIC_RESTART_COUNT", 0)
    launcher: Launcher = "torchrun" if elastic else "user"
    return World(
        rank,
        size,
        local,
        local_size,
        node,
        num_nodes,
        address,
        port,
        launcher,
        agent_store,
        restart,
    )


def _explicit_local(env: Mapping[str, str], rank: int, size: int) -> tuple[int, int]:
    """Local rank and size; where neither is set, all ranks are on one node."""
    local, local_size = env.get("LOCAL_RANK"), env.get("LOCAL_WORLD_SIZE")
    if (local is None) != (local_size is None) and size > 1:
        raise ValueError(
            f"LOCAL_RANK={local}, LOCAL_WORLD_SIZE={local_size}: one without the other; "
            "set both, or unset both if all ranks run on one node"
        )
    if local is None or local_size is None:
        return rank, size
    return _integer(env, "LOCAL_RANK"), _integer(env, "LOCAL_WORLD_SIZE")


def _master(env: Mapping[str, str], size: int) -> tuple[str, int]:
    """Address and port of rank 0: the user's, else Slurm's, else any for a world of 1."""
    in_slurm = _in_slurm_step(env)
    if "MASTER_ADDR" not in env and in_slurm:
        address = _first_host(env)
    elif "MASTER_ADDR" in env or size == 1:
        address = env.get("MASTER_ADDR", "127.0.0.1")
    else:
        raise ValueError(
            f"WORLD_SIZE={size} without MASTER_ADDR: ranks can't find each other; "
            "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port of it"
        )
    if "MASTER_PORT" in env or not (in_slurm or size == 1):
        return address, _integer(env, "MASTER_PORT")
    return address, _slurm_port(env) if in_slurm else 0


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process. The shell of a batch job has SLURM_PROCID too, but no
    step; that of salloc has neither."""
    is_batch_shell = env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env
    return "SLURM_PROCID" in env and not is_batch_shell


def _slurm_world(env: Mapping[str, str]) -> World:
    size_key = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    size = _integer(env, size_key)
    local, local_size, node, num_nodes = _slurm_local(env, size)
    address, port = _master(env, size)
    rank = _integer(env, "SLURM_PROCID")
    return World(rank, size, local, local_size, node, num_nodes, address, port, "slurm", False, 0)


def _slurm_local(env: Mapping[str, str], size: int) -> tuple[int, int, int, int]:
    """Local rank, ranks of the node, node, nodes."""
    node, local = _integer(env, "SLURM_NODEID", 0), _integer(env, "SLURM_LOCALID")
    counts = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    nodes_key = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES"
    nodes = len(counts) or _integer(env, nodes_key, 0) or len(_hosts(env))
    local_size = counts[node] if node < len(counts) else max(size // nodes, local + 1)
    return local, local_size, node, nodes


def _tasks_per_node(text: str) -> list[int]:
    """'2(x3),1' → [2, 2, 2, 1]."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


def _hosts(env: Mapping[str, str]) -> list[str]:
    key = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in env else "SLURM_JOB_NODELIST"
    if key not in env:
        raise ValueError(
            "SLURM_PROCID without SLURM_STEP_NODELIST or SLURM_JOB_NODELIST: the host of rank 0 "
            "is not known; start the ranks with srun, or set RANK, WORLD_SIZE and MASTER_*"
        )
    return expand_nodelist(env[key])


def _first_host(env: Mapping[str, str]) -> str:
    """The first compute host. SLURM_LAUNCH_NODE_IPADDR may be a login host."""
    return _hosts(env)[0]


def _slurm_port(env: Mapping[str, str]) -> int:
    """The same on all ranks; another for the jobs next to this one and for its other steps."""
    job, step = _integer(env, "SLURM_JOB_ID", 0), _integer(env, "SLURM_STEP_ID", 0)
    return 10000 + (31 * job + step) % 20000


def expand_nodelist(text: str) -> list[str]:
    """The hosts of a Slurm node list, in order; zeros in front of numbers are kept.

    >>> expand_nodelist("gpu[1-2,9],rack[01-02]-n1,login1")
    ['gpu1', 'gpu2', 'gpu9', 'rack01-n1', 'rack02-n1', 'login1']
    """
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not items or ",".join(items) != text:
        raise _bad_nodelist(text)
    hosts = []
    for item in items:
        pieces = re.findall(r"\[([^\]]*)\]|([^\[\]]+)", item)
        choices = [[literal] if literal else _expand_numbers(inside) for inside, literal in pieces]
        hosts += ["".join(parts) for parts in product(*choices)]
    return hosts


def _expand_numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise _bad_nodelist(f"[{text}]")
        low, high = span[1], span[2] or span[1]
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    return numbers


def _bad_nodelist(text: str) -> ValueError:
    return ValueError(f"{text!r} is not a Slurm node list; a right one is node[001-004,007],login1")


def _integer(env: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = env.get(key)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"-?\d+", text):
        given = f"{key} is not set" if text is None else f"{key}={text!r} is not a whole number"
        raise ValueError(f"{given}; the launcher must set it to a number")
    return int(text)
