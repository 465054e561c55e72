"""What a call carries: a parcel is one argument on its way, a share what one rank gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from roll_td.plan import LocalPlan
from roll_td.runtime.batches import Column
from roll_td.runtime.wire import Place

INLINE_BYTES = 64 * 1024
"""Buffers under this size travel in the control message."""
MESSAGE_BYTES = 4 * 1024 * 1024
"""So much a rank that has nothing else to do gets in the control message, however large its
buffers are: that takes less time than the transport, where each buffer is announced, asked for and
waited for. More is sent to all ranks side by side; and for a rank that is busy it would pile up."""
MESSAGES_BYTES = 16 * 1024 * 1024
"""So much of one call: it is written by the thread that calls."""
ANSWERS_BYTES = 4 * 1024 * 1024
"""So much of all answers to one call: the driver holds them beside the result."""


class Slot(NamedTuple):
    """Stands for a DataProto among the arguments of a call."""

    number: int


class Parcel(NamedTuple):
    """What every receiver is told alike: pickled once, in the head of the command."""

    slot: int | None
    """Which DataProto argument; None for the call's plain arguments, which are the last parcel and
    have a share only where bytes come with them."""
    columns: tuple[Column, ...]
    rest: bytes
    """The pickled meta_info of a batch, empty if that is. Of plain arguments the skeleton of
    (args, kwargs); empty where it is the last buffer of the share."""


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
    in_message: bool = False
    """Whether all buffers are in the control message, whatever their size."""

    @property
    def places(self) -> tuple[Place, ...]:
        """Where each buffer is. What goes to several ranks inline is sent several times, so it
        has to be smaller by as much."""
        return places_of(self.sizes, self.in_message, self.copies)

    @property
    def is_sent(self) -> bool:
        """Whether some of its bytes come by the transport."""
        return Place.SENT in self.places


class Spec(NamedTuple):
    """What the head of an answer says of its bytes; of None as it is here."""

    columns: tuple[Column, ...] = ()
    """Of a batch; its buffers are the columns in order."""
    num_rows: int = 0
    sizes: tuple[int, ...] = ()
    """Bytes of each buffer."""
    in_message: bool = True
    """Whether all buffers are in the control message, whatever their size."""
    rest: bytes = b""
    """Of a batch object columns, meta_info and lengths, pickled, if there are any; of a value its
    skeleton."""

    @property
    def places(self) -> tuple[Place, ...]:
        """Where each buffer is."""
        return places_of(self.sizes, self.in_message)


def places_of(sizes: Sequence[int], in_message: bool, copies: int = 1) -> tuple[Place, ...]:
    """Where buffers of these sizes are, each needed on `copies` ranks."""
    if in_message or max(sizes, default=0) * copies < INLINE_BYTES:
        return (Place.INLINE,) * len(sizes)
    return tuple([Place.SENT if size * copies >= INLINE_BYTES else Place.INLINE for size in sizes])
