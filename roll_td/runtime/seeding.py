"""Random numbers: one seed of the job, and from it one of each command on each worker."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_command(seed: int, role: str, worker: int, step: int, method: str, count: int) -> None:
    """Seed python, numpy and torch; no two commands share a stream."""
    key = repr((seed, role, worker, step, method, count)).encode()
    number = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.manual_seed(number >> 1)
