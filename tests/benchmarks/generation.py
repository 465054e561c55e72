"""hf_infer against transformers' own generate: same model, prompts and batch size, interleaved.

    python tests/benchmarks/generation.py [--model FOLDER] [--prompts N] [--batch B] [--tokens T]

The model is that of the quick start (434,048 random weights) unless a folder is given. A ratio
above 1 says that hf_infer is faster; it is the median of the ratios of the rounds. CPU seconds are
the measure on a machine that others use too.

equal: all responses have T tokens. varied: they end with one in 20 ids, or after 6 T tokens; what
is left of a batch of transformers waits for its longest. groups: 8 responses of T tokens to each
of N / 8 prompts of 96 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from roll_td import DataProto, WorkerConfig
from roll_td.config.model import GenerationConfig, ModelConfig
from roll_td.config.strategies import StrategyArgs
from roll_td.distributed.topology import data_parallel, rank_infos
from roll_td.models import load_model
from roll_td.strategies.base import StrategyContext
from roll_td.strategies.hf import HfInfer

QUICK_START = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 384,
    "vocab_size": 57,
    "tie_word_embeddings": True,
    "rope_theta": 1e4,
}


def strategy(folder: str | None, batch_size: int) -> HfInfer:
    model = ModelConfig(path=folder) if folder else ModelConfig(config=QUICK_START)
    args = StrategyArgs("hf_infer", {"batch_size": batch_size})
    config = WorkerConfig(name="infer", world_size=1, strategy_args=args)
    place = rank_infos(data_parallel(1))[0]
    context = StrategyContext("infer", config, model, place, {}, None, torch.device("cpu"), 0)
    made = HfInfer(context)
    made.initialize(load_model)
    made.model.generation_config.eos_token_id = made.model.config.eos_token_id = None
    return made


def of_transformers(
    model: Any, prompts: Sequence[torch.Tensor], batch: int, n: int, tokens: int, ends: list[int]
) -> int:
    """Tokens of the responses, up to their ends."""
    model.set_attn_implementation("sdpa")
    count = 0
    for at in range(0, len(prompts), batch // n):
        rows = prompts[at : at + batch // n]
        width = max(map(len, rows))
        ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
        for row, prompt in enumerate(rows):
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=tokens,
            num_return_sequences=n,
            eos_token_id=ends or None,
            pad_token_id=0,
        )[:, width:]
        ended = torch.isin(out, torch.tensor(ends)).int()
        count += int((ended.cumsum(1) - ended == 0).sum())
    return count


def of_ours(
    infer: HfInfer, prompts: Sequence[torch.Tensor], n: int, tokens: int, ends: list[int]
) -> int:
    """Tokens of the responses."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True)
    config = GenerationConfig(
        max_new_tokens=tokens, num_return_sequences=n, stop_token_ids=list(ends)
    )
    out = infer.generate(DataProto({"input_ids": ids, "lengths": lengths}), config, 0)
    return int(out["response_mask"].sum())


def clock(body: Callable[..., int], *args: Any) -> tuple[float, float, int]:
    """CPU seconds, wall seconds, tokens."""
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = body(*args)
    return time.process_time() - cpu, time.perf_counter() - wall, tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=34)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    infer = strategy(args.model, args.batch)
    vocabulary = infer.model.config.vocab_size
    draws = torch.Generator().manual_seed(1)

    def prompts(count: int, least: int, most: int) -> list[torch.Tensor]:
        lengths = torch.randint(least, most + 1, (count,), generator=draws).tolist()
        return [torch.randint(vocabulary, (n,), generator=draws) for n in lengths]

    ends = list(range(0, vocabulary, 20))
    cases: dict[str, tuple[list[torch.Tensor], int, int, list[int]]] = {
        "equal": (prompts(args.prompts, 11, 11), 1, args.tokens, []),
        "varied": (prompts(args.prompts, 7, 15), 1, 6 * args.tokens, ends),
        "groups": (prompts(args.prompts // 8, 96, 96), 8, args.tokens, []),
    }
    for name, (rows, n, tokens, stops) in cases.items():
        rounds = []
        for _ in range(args.rounds):
            theirs = clock(of_transformers, infer.model, rows, args.batch, n, tokens, stops)
            ours = clock(of_ours, infer, rows, n, tokens, stops)
            rates = [theirs[i] / theirs[2] / (ours[i] / ours[2]) for i in (0, 1)]
            rounds.append((*rates, ours[2] / ours[0], theirs[2] / theirs[0]))
        cpu, wall, mine, other = map(statistics.median, zip(*rounds, strict=True))
        print(f"{name:6}: {cpu:.2f} times transformers by CPU time, {wall:.2f} by wall; tokens per "
              f"CPU second {mine:.0f} against {other:.0f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
