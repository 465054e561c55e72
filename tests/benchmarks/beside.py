"""A process that takes a step of some other system when it is told to: in a job it would take the
ranks for its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Beside:
    """Runs a script of this folder, which for each line it reads prints SECONDS and how many."""

    def __init__(self, script: str, given: Any, folder: str):
        """given: what the script finds as JSON in the file that its first argument names."""
        path = Path(folder) / f"{script}.json"
        path.write_text(json.dumps(given))
        outside = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script)), str(path)],
            env={k: v for k, v in os.environ.items() if not k.startswith(outside)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> float:
        """Seconds of a step."""
        assert self.process.stdin and self.process.stdout
        print("step", file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("SECONDS"):
                return float(line.split()[1])
        raise RuntimeError(f"{self.process.args} has ended")

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
