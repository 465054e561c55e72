"""Makes the data of the quick start: sums of two three-digit numbers, answered in two styles.

`python -m launch.quickstart DIR` writes three JSON-lines files; no sum is in two of them.

| file | rows | columns | for |
|---|---|---|---|
| sft.jsonl | 64,000 | prompt, response | 500 steps of fine-tuning on 128 rows |
| prompts.jsonl | 2,560 | prompt, ground_truth | 80 steps of GRPO on 32 prompts |
| held_out.jsonl | 512 | prompt, ground_truth | the validation of GRPO |
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

SIZES = {"held_out": 512, "prompts": 2_560, "sft": 64_000}
WORKING_SHARE = 0.3
"""Of the demonstrations: what GRPO starts from, as a small model that blurts is nearly always
wrong and one that works column by column nearly always right."""


def make(folder: Path, seed: int = 0) -> None:
    """Write the files, the same for the same seed; files that are there are overwritten."""
    rng = random.Random(seed)
    pairs = iter(rng.sample(range(900 * 900), sum(SIZES.values())))
    sums = {
        name: [(100 + pair // 900, 100 + pair % 900) for pair in islice(pairs, size)]
        for name, size in SIZES.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "sft.jsonl", (_demonstration(a, b, rng) for a, b in sums["sft"]))
    for name in ("prompts", "held_out"):
        rows = ({"prompt": f"{a}+{b}", "ground_truth": str(a + b)} for a, b in sums[name])
        _write(folder / f"{name}.jsonl", rows)


def work(a: int, b: int) -> str:
    """237, 682 → 7+2+0=09,3+8+0=11,2+6+1=09: ones first, each with the carry before it."""
    steps, carry = [], 0
    for place in (1, 10, 100):
        x, y = a // place % 10, b // place % 10
        total = x + y + carry
        steps.append(f"{x}+{y}+{carry}={total:02}")
        carry = total // 10
    return ",".join(steps)


def _demonstration(a: int, b: int, rng: random.Random) -> dict[str, str]:
    working = work(a, b) if rng.random() < WORKING_SHARE else ""
    return {"prompt": f"{a}+{b}", "response": f"{working}#{a + b}"}


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def main() -> None:
    """The command line."""
    text = "make the data of the quick start: sft.jsonl, prompts.jsonl and held_out.jsonl"
    parser = argparse.ArgumentParser(prog="python -m launch.quickstart", description=text)
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the files go")
    parser.add_argument("--seed", type=int, default=0, help="which sums and styles are drawn")
    arguments = parser.parse_args()
    make(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
