"""Starts a benchmark's job under torchrun, on one machine and with one thread a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def start_job(config: Mapping[str, Any], ranks: int) -> int:
    """Run a config, whose classes are in this folder and whose output_dir is a folder; its code."""
    path = Path(config["output_dir"]) / "job.yaml"
    path.write_text(yaml.safe_dump(dict(config)))
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, "-m", *command, "-m", "roll_td", str(path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
    ).returncode
