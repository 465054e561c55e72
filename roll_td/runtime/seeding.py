"""Random numbers: one seed of the job, and from it one of each command on each worker."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from roll_td.platform import current_platform


def seed_command(seed: int, role: str, worker: int, step: int, method: str, count: int) -> None:
    """Seed python, numpy and torch; no two commands share a stream."""
    key = repr((seed, role, worker, step, method, count)).encode()
    number = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    current_platform.seed(number >> 1)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Give python, numpy and torch back the states they had: on the driver's rank, a worker's
    draws must not move the pipeline's."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
