"""Who sends which weights to whom: arithmetic, before any byte moves.

The ranks of the source gather one weight after the other, so each of them holds all of it for a
moment. Weights fill buckets in that order; the buckets go round the owners, and an owner sends
its buckets to every target rank that is no source rank. One that is takes its weights as they are
gathered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from roll_td.strategies.parts import Weight

OWNERS = 8
"""At most so many ranks send: each has a process group with all receivers, which costs each of
these 3 threads and 5 to 8 descriptors."""
ALIGN = 16
"""Bytes that each piece begins at a multiple of: enough for numbers of any dtype."""

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A run of the numbers of one weight, in a bucket."""

    name: str
    shape: tuple[int, ...]
    """Of the whole weight."""
    dtype: torch.dtype
    """The target's, in which it is sent."""
    start: int
    """Of the flattened weight, the first number."""
    count: int
    """How many numbers."""
    offset: int
    """Byte of the bucket where it begins."""


@dataclass(frozen=True)
class Bucket:
    """What is sent at once."""

    owner: int
    """Global rank that sends it."""
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Its length: the last piece's end."""
        last = self.pieces[-1]
        return last.offset + last.count * last.dtype.itemsize


@dataclass(frozen=True)
class UpdatePlan:
    """An update of the weights of one role from those of another."""

    source: str
    """Name of the role that gives."""
    target: str
    """Name of the role that takes."""
    source_ranks: Ranks
    """Global ranks of the source's workers, in their order."""
    target_ranks: Ranks
    """Global ranks of the target's workers. A worker with several devices takes weights on the
    first of its ranks; what it gives to its other devices is its strategy's affair."""
    weights: Mapping[str, Weight]
    """What the target takes, in the order of the source's gathers."""
    buckets: tuple[Bucket, ...]
    adapters: bool = False
    """Whether they are those of LoRA layers alone, which the target puts on weights of its own."""

    @cached_property
    def receivers(self) -> Ranks:
        """Target ranks to which weights have to be sent."""
        return tuple(rank for rank in self.target_ranks if rank not in self.source_ranks)

    @cached_property
    def owners(self) -> Ranks:
        """Source ranks that send; none where nobody receives."""
        return _owners(self.source_ranks) if self.receivers else ()

    @cached_property
    def bucket_bytes(self) -> int:
        """Length of the longest bucket."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    @property
    def nbytes(self) -> int:
        """Of all weights, once, in the target's dtypes."""
        return sum(math.prod(w.shape) * w.dtype.itemsize for w in self.weights.values())

    def __str__(self) -> str:
        shared = [rank for rank in self.target_ranks if rank in self.source_ranks]
        head = [
            f"{self.source} → {self.target}: {len(self.weights)} weights, "
            f"{self.nbytes / 1e6:.1f} MB in {len(self.buckets)} buckets",
            f"gather on ranks {list(self.source_ranks)}; sent to {list(self.receivers)}; "
            f"without sending on {shared}",
        ]
        rows = [("bucket", "bytes", "sent by", "weight", "numbers", "dtype")]
        for number, bucket in enumerate(self.buckets):
            owner = str(bucket.owner) if self.receivers else "-"
            labels = (str(number), str(bucket.nbytes), owner)
            for piece in bucket.pieces:
                end, whole = piece.start + piece.count, math.prod(piece.shape)
                numbers = f"all {whole}" if piece.count == whole else f"{piece.start}-{end - 1}"
                rows.append((*labels, piece.name, numbers, str(piece.dtype).partition(".")[2]))
                labels = ("", "", "")
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = (zip(row, widths, strict=True) for row in rows)
        return "\n".join(
            [*head, *("  ".join(cell.ljust(w) for cell, w in line).rstrip() for line in lines)]
        )


def make_plan(
    source: str,
    target: str,
    ranks: tuple[Ranks, Ranks],
    given: Mapping[str, Weight],
    wanted: Mapping[str, Weight],
    bucket_mb: float,
    adapters: bool = False,
) -> UpdatePlan:
    """The plan for two roles by name, on these ranks of source and target.

    given, wanted: what setup_model_update of the source and of the target says. A weight that fits
    into a bucket is in one; a longer one begins a bucket and is cut over several.

    Raises ValueError where names or shapes differ.
    """
    _check_same(source, target, given, wanted)
    weights = {name: wanted[name] for name in given}
    filled = _fill(weights, int(bucket_mb * 1e6))
    owners = _owners(ranks[0])
    buckets = tuple(
        Bucket(owners[number % len(owners)], tuple(pieces)) for number, pieces in enumerate(filled)
    )
    return UpdatePlan(source, target, *ranks, weights, buckets, adapters)


def _owners(source_ranks: Ranks) -> Ranks:
    """Spread evenly, so that they are on different nodes where there are several."""
    count = min(OWNERS, len(source_ranks))
    return tuple(source_ranks[i * len(source_ranks) // count] for i in range(count))


def _fill(weights: Mapping[str, Weight], most_bytes: int) -> Sequence[Sequence[Piece]]:
    buckets: list[list[Piece]] = []
    room = 0
    for name, (shape, dtype) in weights.items():
        start, total, size = 0, math.prod(shape), dtype.itemsize
        while start < total or total == start == 0:
            if not buckets or room < min((total - start) * size, most_bytes):
                buckets.append([])
                room = most_bytes
            count = min(total - start, max(1, room // size))
            buckets[-1].append(Piece(name, shape, dtype, start, count, most_bytes - room))
            room -= -(-count * size // ALIGN) * ALIGN
            start += count
            if total == 0:
                break
    return buckets


def _check_same(
    source: str, target: str, given: Mapping[str, Weight], wanted: Mapping[str, Weight]
) -> None:
    missing = [name for name in wanted if name not in given]
    over = [name for name in given if name not in wanted]
    shapes = [
        f"{name} is {list(given[name].shape)} and {list(wanted[name].shape)}"
        for name in given
        if name in wanted and given[name].shape != wanted[name].shape
    ]
    if missing or over or shapes:
        raise ValueError(
            f"weights of {source} don't fit {target}: {len(missing)} that {target} has are "
            f"missing {missing[:3]}, {len(over)} are left over {over[:3]}, {len(shapes)} differ in "
            f"shape {shapes[:3]}; give both roles the same model (tie_word_embeddings and "
            "vocab_size are part of it)"
        )
