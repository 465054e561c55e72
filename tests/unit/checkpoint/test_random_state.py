"""Random states: the same draws afterwards, or a loud failure."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from roll_td.checkpoint.random_state import load_random_state, save_random_state
from roll_td.runtime.seeding import kept_random_state, seed_command


@pytest.fixture(autouse=True)
def own_draws():  # type: ignore[no-untyped-def]
    with kept_random_state():
        yield


def draw() -> tuple[float, ...]:
    numbers = random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()
    return *numbers, torch.rand(1).item(), torch.randn(1).item()


def test_d09_each_process_has_its_own_states_back(tmp_path: Path) -> None:  # D09
    wanted = []
    for rank in range(2):
        seed_command(1, "actor", rank, 0, "train", 0)
        for _ in range(3 + 4 * rank):  # odd: python and numpy keep half of a pair of normals
            draw()
        save_random_state(tmp_path / f"{rank}.json")
        wanted.append([draw() for _ in range(3)])
    seed_command(2, "other", 0, 0, "", 0)
    found = []
    for rank in range(2):
        load_random_state(tmp_path / f"{rank}.json")
        found.append([draw() for _ in range(3)])
    assert found == wanted and not set(found[0]) & set(found[1])


def test_d10_states_round_trip_and_a_damaged_part_is_loud(tmp_path: Path) -> None:  # D10
    path = tmp_path / "random.json"
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    save_random_state(path)
    draw()
    load_random_state(path)
    assert random.getstate() == before[0]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), before[2])
    whole = path.read_text()
    record = json.loads(whole)
    for part in ("python", "numpy", "torch"):
        broken = json.loads(whole)
        value = broken["content"][part]
        broken["content"][part] = value[1:] if isinstance(value, str) else [*value[:-1], 0.5]
        path.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=r"random.json is damaged: its checksum is another"):
            load_random_state(path)
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"random.json is damaged: "):
        load_random_state(path)
    del record["sha256"]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"random.json is damaged: 'sha256'"):
        load_random_state(path)
    assert random.getstate() == before[0], "a failure leaves the states as they were"
