"""The random states of a process: python's, numpy's, torch's. Plain data, no pickle."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll_td.checkpoint.files import read_json, write_json


def save_random_state(path: Path) -> None:
    """Write this process's random states to a file."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    # asking for the state of a device that nobody has used would make its context
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    state = {
        "python": [version, words, gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _hex(torch.get_rng_state()),
        "cuda": None if cuda is None else _hex(cuda),
    }
    write_json(path, state)


def load_random_state(path: Path) -> None:
    """Take over the states of such a file. ValueError, naming it, if it is damaged; then no state
    has changed."""
    state: dict[str, Any] = read_json(path)
    version, words, gauss = state["python"]
    kind, keys, position, has_gauss, cached = state["numpy"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
