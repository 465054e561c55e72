"""How the arguments of a Cluster call reach the workers and how their answers become one.

Pure: it plans over RankInfo and moves nothing. Of a batch it says which rows go to whom
(`shard_rows`, `shard_receivers`), of the answers who is asked (`answering`) and what is made of
them (`collect`).

Every function here is linear in the workers of the role, plus the rows where there is a plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, pairwise
from typing import Any, TypeGuard, TypeVar

from roll_td.distributed.topology import RankInfo
from roll_td.plan import LocalPlan, StepPlan, local, restore_order


class Dispatch(Enum):
    """What each worker gets of a call, and what the call returns."""

    ONE_TO_ALL = "one_to_all"
    """The same to every worker; a list, one result per worker."""
    ONE_TO_ALL_ONE = "one_to_all_one"
    """The same to every worker; the result of worker 0."""
    ALL_TO_ALL = "all_to_all"
    """Item i of each argument to worker i; a list, one result per worker."""
    DP_MP_COMPUTE = "dp_mp_compute"
    """A DataProto's rows split by dp, the same inside a dp rank; one result per dp rank, joined."""
    DP_MP_DISPATCH_FIRST = "dp_mp_dispatch_first"
    """As DP_MP_COMPUTE, but rows only to the first worker of each dp rank, none to the others."""


Call = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of one worker."""
Pair = tuple[Callable[..., Sequence[Call]], Callable[..., Any]]
"""A user's own mode: split(args, kwargs, infos) -> one Call per worker; collect(values, infos)."""
Mode = Dispatch | Pair
Rows = slice | tuple[int, ...]

DP_MODES = (Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST)


# Rows to workers


def row_cuts(num_rows: int, dp_size: int) -> list[tuple[int, int]]:
    """(start, stop) of each of dp_size parts of num_rows rows; sizes as numpy.array_split."""
    size, larger = divmod(num_rows, dp_size)
    starts = [part * size + min(part, larger) for part in range(dp_size + 1)]
    return list(pairwise(starts))


def shard_receivers(mode: Dispatch, infos: Sequence[RankInfo]) -> list[tuple[int, ...]]:
    """The worker ranks that get each shard of a batch in a DP mode; every worker is in one.

    DP_MP_COMPUTE: all workers of a dp rank, its first worker at the head, in dp order.
    DP_MP_DISPATCH_FIRST: the first worker of each dp rank in dp order; then, for shards without
    rows, each other worker.
    """
    shards: list[list[int]] = [[] for _ in range(infos[0].dp_size)]
    others: list[tuple[int, ...]] = []
    for info in sorted(infos, key=lambda info: not info.is_first):
        if mode is Dispatch.DP_MP_COMPUTE or info.is_first:
            shards[info.dp_rank].append(info.rank)
        else:
            others.append((info.rank,))
    return [*map(tuple, shards), *others]


def shard_rows(dp_size: int, num_rows: int, plan: StepPlan | None = None) -> list[Rows]:
    """The rows of a batch of num_rows rows that each dp rank gets: those the plan gives it, else
    those of `row_cuts`. Raises ValueError for a plan that fits neither the rows nor the role.

    Neighbouring rows are a slice, others row numbers in the order they arrive.
    """
    if plan is None:
        return [slice(start, stop) for start, stop in row_cuts(num_rows, dp_size)]
    if plan.dp_size != dp_size:
        raise ValueError(
            f"the plan is for {plan.dp_size} dp ranks, the role has {dp_size}; "
            "make the plan for the cluster's dp_size"
        )
    plan.validate(num_rows)
    return [_slice_if_neighbours(local(plan, dp_rank).rows) for dp_rank in range(dp_size)]


def _slice_if_neighbours(rows: tuple[int, ...]) -> Rows:
    """The same rows as a slice where they are one: a slice of a tensor is not a copy."""
    start = rows[0] if rows else 0
    stop = start + len(rows)
    return slice(start, stop) if rows == tuple(range(start, stop)) else rows


def check_all_to_all(args: Sequence[Any], kwargs: Mapping[str, Any], world_size: int) -> None:
    """Raise ValueError unless each argument is a list or tuple of world_size items."""
    named = chain(enumerate(args), kwargs.items())
    for name, value in named:
        if not isinstance(value, list | tuple):
            given = f"of type {type(value).__name__}"
        elif len(value) != world_size:
            given = f"a {type(value).__name__} of {len(value)} items"
        else:
            continue
        raise ValueError(
            f"ALL_TO_ALL: argument {name!r} is {given}; each must be a list or tuple of "
            f"{world_size} items, one per worker; for the same to all use ONE_TO_ALL"
        )


