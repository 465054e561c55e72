"""A run that is started again and again without getting anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_td.checkpoint.starts import MOST_STARTS, count_start


def test_starts_without_progress_are_counted_and_end(tmp_path: Path) -> None:
    count_start(tmp_path, 4, 0)
    for restart in range(1, MOST_STARTS + 1):
        count_start(tmp_path, 4, restart)
    with pytest.raises(ValueError, match="started again 3 times from step 4, and ended each"):
        count_start(tmp_path, 4, MOST_STARTS + 1)


def test_progress_and_a_start_of_the_users_begin_the_count_anew(tmp_path: Path) -> None:
    restart = 0
    for step in (0, 5):
        for _ in range(MOST_STARTS):
            restart += 1
            count_start(tmp_path, step, restart)
    count_start(tmp_path, 5, 0)
    assert list(tmp_path.iterdir()) == []
    count_start(tmp_path, 5, 1)
    for _ in range(MOST_STARTS - 1):
        count_start(tmp_path, 5, 1)
    with pytest.raises(ValueError, match="from step 5"):
        count_start(tmp_path, 5, 1)
