"""Log-probs and losses of next tokens: chunked, checkpointed and naive, each in its own process.

    python tests/benchmarks/logprobs.py [--tokens N] [--vocab V] [--hidden H] [--rounds R]

Forward and backward of one function of hidden states and head on one thread, in processor seconds,
which other processes disturb less than wall time, and the most memory above what inputs and their
gradients take. A round runs every way once; a ratio is the median of the ratios of the rounds.
checkpointed is what `roll_td.algorithms.functional` could be instead: torch.utils.checkpoint around
each chunk.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from roll_td.algorithms import functional
from roll_td.algorithms.functional import Head

WAYS = ("naive", "checkpointed", "log_probs", "cross_entropy_sum")
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def one_chunk(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return one_chunk(hidden, weight, targets).sum()


def checkpointed(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    rows = functional.CHUNK_BYTES // (4 * len(weight))
    again = partial(checkpoint, one_chunk, use_reentrant=False, preserve_rng_state=False)
    pairs = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.cat([again(h, weight, t) for h, t in pairs]).sum()


def log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.log_probs(hidden, Head(weight), targets).sum()


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy_sum(hidden, Head(weight), targets)


def measure(way: str, dtype: str, tokens: int, vocab: int, hidden_size: int) -> dict[str, float]:
    """Seconds of the second of two runs, and MiB of the most memory of both."""
    loss: Loss = globals()[way]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    as_asked = getattr(torch, dtype)
    hidden = torch.randn(tokens, hidden_size, dtype=as_asked, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, dtype=as_asked)
    weight.mul_(0.1).requires_grad_()  # logits of a deviation of 2.4 at 576, as models have
    targets = torch.randint(vocab, (tokens,))
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        began = time.process_time()
        loss(hidden, weight, targets).backward()
        taken = time.process_time() - began
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
    return {"seconds": taken, "peak": peak}


def compare(arguments: argparse.Namespace, dtype: str) -> None:
    rounds: list[dict[str, dict[str, float]]] = []
    sizes = [str(getattr(arguments, name)) for name in ("tokens", "vocab", "hidden")]
    for _ in range(arguments.rounds):
        done = {
            way: subprocess.run(
                [sys.executable, __file__, "--one", way, dtype, *sizes],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            for way in WAYS
        }
        rounds.append({way: json.loads(out) for way, out in done.items()})
    print(f"{dtype}: {arguments.tokens} tokens, {arguments.vocab} x {arguments.hidden}")
    for way in WAYS:
        seconds, peak = (
            statistics.median(r[way][what] for r in rounds) for what in ("seconds", "peak")
        )
        faster, smaller = (
            statistics.median(r["naive"][what] / r[way][what] for r in rounds)
            for what in ("seconds", "peak")
        )
        print(
            f"  {way:18} {seconds:6.2f} s  {peak:6.0f} MiB   "
            f"naive takes {faster:4.2f} of its time, {smaller:5.2f} of its memory"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        way, dtype, *sizes = arguments.one
        print(json.dumps(measure(way, dtype, *map(int, sizes))))
        return
    for dtype in ("float32", "bfloat16"):
        compare(arguments, dtype)


if __name__ == "__main__":
    main()