def spread(args: Sequence[Any], kwargs: Mapping[str, Any], i: int) -> Call:
    """Worker i's arguments of an ALL_TO_ALL call that check_all_to_all passed."""
    return tuple(value[i] for value in args), {name: value[i] for name, value in kwargs.items()}


# Answers to one result


def answering(mode: Mode, infos: Sequence[RankInfo]) -> tuple[int, ...]:
    """The worker ranks whose results the call returns, in the order collect wants them.

    DP modes: the collecting ranks in dp order. ONE_TO_ALL_ONE: worker 0. Others, pairs too:
    all in rank order.
    """
    if mode is Dispatch.ONE_TO_ALL_ONE:
        return (0,)
    if mode in DP_MODES:
        collecting = (info for info in infos if info.is_collecting)
        return tuple(info.rank for info in sorted(collecting, key=lambda info: info.dp_rank))
    return tuple(sorted(info.rank for info in infos))


def collect(mode: Dispatch, values: Sequence[Any]) -> Any:
    """One result of the answering ranks' values.

    ONE_TO_ALL, ALL_TO_ALL: a list. ONE_TO_ALL_ONE: the one value. DP modes: None if all are
    None, DataProtos concatenated, lists chained, anything else a list per dp rank. Raises
    ValueError where some dp ranks gave a DataProto and some did not.
    """
    if mode is Dispatch.ONE_TO_ALL_ONE:
        return values[0]
    if mode not in DP_MODES:
        return list(values)
    if all(value is None for value in values):
        return None
    if _are_batches(values):
        return _join(values)
    if all(isinstance(value, list) for value in values):
        return _join(values)
    return list(values)


def collect_planned(values: Sequence[Any], plan: StepPlan) -> Any:
    """`collect` for the DP modes where a plan cut the rows: rows come back in batch order.

    Each dp rank's DataProto or list has the rows it got (those only its fillers need are
    dropped) or its own rows; or all have none, as when only metrics are returned. Values of
    other types are collected as without a plan. Raises ValueError for other row counts.
    """
    if len(values) != plan.dp_size:
        raise ValueError(
            f"collect_planned: {len(values)} values for a plan of {plan.dp_size} dp ranks; "
            "give one per dp rank"
        )
    if not _are_batches(values) and not all(isinstance(value, list) for value in values):
        return collect(Dispatch.DP_MP_COMPUTE, values)
    if not any(len(value) for value in values):
        return _join(values)
    locals_ = [local(plan, dp_rank) for dp_rank in range(plan.dp_size)]
    joined = _join(
        [
            _real_part(value, part, dp_rank)
            for dp_rank, (value, part) in enumerate(zip(values, locals_, strict=True))
        ]
    )
    order = restore_order(plan)
    if order == list(range(len(order))):
        return joined
    return [joined[i] for i in order] if isinstance(joined, list) else joined[order]


def _real_part(value: Any, part: LocalPlan, dp_rank: int) -> Any:
    if len(value) == part.num_real:
        return value
    if len(value) == len(part.rows):
        return value[: part.num_real]
    raise ValueError(
        f"dp rank {dp_rank} returned {len(value)} rows; it got {len(part.rows)}, of which "
        f"{part.num_real} are its own: return a row for each of either, or no row on any rank"
    )


def _are_batches(values: Sequence[Any]) -> bool:
    """Whether all values are DataProtos. Raises ValueError where only some are."""
    from roll_td.protocol import DataProto

    count = sum(isinstance(value, DataProto) for value in values)
    if 0 < count < len(values):
        raise ValueError(
            f"the dp ranks returned different things: {_types_by_rank(values)}; where one "
            "returns a DataProto all must: return one with no rows instead"
        )
    return count > 0


def _types_by_rank(values: Iterable[Any]) -> str:
    ranks: dict[str, list[int]] = {}
    for dp_rank, value in enumerate(values):
        ranks.setdefault(type(value).__name__, []).append(dp_rank)
    return ", ".join(f"{name} from dp ranks {given}" for name, given in ranks.items())


def _join(values: Sequence[Any]) -> Any:
    """Lists chained, DataProtos concatenated."""
    if isinstance(values[0], list):
        return list(chain.from_iterable(values))
    from roll_td.protocol import DataProto

    return DataProto.concat(list(values))


# A user's own mode


def is_pair(mode: object) -> TypeGuard[Pair]:
    """Whether mode is a tuple of two functions."""
    return isinstance(mode, tuple) and len(mode) == 2 and all(map(callable, mode))


