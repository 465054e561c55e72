"""Pipelines that check engines' answers from inside a job, after each of ten weight updates, or
leave them in a file."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import torch
from training_scenarios import FIELDS, TRAINING, Roles, Trainer, recorded_batch

from roll_td import BasePipeline, Dispatch, get, register, register_request
from roll_td.config.model import GenerationConfig, ModelConfig
from roll_td.config.model_update import ModelUpdateConfig
from roll_td.models import load_model, load_tokenizer
from roll_td.pipelines.rlvr import RLVRPipeline
from roll_td.weights.update import Pair
from roll_td.workers.actor import ActorWorker
from roll_td.workers.generation import GenerationWorker
from tests.vllm.conftest import strong

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MODEL = ModelConfig(config=FIELDS | SIZES | {"tie_word_embeddings": True})
FAST = replace(TRAINING, learning_rate=1e-2, max_grad_norm=0)
GREEDY = GenerationConfig(temperature=0, max_new_tokens=12)


class Role(Trainer):
    """Trains, or answers."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def generate(self, data, generation, seed):
        return self.strategy.generate(data, generation, seed)


class TenUpdates(BasePipeline):
    """From a trainer on two ranks to an engine on one of them, and to one on two others."""

    updates = 10

    def __init__(self, pipeline_config: Roles):
        super().__init__(pipeline_config)
        specs = [(n, n, Role, config) for n, config in pipeline_config.roles.items()]
        self.roles = self.create_clusters_parallel(specs)
        get([c.initialize(pipeline_config, blocking=False) for c in self.roles.values()])
        self.model = self.made_of()
        get([c.make(self.model, FAST, blocking=False) for c in self.roles.values()])

    def made_of(self):
        return MODEL

    def run(self):
        source = self.roles.pop("train")
        targets = list(self.roles.values())
        pairs = [Pair(source, t, ModelUpdateConfig(bucket_mb=0.01, verify=True)) for t in targets]
        self.look_at([pair.plan for pair in pairs], source.weights())
        batch = recorded_batch(6).select(["input_ids", "lengths"])
        seen = set()
        for version in range(1, self.updates + 1):
            source.sft_step(recorded_batch())
            for pair in pairs:
                pair.update(version)
            wanted = self.by_transformers(source.weights(), batch)
            for target in targets:
                made = target.generate(batch, GREEDY, 0)
                self.compare(made, wanted, f"{target.name}, version {version}")
                assert (made["weight_version"][made["response_mask"]] == version).all()
            seen.add(str([tokens for tokens, _ in wanted]))
        assert len(seen) == self.updates, "the answers change"
        print(f"{self.updates} UPDATES CHECKED", flush=True)

    def look_at(self, plans, weights):
        assert all(list(plan.weights) == list(weights) for plan in plans)

    def by_transformers(self, weights, batch):
        """Tokens and log-probs of each row."""
        model = load_model(replace(self.model, lora=None), 0)
        model.load_state_dict(weights, strict=False)  # without the head, which is tied
        ends = load_tokenizer(self.model).eos_token_id if self.model.tokenizer else None
        found = []
        for row, length in zip(batch["input_ids"], batch["lengths"].tolist(), strict=True):
            prompt = row[None, :length]
            ids = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),  # else token 0 counts as padding
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=ends,
            )
            with torch.no_grad():
                log_probs = model(ids).logits[0].float().log_softmax(-1)
            own = log_probs[length - 1 : -1].gather(-1, ids[0, length:, None])[:, 0]
            found.append((ids[0, length:].tolist(), own))
        return found

    def compare(self, made, wanted, what):
        columns = (made[n] for n in ("input_ids", "infer_log_probs", "response_mask"))
        for ids, log_probs, mask, (tokens, own) in zip(*columns, wanted, strict=True):
            assert ids[mask].tolist() == tokens, what
            worst = float((log_probs[mask] - own).abs().max())
            assert worst <= 1e-4, (what, worst)


class Adapters(TenUpdates):
    """From a trainer of LoRA layers, which alone go to the engine; wanted is what they say merged
    into the model."""

    updates = 4

    def made_of(self):
        return self.pipeline_config.model

    def look_at(self, plans, weights):
        whole = sum(weight.nbytes for weight in weights.values())
        for plan in plans:
            assert all(".lora_" in name for name in plan.weights)
            assert 0 < plan.nbytes < whole / 8


class StrongActor(ActorWorker):
    """Of a model that doesn't say the same to all."""

    model_provider = staticmethod(strong)


class Hanging(GenerationWorker):
    """The engine of worker 1 stops when it has its second weights."""

    @register_request
    def submit(self, answers):
        if self.rank == 1 and self.strategy.weight_version == 2:
            os.kill(self.strategy._engine.process.pid, signal.SIGSTOP)
        super().submit(answers)


class Recorded(RLVRPipeline):
    """Leaves in answers.jsonl what each step has learnt from."""

    def rollout(self):
        batch = super().rollout()
        columns = ("input_ids", "infer_log_probs", "weight_version", "response_mask")
        with (self.run_dir / "answers.jsonl").open("a") as file:
            for group, *row, mask in zip(*(batch[n] for n in ("group_id", *columns)), strict=True):
                tokens, log_probs, versions = (values[mask].tolist() for values in row)
                line = {"step": self.global_step, "group": int(group), "tokens": tokens}
                line |= {"log_probs": log_probs, "versions": versions}
                file.write(json.dumps(line) + "\n")
        return batch
