"""What a call carries: a parcel is one argument on its way, a share what one rank gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roll_td.plan import LocalPlan
from roll_td.runtime.batches import Column
from roll_td.runtime.wire import INLINE_BYTES, Place


@dataclass(frozen=True)
class Slot:
    """Stands for a DataProto among the arguments of a call."""

    index: int


@dataclass(frozen=True)
class Parcel:
    """What every receiver is told alike: pickled once, in the head of the command."""

    slot: int | None
    """Which DataProto argument; None for the call's plain arguments."""
    columns: tuple[Column, ...]
    rest: bytes
    """The pickled meta_info of a batch. Of plain arguments the skeleton of (args, kwargs); empty
    where it is the last buffer of the share."""


class Share(NamedTuple):
    """What one rank, or several that get the same, get of a parcel.

    Its buffers are the columns in order, then the object columns if there are any; of plain
    arguments the tensors, then the skeleton unless the parcel has it.
    """

    num_rows: int
    sizes: tuple[int, ...]
    """Bytes of each buffer."""
    copies: int
    """How many ranks get the same."""
    source: int
    """The global rank that gets the bytes from the driver and passes them on."""
    group: str | None
    """The role's group over which it does that, by name; None for a share of one rank."""
    plan: LocalPlan | None
    at_once: bool = False
    """Whether the bytes are sent with the command: the source has nothing else to do. Else it
    says when it is ready, and when it has them."""

    @property
    def places(self) -> tuple[Place, ...]:
        """Where each buffer is. What goes to several ranks inline is sent several times, so it
        has to be smaller by as much."""
        return places_of(self.sizes, self.copies)

    @property
    def is_sent(self) -> bool:
        """Whether some of its bytes come by the transport."""
        return max(self.sizes, default=0) * self.copies >= INLINE_BYTES


def places_of(sizes: Sequence[int], copies: int = 1) -> tuple[Place, ...]:
    """Where buffers of these sizes are, each needed on `copies` ranks."""
    return tuple([Place.SENT if size * copies >= INLINE_BYTES else Place.INLINE for size in sizes])
