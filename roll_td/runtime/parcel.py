"""What a command carries for one rank: a parcel is a set of buffers that goes there together."""

from __future__ import annotations

from dataclasses import dataclass

from roll_td.plan import LocalPlan
from roll_td.runtime.transport import Ranks
from roll_td.runtime.wire import Column, Place


@dataclass(frozen=True)
class Slot:
    """Stands for a DataProto among the arguments of a call."""

    index: int


@dataclass(frozen=True)
class Parcel:
    """The head of a parcel; its bytes follow inline or by the transport."""

    slot: int | None
    """Which DataProto argument; None for the call's plain arguments."""
    receivers: Ranks
    """Global ranks; the first gets the bytes from the driver, the rest from the first."""
    fan_out: Ranks | None
    """The group the first broadcasts over, where there are several receivers."""
    columns: tuple[Column, ...]
    num_rows: int
    sizes: tuple[int, ...]
    """Bytes of each buffer."""
    places: tuple[Place, ...]
    rest: bytes
    """Skeleton of (args, kwargs), or the pickled (object columns, meta_info) of a batch."""
    plan: LocalPlan | None = None
