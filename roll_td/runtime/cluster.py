"""Cluster: one role's workers, called as if they were one. And what a call gives: Refs."""

from __future__ import annotations

import difflib
import inspect
import socket
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from roll_td.config.base import WorkerConfig
from roll_td.config.classes import import_class
from roll_td.distributed.topology import RankInfo, rank_infos, role_groups
from roll_td.placement import RolePlacement, place
from roll_td.plan import StepPlan, default_plan, local
from roll_td.protocol import DataProto
from roll_td.runtime import dispatch
from roll_td.runtime.dispatch import Dispatch, Registered
from roll_td.runtime.driver import Call, Driver, current_driver
from roll_td.runtime.outgoing import Outgoing, batch_parcel, strip_metrics, value_parcel
from roll_td.runtime.parcel import Slot
from roll_td.runtime.transport import Ranks
from roll_td.runtime.wire import Batch, dumps, find_unpicklable

_SPLIT = (Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST)


class ResourceManager:
    """Where roles go, in the job that runs."""

    def __init__(self, num_nodes: int, num_gpus_per_node: int):
        layout = current_driver().layout
        if (num_nodes, num_gpus_per_node) != (layout.num_nodes, layout.num_gpus_per_node):
            raise ValueError(
                f"ResourceManager(num_nodes={num_nodes}, num_gpus_per_node={num_gpus_per_node}): "
                f"this job has {layout.num_nodes} nodes of {layout.num_gpus_per_node} devices; "
                "take both from the pipeline's config"
            )
        self.layout = layout

    def place(self, name: str, worker_config: WorkerConfig) -> RolePlacement:
        """The ranks and devices of a role's workers; a ValueError where they don't fit."""
        return place(name, worker_config, self.layout)


class Ref:
    """The result of one worker of a call."""

    def __init__(self, refs: Refs, worker: int):
        self._refs, self.worker = refs, worker

    def get(self) -> Any:
        """Wait, and give the worker's value; None if it is not one of the answering workers."""
        call = self._refs.call
        landing = self._refs.driver.wait(call)
        if self.worker not in call.answering:
            return None
        return landing.value(call.answering.index(self.worker))


class Refs(Sequence[Ref]):
    """The result of a call under way: one ref per worker. Dropping it frees the result."""

    def __init__(self, driver: Driver, call: Call, mode: dispatch.Mode, plan: StepPlan | None,
                 infos: tuple[RankInfo, ...]):  # fmt: skip
        self.driver, self.call, self._mode, self._plan, self._infos = (
            driver,
            call,
            mode,
            plan,
            infos,
        )

    def __len__(self) -> int:
        return len(self._infos)

    def __getitem__(self, index: Any) -> Any:
        workers = range(len(self._infos))[index]
        return Ref(self, workers) if isinstance(workers, int) else [Ref(self, w) for w in workers]

    def get(self) -> Any:
        """Wait, and give what the blocking call gives."""
        landing = self.driver.wait(self.call)
        values = landing.values()
        if isinstance(self._mode, tuple):
            return self._mode[1](values, self._infos)
        try:
            if self._plan is not None:
                return dispatch.collect_planned(values, self._plan)
            if landing.whole is not None:
                return landing.joined(values)
            return dispatch.collect(self._mode, values)
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{self.call.role}.{self.call.method}: the answers of workers "
                f"{list(self.call.answering)} don't fit together: {error}"
            ) from error

    def collecting(self) -> list[Any]:
        """The values of the collecting workers, in dp order."""
        workers = sorted((i for i in self._infos if i.is_collecting), key=lambda i: i.dp_rank)
        return [self[i.rank].get() for i in workers]


class Stream:
    """What a request method yields, as it comes."""

    def __init__(self, items: Iterator[Any]):
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items

    def get(self) -> Any:
        """Wait for the end: a list of the items, or of a plain method its value."""
        return list(self._items)


class _Reply:
    def __init__(self, items: Iterator[Any]):
        self._items = items

    def get(self) -> Any:
        return next(self._items)


