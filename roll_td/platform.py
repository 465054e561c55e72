"""What differs by hardware, in one object: `current_platform`."""

from __future__ import annotations

import ctypes
import os

import torch


class Platform:
    """The accelerator of this process; the CPU stands in where there is none."""

    def __init__(self) -> None:
        self.device_type: str = "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def backend(self) -> str:
        """The torch.distributed backend of a role's process groups."""
        return "cpu:gloo,cuda:nccl" if self.device_type == "cuda" else "gloo"

    def device(self, local_rank: int) -> torch.device:
        """The device of a device rank. Where a launcher shows each rank its own GPU
        only, that GPU is number 0 whatever the local rank."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else local_rank)

    def use(self, device: torch.device) -> None:
        """Make `device` the current one of this thread."""
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def seed(self, number: int) -> None:
        """Seed torch's draws on the CPU and on the current device. Not torch.manual_seed, which
        takes 0.4 ms to look at every kind of device that there is."""
        torch.default_generator.manual_seed(number)
        if self.device_type == "cuda":
            torch.cuda.manual_seed(number)

    def empty_cache(self) -> None:
        """Free what the caching allocator holds."""
        if self.device_type == "cuda":
            torch.cuda.empty_cache()


def physical_device(local_rank: int) -> str | None:
    """The physical device behind a local one, from CUDA_VISIBLE_DEVICES; None if unset."""
    visible = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    if not visible:
        return None
    return visible[0] if len(visible) == 1 else (visible + ["?"] * (local_rank + 1))[local_rank]


def keep_freed_memory() -> None:
    """Have the C library reuse blocks of up to 32 MiB that were freed, up to 256 MiB of them. Else
    it gives them back, and each buffer of a call costs a page fault every 4 KiB: measured, that is
    up to half of the processor time of a call. Nothing happens without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def give_freed_memory_back() -> None:
    """Have the C library give back blocks from 2 MiB on when they are freed, for who would rather
    save memory than time. Kept, they lie in pieces that do not fit what comes next: measured, ranks
    that compute the activations of SmolLM2-135M again took 2.4 times as much after two steps.
    Giving back took 15 % more processor time. Nothing happens without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2 << 20)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

current_platform = Platform()
