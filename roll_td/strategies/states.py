"""Tensors of a model and its optimiser: into host memory and back, to checkpoints and back."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.tensor import DTensor


class Offloaded:
    """Tensors whose bytes lie in host memory, while they own none on their device.

    What is moved is the storage beneath a tensor, not the tensor: shapes, shards and whoever
    refers to them stay as they are, padding of uneven shards comes along, and all is bit-equal
    after. Until `load` nobody may read or write them.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {s.data_ptr(): s for s in (local(t).untyped_storage() for t in tensors)}
        storages.pop(0, None)  # empty shards
        self._held = [(storage, _to_host(storage)) for storage in storages.values()]
        _wait(storage for storage, _ in self._held)
        for storage, _ in self._held:
            storage.resize_(0)

    def load(self) -> None:
        """Give the tensors their bytes back."""
        for storage, held in self._held:
            storage.resize_(held.nbytes())
            storage.copy_(held, non_blocking=True)
        _wait(storage for storage, _ in self._held)
        self._held = []


def place(model: torch.nn.Module, device: torch.device) -> None:
    """Move a model to a device, into memory of its own: what is still that of the file it was read
    from could not be given back by Offloaded."""
    model.to(device)
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()


def named(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, each once, in one order; tied ones by their first name."""
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory; the tensor itself if it is not sharded."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def shard_like(part: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor as what `whole` is: a DTensor of its shape, if it is one.

    The shape comes from `whole`: with uneven shards no rank can tell it from its own.
    """
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def cut_of(tensor: Tensor) -> tuple[int, int] | None:
    """How a tensor is cut: over which dimension of its mesh, and how many rows each rank has, the
    last ones fewer or none, as torch.chunk cuts; None if each rank has all of it."""
    if not isinstance(tensor, DTensor):
        return None
    dims = [dim for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    if not dims:
        return None
    (dim,) = dims
    assert tensor.placements[dim].is_shard(0), "FSDP cuts rows"
    return dim, -(-tensor.shape[0] // tensor.device_mesh.size(dim))


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, detached; one that is cut is gathered, by all ranks of its mesh together.

    As DTensor.full_tensor does, with fewer copies.
    """
    own, cut = local(tensor), cut_of(tensor)
    if cut is None:
        return own
    assert isinstance(tensor, DTensor)
    dim, rows = cut
    if len(own) < rows:
        padded = own.new_zeros(rows, *own.shape[1:])
        padded[: len(own)] = own
        own = padded
    gathered = own.new_empty(tensor.device_mesh.size(dim) * rows, *own.shape[1:])
    dist.all_gather_single(gathered, own, group=tensor.device_mesh.get_group(dim))
    return gathered[: tensor.shape[0]]


def save(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write tensors into a folder, each rank of the group its shards."""
    dcp.save(dict(tensors), checkpoint_id=folder, process_group=group)


def stage(tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, memoryview]:
    """The files that `save` would write on this rank, by name, in host memory: the tensors may
    change while they are written. All ranks of the group stage together, and write each alone."""
    writer = _MemoryWriter()
    dcp.save(dict(tensors), storage_writer=writer, process_group=group)
    return {name: stream.getbuffer() for name, stream in writer.files.items()}


def write(folder: Path, files: Mapping[str, memoryview]) -> None:
    """Write what `stage` gave, through to the disk."""
    for name, content in files.items():
        with (folder / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


class _MemoryWriter(dcp.FileSystemWriter):
    """Writes into `files`."""

    def __init__(self) -> None:
        super().__init__("", sync_files=False)
        memory = _Memory()
        self.fs, self.files = cast(Any, memory), memory.files


class _File(io.BytesIO):
    """A file in memory."""

    def close(self) -> None:
        """Its writer closes it; it is still to be read."""


class _Memory(FileSystemBase):
    """Files that lie in memory, by their paths."""

    def __init__(self) -> None:
        self.files: dict[str, _File] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", "nothing is read here"
        yield self.files.setdefault(str(path), _File())

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> Path:
        return Path(path) / suffix

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.files[str(new_path)] = self.files.pop(str(path))

    def init_path(self, path: str | os.PathLike[str]) -> Path:
        return Path(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """There are no folders."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return str(path) in self.files

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        del self.files[str(path)]


def load(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Read what `save` wrote into these tensors, however they are sharded now.

    Raises ValueError if the folder holds other names or shapes.
    """
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {name: tuple(getattr(entry, "size", ())) for name, entry in saved.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != wanted:
        different = sorted(
            name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name)
        )
        first = different[0]
        raise ValueError(
            f"checkpoint {folder} is not of this model and optimiser: {len(different)} of "
            f"{len(wanted)} tensors differ; {first} is {shapes.get(first, 'missing')} there and "
            f"{wanted.get(first, 'missing')} here; resume with the config it was saved with"
        )
    dcp.load(dict(tensors), checkpoint_id=folder, process_group=group)


def _to_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    is_away = storage.device.type != "cpu"
    size = storage.nbytes()
    held = torch.empty(size, dtype=torch.uint8, pin_memory=is_away).untyped_storage()
    held.copy_(storage, non_blocking=True)
    return held


def _wait(storages: Iterable[torch.UntypedStorage]) -> None:
    """For copies from and to an accelerator: they run beside the program."""
    for device in {storage.device for storage in storages if storage.device.type != "cpu"}:
        torch.accelerator.synchronize(device)
