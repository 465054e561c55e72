"""How often a launcher has started a run again without any progress."""

from __future__ import annotations

import os
from pathlib import Path

from roll_td.checkpoint.files import read_json, write_json

MOST_STARTS = 3
"""How often a run may be started again from the same step before it gives up."""
STARTS = "starts.json"


def count_start(run_dir: Path, step: int, restarts: int) -> None:
    """Count a start from `step` that the launcher makes by itself, for the `restarts`th time; 0:
    the user has started it, which begins the count anew.

    ValueError after MOST_STARTS from this step that have not brought a later checkpoint.
    """
    path = run_dir / STARTS
    if restarts == 0:
        path.unlink(missing_ok=True)
        return
    before = read_json(path) if path.exists() else {"step": step, "starts": 0}
    starts = before["starts"] + 1 if before["step"] == step else 1
    if starts > MOST_STARTS:
        raise ValueError(
            f"started again {MOST_STARTS} times from step {step}, and ended each time before the "
            "next checkpoint; see the logs for why, set a smaller save_steps or a longer time "
            "limit, and submit it again"
        )
    partial = path.with_suffix(".partial")
    write_json(partial, {"step": step, "starts": starts})
    os.replace(partial, path)
