"""Cluster: one role's workers, called as if they were one."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import pickle
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from roll_td.config.base import WorkerConfig
from roll_td.config.classes import import_class
from roll_td.distributed.topology import RankInfo, rank_infos, role_groups
from roll_td.placement import RolePlacement, place
from roll_td.plan import StepPlan, default_plan, local, token_plan
from roll_td.protocol import DataProto
from roll_td.runtime import dispatch
from roll_td.runtime.batches import Batch
from roll_td.runtime.dispatch import DP_MODES, Dispatch, Registered
from roll_td.runtime.driver import Call, Driver, current_driver
from roll_td.runtime.outgoing import Outgoing, Way, batch_share, strip_metrics, value_share
from roll_td.runtime.parcel import ANSWERS_BYTES, INLINE_BYTES, Parcel, Slot
from roll_td.runtime.refs import Refs, Reply, Stream
from roll_td.runtime.together import post_groups
from roll_td.runtime.transport import Group, Ranks
from roll_td.runtime.wire import dumps, dumps_whole, find_unpicklable, is_picklable


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
            k: [Group(tuple(self._homes[w] for w in g), worker_config.timeout_s) for g in groups]
            for k, groups in role_groups(topology).items()
        }
        self._ways = {mode: self._ways_of(mode) for mode in DP_MODES}
        self._data_group = self._make_data_group()
        self._bind(cls)
        self._built = self._build(dotted)
        if blocking:
            self.wait_built()

    def rank_info(self, rank: int) -> RankInfo:
        """Where worker `rank` stands in the role's topology."""
        return self._infos[rank]

    def plan_for(self, data: DataProto, denominators: Mapping[str, float]) -> StepPlan:
        """How the role cuts these rows where they have no plan: in micro-batches of so many tokens
        or rows as its config says. For a loss with denominators of its own."""
        topology = self._topology
        if topology.micro_batch_tokens is not None and "lengths" in data:
            lengths, most = data["lengths"].tolist(), topology.micro_batch_tokens
            return token_plan(lengths, self.dp_size, most, denominators)
        return default_plan(len(data), self.dp_size, topology.micro_batch_size, denominators)

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

    def _ways_of(self, mode: Dispatch) -> list[tuple[int, Way]]:
        """To whom the shards of a batch go, each with its dp rank."""
        ways = []
        for workers in dispatch.shard_receivers(mode, self._infos):
            ranks = tuple(self._homes[w] for w in workers)
            ways.append(
                (self._infos[workers[0]].dp_rank, Way(ranks, "mp" if len(ranks) > 1 else None))
            )
        return ways

    def _make_data_group(self) -> Group:
        """The driver, first ranks, answering ranks: those that bytes leave from or come to."""
        driver = self._driver.layout.driver_rank
        # every worker may answer (ONE_TO_ALL) or get rows of its own (ALL_TO_ALL)
        ranks = (driver, *(r for r in dict.fromkeys(self._homes) if r != driver))
        return Group(ranks, self._driver.transfer_timeout_s)

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
        wanted = list(dict.fromkeys(chain(*self._groups.values(), [self._data_group])))
        groups = post_groups(driver, self.name, wanted)
        build = self._new_call("build")
        body = {
            "cluster": f"{self.name}/{groups.number}",
            "role": self.name,
            "worker_cls": dotted,
            "worker_config": config,
            "infos": self._infos,
            "seats": self.placement.seats,
            "topology": self._topology,
            "groups": self._groups,
            "data_group": self._data_group,
            "master_addr": driver.places[self._homes[0]].address,
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
        answering = dispatch.answering(registered.dispatch_mode, self._infos)

        def call(*args: Any, blocking: bool = True, **kwargs: Any) -> Any:
            refs = self._call(name, registered, answering, args, kwargs)
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
            with self._sending(name, args, kwargs):
                arguments = dumps_whole((args, kwargs))
            items = self._driver.request(rank, self._id, name, arguments)
            if streams:
                return Stream(items)
            return next(items) if blocking else Reply(items)

        return request

    def _call(
        self, name: str, registered: Registered, answering: tuple[int, ...], args: Any, kwargs: Any
    ) -> Refs:
        mode, driver = registered.dispatch_mode, self._driver
        call = self._new_call(name)
        call.answering, call.join = answering, mode in DP_MODES
        plan = None
        if isinstance(mode, tuple) or mode is Dispatch.ALL_TO_ALL:
            parcels, outgoing = self._each_its_own(name, mode, args, kwargs)
        else:
            parcels, outgoing, plan = self._split(name, mode, args, kwargs)
        body = {
            "cluster": self._id,
            "method": name,
            "step": driver.step,
            "count": driver.count_call(self.name, name),
            "seed": driver.seed,
            "clear_cache": registered.clear_cache,
            "prefetch": registered.prefetch,
            "answering": answering,
            "room": ANSWERS_BYTES // max(len(answering), 1),
            "parcels": parcels,
        }
        driver.post("call", body, call, self._homes, outgoing)
        return Refs(driver, call, mode, plan, self._infos)

    def _each_its_own(
        self, name: str, mode: dispatch.Mode, args: Any, kwargs: Any
    ) -> tuple[list[Parcel], list[Outgoing]]:
        """Arguments of its own for each worker."""
        if isinstance(mode, tuple):
            each = dispatch.split_by_pair(mode, args, kwargs, self._infos)
        else:
            dispatch.check_all_to_all(args, kwargs, self.world_size)
            each = [dispatch.spread(args, kwargs, i) for i in range(self.world_size)]
        outgoing = []
        for call, rank in zip(each, self._homes, strict=True):
            with self._sending(name, *call):
                outgoing.append(value_share(dumps(tuple(call)), Way((rank,), None)))
        return [Parcel(None, (), b"")], outgoing

    def _split(
        self, name: str, mode: Dispatch, args: Any, kwargs: Any
    ) -> tuple[list[Parcel], list[Outgoing], StepPlan | None]:
        """The same for all, but for the rows of DataProtos in a DP mode."""
        found: list[DataProto] = []

        def slot(value: Any) -> Any:
            if not isinstance(value, DataProto):
                return value
            if not any(value is data for data in found):
                found.append(value)
            return Slot(next(i for i, data in enumerate(found) if data is value))

        if mode in DP_MODES:
            args, kwargs = tuple(map(slot, args)), {k: slot(v) for k, v in kwargs.items()}
        plan = self._plan_of(name, found)
        parcels, outgoing = [], []
        for index, data in enumerate(found):
            with self._sending(name, (data,), {}):
                batch, meta_info = Batch(data), strip_metrics(data)
                meta = pickle.dumps(meta_info, 5) if meta_info else b""
                parcels.append(Parcel(index, tuple(batch.columns), meta))
                outgoing += self._shards(batch, mode, plan)
        with self._sending(name, args, kwargs):
            value = dumps((args, kwargs))
        everyone = Way(self._homes, "world" if self.world_size > 1 else None)
        if len(value.skeleton) < INLINE_BYTES:
            parcels.append(Parcel(None, (), value.skeleton))
            value = value._replace(skeleton=b"")
        else:
            parcels.append(Parcel(None, (), b""))
        if value.skeleton or value.buffers:
            outgoing.append(value_share(value, everyone))
        return parcels, outgoing, plan

    def _plan_of(self, name: str, found: list[DataProto]) -> StepPlan | None:
        plans = [d.plan for d in found if d.plan is not None]
        if len(plans) > 1 and any(p != plans[0] for p in plans):
            raise ValueError(
                f"{self.name}.{name}: its arguments have different plans; one is meant"
            )
        if plans or not found or not self._topology.steps_together:
            return plans[0] if plans else None
        return self.plan_for(found[0], _denominators(found[0]))

    def _shards(self, batch: Batch, mode: Dispatch, plan: StepPlan | None) -> list[Outgoing]:
        rows = dispatch.shard_rows(self.dp_size, batch.num_rows, plan)
        plans = [None if plan is None else local(plan, d) for d in range(self.dp_size)]
        ways = self._ways[mode]
        rows += [slice(0, 0)] * (len(ways) - self.dp_size)  # of workers that are not first
        return [
            batch_share(batch, shard, way, plans[dp_rank])
            for shard, (dp_rank, way) in zip(rows, ways, strict=True)
        ]

    @contextlib.contextmanager
    def _sending(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Name what can't be pickled. Pickling runs the code of whatever is in the arguments, so
        it may raise anything."""
        try:
            yield
        except Exception as error:
            parts = {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
            if is_picklable(parts):
                raise  # it was something else
            raise TypeError(
                f"{self.name}.{name}: {find_unpicklable(parts, 'arguments')} can't be sent to the "
                f"workers: {error}. Send plain data; make locks, files and functions in the worker"
            ) from error


def _denominators(data: DataProto) -> dict[str, float]:
    """What losses are divided by where no plan says: rows, and tokens that a loss is wanted of."""
    counts, tensors = {"rows": float(len(data))}, data.tensors()
    if "response_mask" in tensors:
        counts["tokens"] = float(tensors["response_mask"].sum())
    elif "labels" in tensors:
        counts["tokens"] = float((tensors["labels"] != -100).sum())
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