def get(refs: Any) -> Any:
    """Wait for a call (or a ref, or a list of them) and give what the blocking call gives."""
    if isinstance(refs, (list, tuple)):
        return [get(r) for r in refs]
    if not isinstance(refs, (Refs, Ref, Stream, _Reply)):
        raise TypeError(
            f"get() takes what a call with blocking=False gave, or a list of that, not a "
            f"{type(refs).__name__}; a blocking call gives its value at once"
        )
    return refs.get()


def materialize_concat(refs: Any) -> DataProto:
    """Wait for every worker; the DataProtos of the collecting ones as one, in dp order."""
    if isinstance(refs, Refs):
        if refs.call.join or refs._plan is not None:
            value = refs.get()
            if isinstance(value, DataProto):
                return value
        values = refs.collecting()
    else:
        values = get(list(refs))
    return DataProto.concat([v for v in values if v is not None])


class Cluster:
    """The workers of one role. It has exactly the methods that the Worker class registers."""

    def __init__(
        self,
        name: str,
        worker_cls: str | type,
        resource_manager: ResourceManager,
        worker_config: WorkerConfig,
        blocking: bool = True,
    ):
        self._driver = current_driver()
        dotted = worker_cls if isinstance(worker_cls, str) else _dotted(worker_cls)
        cls: Any = import_class(dotted)
        self.name, self.worker_config = name, worker_config
        self.placement = resource_manager.place(name, worker_config)
        topology = cls.topology(worker_config)
        if topology.world_size != len(self.placement.seats):
            raise ValueError(
                f"role {name}: its topology is for {topology.world_size} workers, its devices "
                f"make {len(self.placement.seats)}: change device_mapping or the degrees"
            )
        self._topology = topology
        self._infos = rank_infos(topology)
        self.world_size, self.dp_size = topology.world_size, topology.dp
        self.tp_size, self.pp_size, self.cp_size = topology.tp, topology.pp, topology.cp
        self.rank2devices = {s.worker: s.devices for s in self.placement.seats}
        self._homes: Ranks = tuple(s.ranks[0] for s in self.placement.seats)
        self._owned = tuple(r for s in self.placement.seats for r in s.ranks[1:])
        self._groups = {
            k: tuple(tuple(self._homes[w] for w in g) for g in groups)
            for k, groups in role_groups(topology).items()
        }
        self._data_group = self._make_data_group()
        self._bind(cls)
        self._built = self._build(dotted)
        if blocking:
            self.wait_built()

    def rank_info(self, rank: int) -> RankInfo:
        """Where worker `rank` stands in the role's topology."""
        return self._infos[rank]

    def wait_built(self) -> None:
        """Block until every worker of the role has been made."""
        for call in self._built:
            self._driver.wait(call)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        methods = sorted(self.__dict__.get("_methods", ()))
        near = difflib.get_close_matches(name, methods, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise AttributeError(
            f"the cluster {self.__dict__.get('name')!r} has no method {name!r}{hint}. It "
            f"has what its Worker marks with @register or @register_request: {', '.join(methods)}"
        )

    def _make_data_group(self) -> Ranks:
        """The driver, first ranks, answering ranks: those that bytes leave from or come to."""
        driver = self._driver.layout.driver_rank
        # every worker may answer (ONE_TO_ALL) or get rows of its own (ALL_TO_ALL)
        return (driver, *(r for r in dict.fromkeys(self._homes) if r != driver))

    def _bind(self, cls: type) -> None:
        methods = dispatch.registered_methods(cls)
        requests = dispatch.request_methods(cls)
        self._methods = {*methods, *requests}
        for name in self._methods:
            if name in self.__dict__ or name in Cluster.__dict__:
                raise ValueError(
                    f"{cls.__name__}.{name} can't be registered: a Cluster has a {name!r} of its "
                    "own; give the method another name"
                )
        for name, registered in methods.items():
            setattr(self, name, self._caller(cls, name, registered))
        for name in requests:
            setattr(
                self, name, self._requester(name, inspect.isgeneratorfunction(getattr(cls, name)))
            )

    def _build(self, dotted: str) -> list[Call]:
        driver, config = self._driver, self.worker_config
        everyone = tuple(range(len(driver.layout.slots)))
        wanted = [(g, config.timeout_s) for gs in self._groups.values() for g in gs]
        if len(self._data_group) > 1:
            wanted.append((self._data_group, driver.transfer_timeout_s))
        wanted = list(dict(wanted).items())
        gang = tuple(sorted({r for ranks, _ in wanted for r in ranks}))
        groups = Call(0, self.name, "groups", self._data_group)
        groups.homes = everyone
        driver.post("groups", {"groups": wanted, "members": gang}, groups, everyone, gang=gang)
        build = self._new_call("build")
        body = {
            "cluster": f"{self.name}/{groups.number}",
            "role": self.name,
            "worker_cls": dotted,
            "worker_config": config,
            "infos": self._infos,
            "seats": self.placement.seats,
            "topology": self._topology,
            "group_ranks": self._groups,
            "data_group": self._data_group,
            "master_addr": driver.places[self._homes[0]].host,
            "master_port": _free_port(self.name, driver, self._homes[0]),
            "seed": driver.seed,
        }
        self._id = body["cluster"]
        return [groups, driver.post("build", body, build, self._homes)]

    def _new_call(self, method: str) -> Call:
        call = Call(0, self.name, method, self._data_group)
        call.homes, call.owned = self._homes, self._owned
        return call

    # --- calling -----------------------------------------------------------------------------

    def _caller(self, cls: type, name: str, registered: Registered) -> Any:
        def call(*args: Any, blocking: bool = True, **kwargs: Any) -> Any:
            refs = self._call(name, registered, args, kwargs)
            return refs.get() if blocking else refs

        call.__name__, call.__doc__ = name, getattr(cls, name).__doc__
        return call

    def _requester(self, name: str, streams: bool) -> Any:
        def request(*args: Any, worker: int = 0, blocking: bool = True, **kwargs: Any) -> Any:
            if not 0 <= worker < self.world_size:
                raise ValueError(
                    f"{self.name}.{name}(worker={worker}): the role has workers 0 to "
                    f"{self.world_size - 1}"
                )
            rank = self._homes[worker]
            items = self._driver.request(rank, self._id, name, args, kwargs)
            if streams:
                return Stream(items)
            return next(items) if blocking else _Reply(items)

        return request

    def _call(self, name: str, registered: Registered, args: Any, kwargs: Any) -> Refs:
        mode, driver = registered.dispatch_mode, self._driver
        call = self._new_call(name)
        call.answering = dispatch.answering(mode, self._infos)
        call.join = mode in _SPLIT
        parcels, plan = self._parcels(name, mode, args, kwargs)
        body = {
            "cluster": self._id,
            "method": name,
            "step": driver.step,
            "count": driver.count_call(self.name, name),
            "seed": driver.seed,
            "clear_cache": registered.clear_cache,
            "prefetch": registered.prefetch,
            "answering": call.answering,
        }
        driver.post("call", body, call, self._homes, parcels)
        return Refs(driver, call, mode, plan, self._infos)

    def _parcels(
        self, name: str, mode: dispatch.Mode, args: Any, kwargs: Any
    ) -> tuple[list[Outgoing], StepPlan | None]:
        if isinstance(mode, tuple):
            each = dispatch.split_by_pair(mode, args, kwargs, self._infos)
            return [self._values(name, a, k, (r,)) for (a, k), r in self._zip(each)], None
        if mode is Dispatch.ALL_TO_ALL:
            dispatch.check_all_to_all(args, kwargs, self.world_size)
            each = [dispatch.spread(args, kwargs, i) for i in range(self.world_size)]
            return [self._values(name, a, k, (r,)) for (a, k), r in self._zip(each)], None
        found: list[DataProto] = []

        def slot(value: Any) -> Any:
            if isinstance(value, DataProto):
                found.append(value)
                return Slot(len(found) - 1)
            return value

        if mode in _SPLIT and any(isinstance(v, DataProto) for v in (*args, *kwargs.values())):
            args = tuple(slot(v) for v in args)
            kwargs = {k: slot(v) for k, v in kwargs.items()}
        plan = self._plan_of(name, found)
        parcels = [p for i, d in enumerate(found) for p in self._shards(i, d, mode, plan)]
        parcels.append(self._values(name, args, kwargs, self._homes))
        return parcels, plan

    def _zip(self, each: Sequence[Any]) -> list[tuple[Any, int]]:
        return list(zip(each, self._homes, strict=True))

    def _plan_of(self, name: str, found: list[DataProto]) -> StepPlan | None:
        plans = [d.plan for d in found if d.plan is not None]
        if len(plans) > 1 and any(p != plans[0] for p in plans):
            raise ValueError(
                f"{self.name}.{name}: its arguments have different plans; one is meant"
            )
        if plans or not found or not self._topology.steps_together:
            return plans[0] if plans else None
        micro = self._topology.micro_batch_size
        return default_plan(len(found[0]), self.dp_size, micro, _denominators(found[0]))

    def _shards(
        self, index: int, data: DataProto, mode: Any, plan: StepPlan | None
    ) -> list[Outgoing]:
        batch, meta = Batch(data), strip_metrics(data)
        parcels = []
        for delivery in dispatch.deliveries(mode, self._infos, len(data), plan):
            receivers = tuple(self._homes[w] for w in delivery.receivers)
            mine = None
            if plan is not None:
                mine = local(plan, self._infos[delivery.receivers[0]].dp_rank)
            parcels.append(
                batch_parcel(
                    index, batch, meta, delivery.rows, receivers, self._fan(receivers), mine
                )
            )
        return parcels

    def _values(self, name: str, args: Any, kwargs: Any, receivers: Ranks) -> Outgoing:
        try:
            skeleton, buffers = dumps((args, kwargs))
        except Exception as error:
            parts = {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
            where = find_unpicklable(parts, "arguments")
            raise TypeError(
                f"{self.name}.{name}: {where} can't be sent to the workers: {error}. "
                "Send plain data; make locks, files and functions inside the worker"
            ) from error
        return value_parcel(skeleton, buffers, receivers, self._fan(receivers))

    def _fan(self, receivers: Ranks) -> Ranks | None:
        """The group that fans out to these receivers: one of the role's own."""
        if len(receivers) == 1:
            return None
        if receivers == self._homes:
            return self._groups["world"][0]
        for groups in self._groups.values():
            for group in groups:
                if group == receivers:
                    return group
        # DP_MP_DISPATCH_FIRST: empty parts, for which no byte is sent
        return self._groups["world"][0]


def _denominators(data: DataProto) -> dict[str, float]:
    """What losses are divided by where no plan says: rows, and tokens that a loss is wanted of."""
    counts = {"rows": float(len(data))}
    if data.batch is not None and "response_mask" in data.batch.keys():  # noqa: SIM118
        counts["tokens"] = float(data["response_mask"].sum())
    elif data.batch is not None and "labels" in data.batch.keys():  # noqa: SIM118
        counts["tokens"] = float((data["labels"] != -100).sum())
    return counts


def _dotted(cls: type) -> str:
    if "<locals>" in cls.__qualname__ or cls.__module__ == "__main__":
        raise ValueError(
            f"worker class {cls.__qualname__} of {cls.__module__} can't be found by other ranks: "
            "put it at the top of a module"
        )
    return f"{cls.__module__}.{cls.__qualname__}"


def _free_port(role: str, driver: Driver, home: int) -> int:
    """A port for the role's own use on its first host: free if that is the driver's host too."""
    if driver.places[home].host == driver.places[driver.layout.driver_rank].host:
        with socket.create_server(("", 0)) as server:
            return int(server.getsockname()[1])
    return 20000 + zlib.crc32(role.encode()) % 10000
