"""vLLM's own engine for engines.py: answers all prompts of a round for each line that it reads."""

from __future__ import annotations

import json
import sys
import time

import vllm

if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        given = json.load(file)
    llm = vllm.LLM(**given["engine"])
    for round_number, _ in enumerate(sys.stdin):
        prompts = [{"prompt_token_ids": tokens} for tokens in given["prompts"][round_number]]
        sampling = [
            vllm.SamplingParams(**given["sampling"], seed=number) for number in range(len(prompts))
        ]
        began = time.monotonic()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.monotonic() - began
        assert sum(len(o.outputs[0].token_ids) for o in outputs) == given["tokens"]
        print("SECONDS", seconds, flush=True)