def split_by_pair(
    pair: Pair, args: Sequence[Any], kwargs: Mapping[str, Any], infos: Sequence[RankInfo]
) -> list[Call]:
    """The Call of each worker in rank order, made by the pair's split.

    Raises ValueError unless split returns a list or tuple of one (args, kwargs) per worker,
    args a list or tuple and kwargs a dict.
    """
    calls = pair[0](args, kwargs, infos)
    rule = f"it must return a list of {len(infos)} (args, kwargs), one per worker"
    name = getattr(pair[0], "__name__", repr(pair[0]))
    if not isinstance(calls, list | tuple):
        raise ValueError(f"split function {name} returned a {type(calls).__name__}; {rule}")
    if len(calls) != len(infos):
        raise ValueError(f"split function {name} returned {len(calls)} items; {rule}")
    for rank, call in enumerate(calls):
        if not _is_call(call):
            raise ValueError(
                f"split function {name} returned {call!r:.80} for worker {rank}; {rule}, "
                "args a list or tuple and kwargs a dict"
            )
    return list(calls)


def _is_call(call: object) -> bool:
    if not (isinstance(call, list | tuple) and len(call) == 2):
        return False
    return isinstance(call[0], list | tuple) and isinstance(call[1], dict)


# Marked methods

_REGISTERED = "__registered__"
_REQUEST = "__request__"
_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Registered:
    """What @register says of a method."""

    dispatch_mode: Mode
    clear_cache: bool = False
    """Free the device's cached memory after the call."""
    prefetch: bool = False
    """Let the rows of this call arrive while the one before it runs."""


def register(
    dispatch_mode: Mode, clear_cache: bool = False, prefetch: bool = False
) -> Callable[[_Method], _Method]:
    """Mark a Worker method as a command that a Cluster can call.

    Raises ValueError for a dispatch_mode that is neither a Dispatch nor a pair of functions,
    and for a method that is async, a generator, a request, or has a parameter `blocking`.
    """
    if not isinstance(dispatch_mode, Dispatch) and not is_pair(dispatch_mode):
        raise ValueError(
            f"@register: dispatch_mode is {dispatch_mode!r:.80}; it must be a Dispatch, as in "
            "@register(dispatch_mode=Dispatch.ONE_TO_ALL), or a (split, collect) tuple of functions"
        )

    def mark(method: _Method) -> _Method:
        _check_method("@register", method, _REQUEST, {"blocking"})
        if inspect.isgeneratorfunction(method):
            raise ValueError(
                f"@register: {method.__qualname__} is a generator, so its results would be made "
                "after the command has ended; return a list, or stream with @register_request"
            )
        setattr(method, _REGISTERED, Registered(dispatch_mode, clear_cache, prefetch))
        return method

    return mark


def register_request(method: _Method) -> _Method:
    """Mark a Worker method as a request: called on one worker, beside the commands.

    A generator streams its results. Raises ValueError for a method that is async, a command,
    or has a parameter `blocking` or `worker`.
    """
    _check_method("@register_request", method, _REGISTERED, {"blocking", "worker"})
    setattr(method, _REQUEST, True)
    return method


def registered_methods(cls: type) -> dict[str, Registered]:
    """The commands of a Worker class by name, as the class itself resolves them.

    Raises ValueError where a class overrides a command without marking it again.
    """
    return _marked(cls, _REGISTERED, "@register(...)")


def request_methods(cls: type) -> set[str]:
    """The names of the requests of a Worker class; errors as registered_methods."""
    return set(_marked(cls, _REQUEST, "@register_request"))


def _check_method(decorator: str, method: object, other_mark: str, taken: set[str]) -> None:
    if not inspect.isfunction(method):
        raise ValueError(
            f"{decorator}: {method!r:.80} is a {type(method).__name__}; it marks a plain method, "
            "so put it below any @staticmethod, @classmethod or @property, or drop those"
        )
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        raise ValueError(
            f"{decorator}: {method.__qualname__} is async, and nobody awaits its result; "
            "make it a plain method, with asyncio.run inside if need be"
        )
    if own := taken & inspect.signature(method).parameters.keys():
        raise ValueError(
            f"{decorator}: {method.__qualname__} has a parameter {min(own)!r}, which the Cluster's "
            "method already takes; give yours another name"
        )
    if hasattr(method, other_mark):
        raise ValueError(
            f"{decorator}: {method.__qualname__} is both a command and a request; "
            "mark it with @register or @register_request, not both"
        )


def _marked(cls: type, mark: str, decorator: str) -> dict[str, Any]:
    """The marks of a class's methods by name, from the first class of the MRO that has each."""
    found: dict[str, Any] = {}
    owners: dict[str, type] = {}
    for base in cls.__mro__:
        for name, attribute in vars(base).items():
            owner = owners.setdefault(name, base)
            value = getattr(attribute, "__dict__", {}).get(mark)
            if value is None:
                continue
            if owner is base:
                found[name] = value
            elif name not in found:
                raise ValueError(
                    f"{owner.__qualname__}.{name} overrides {base.__qualname__}.{name} without "
                    f"{decorator}, so a Cluster would not have it; add {decorator} to it"
                )
    return found
