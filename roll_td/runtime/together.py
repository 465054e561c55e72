"""What the workers of several clusters do together: one command, and process groups for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_td.distributed.topology import data_parallel, rank_infos
from roll_td.runtime.dispatch import Dispatch
from roll_td.runtime.driver import Call, Driver, current_driver
from roll_td.runtime.refs import Refs
from roll_td.runtime.transport import Group, Ranks, Transport

if TYPE_CHECKING:
    from roll_td.runtime.cluster import Cluster


@dataclass(frozen=True)
class Here:
    """What a function that `call_together` names is given of the rank it runs on."""

    rank: int
    """Global rank."""
    workers: Mapping[str, Any]
    """Role → its worker that lives here, for those of the clusters that have one."""
    transport: Transport
    """Has the groups that make_groups made."""


def homes(clusters: Sequence[Cluster]) -> Ranks:
    """The ranks on which workers of these clusters live, in their order, each once."""
    return tuple(dict.fromkeys(s.ranks[0] for c in clusters for s in c.placement.seats))


def make_groups(groups: Sequence[Group]) -> None:
    """Make process groups, once for all `call_together` that use them. Blocks."""
    driver = current_driver()
    driver.wait(post_groups(driver, "groups", list(dict.fromkeys(groups))))


def post_groups(driver: Driver, role: str, groups: Sequence[Group]) -> Call:
    """The command by which all ranks make groups; it starts when their members have come to it."""
    everyone = tuple(range(len(driver.layout.slots)))
    gang = tuple(sorted({rank for group in groups for rank in group.ranks}))
    call = Call(0, role, "groups", Group(everyone, driver.transfer_timeout_s))
    call.homes = everyone
    return driver.post("groups", {"groups": groups, "members": gang}, call, everyone, gang=gang)


def call_together(
    clusters: Sequence[Cluster], function: str, blocking: bool = True, **arguments: Any
) -> Any:
    """Call the function at a dotted path once on each rank where workers of these clusters live,
    as function(here, **arguments) with a `Here`; all start when the last has come to it.

    One command, in the order of the others: a rank that a worker owns besides waits meanwhile.
    Arguments and results are plain data, which travels with the control messages: tensors stay
    on the ranks, and go between them by groups that `make_groups` made. Returns a list of the
    results in the order of `homes(clusters)`; with blocking=False a Refs of it.
    """
    driver, ranks = current_driver(), homes(clusters)
    role, name = "+".join(c.name for c in clusters), function.rpartition(".")[2]
    call = Call(0, role, name, Group(ranks, driver.transfer_timeout_s))
    call.homes, call.answering = ranks, tuple(range(len(ranks)))
    owned = dict.fromkeys(r for c in clusters for s in c.placement.seats for r in s.ranks)
    call.owned = tuple(rank for rank in owned if rank not in ranks)
    gang = ranks if len(ranks) > 1 else ()  # one has nobody to wait for
    body = {
        "members": gang,
        "clusters": [cluster._id for cluster in clusters],
        "ranks": ranks,
        "function": function,
        "arguments": arguments,
        "step": driver.step,
        "count": driver.count_call(role, name),
        "seed": driver.seed,
        "role": role,
    }
    driver.post("together", body, call, ranks, gang=gang)
    refs = Refs(driver, call, Dispatch.ONE_TO_ALL, None, rank_infos(data_parallel(len(ranks))))
    return refs.get() if blocking else refs
