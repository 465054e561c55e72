"""Pipelines that check what becomes of FSDP2's states: checkpoints, offloading, export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from training_scenarios import TIED, TRAINING, UNTIED, Base, close, recorded_batch
from transformers import AutoModelForCausalLM


class States(Base):
    """Checkpoints, offloading, export, clipping, and compute in bfloat16."""

    def run(self):
        self.folder = Path(self.pipeline_config.output_dir).parent
        self.training = replace(TRAINING, packing=True, lr_schedule="cosine", warmup_steps=1)
        for name in ("two", "hybrid"):
            self.check_resume(name)
        self.check_other_worlds()
        self.check_offload()
        self.check_export()
        self.check_clip()
        self.check_bfloat16()
        print("STATES CHECKED", flush=True)

    def steps(self, cluster, first, last):
        metrics = [
            cluster.sft_step(recorded_batch(seed=seed)).meta_info["metrics"]
            for seed in range(first, last)
        ]
        return [{key: float(value) for key, value in m.items()} for m in metrics]

    def check_resume(self, name):
        """Four steps are two, a checkpoint, and two more in a new model, bit for bit."""
        cluster, folder = self.roles[name], str(self.folder / name)
        cluster.make(UNTIED, self.training)
        metrics = self.steps(cluster, 0, 4)
        wanted = cluster.state()
        cluster.make(UNTIED, self.training)
        self.steps(cluster, 0, 2)
        cluster.call("save_checkpoint", Path(folder))
        self.saved = cluster.weights()
        cluster.make(UNTIED, self.training)
        self.steps(cluster, 5, 6)  # what is loaded replaces this
        cluster.call("load_checkpoint", Path(folder))
        assert self.steps(cluster, 2, 4) == metrics[2:], name
        assert same_bits(cluster.state(), wanted), name
        peak = TRAINING.learning_rate
        rates = [m["learning_rate"] / peak for m in metrics]  # cosine over steps 1 to 4
        close(torch.tensor(rates), torch.tensor([1.0, 1.0, 0.75, 0.25]), "schedule")

    def check_other_worlds(self):
        """The hybrid role's checkpoint in others: the same weights, and the same next step."""
        after = {}
        for name, cluster in self.roles.items():
            cluster.make(UNTIED, self.training)
            cluster.call("load_checkpoint", self.folder / "hybrid")
            assert same_bits(cluster.weights(), self.saved), name
            self.steps(cluster, 2, 3)
            after[name] = cluster.weights()
        for name in self.roles:
            self.same(after[name], after["hybrid"], f"checkpoint in {name}:")

    def check_offload(self):
        """D15: all shards of 31 rows on 4 ranks away and back, the same bits; saving leaves them
        so."""
        cluster = self.roles["four"]
        cluster.make(UNTIED, self.training)
        self.steps(cluster, 0, 1)
        before, held = cluster.state(), cluster.bytes_held()
        assert all(min(kinds) > 0 for kinds in held)
        for include, away in ((["model"], [0]), (["optimizer"], [1]), (None, [0, 1])):
            arguments = [] if include is None else [include]
            cluster.call("offload_states", *arguments)
            cluster.call("offload_states", *arguments)  # twice is once
            gone = [[0 if k in away else b for k, b in enumerate(rank)] for rank in held]
            assert cluster.bytes_held() == gone, include
            cluster.call("save_checkpoint", self.folder / f"offloaded_{include}")
            assert cluster.bytes_held() == gone, include  # D14
            cluster.call("load_states")
            assert same_bits(cluster.state(), before), include
        assert cluster.bytes_held() == held
        metrics = self.steps(cluster, 1, 2)
        cluster.call("load_checkpoint", self.folder / "offloaded_None")
        assert self.steps(cluster, 1, 2) == metrics

    def check_export(self):
        cluster, folder = self.roles["three"], self.folder / "export"
        cluster.make(TIED, self.training)
        self.steps(cluster, 0, 1)
        cluster.call("export_hf", folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        weights = dict(model.named_parameters())
        assert same_bits({n: w.detach() for n, w in weights.items()}, cluster.weights())

    def check_clip(self):
        """N27, F27: parts of norm 3 and 4 are a gradient of norm 5, however many copies there
        are."""
        for name in ("two", "hybrid"):
            for norm, gradient in self.roles[name].clip([[3.0, 0.0], [0.0, -4.0]], 1.0):
                assert norm == 5.0
                assert max(map(abs, gradient)) in (
                    torch.tensor(0.6).item(),
                    torch.tensor(0.8).item(),
                )
            assert self.roles[name].clip([[3.0], [4.0]], 0.0)[0] == (5.0, [3.0])

    def check_bfloat16(self):
        cluster = self.roles["two"]
        losses = {}
        for compute in ("float32", "bfloat16"):
            cluster.make(UNTIED, replace(TRAINING, packing=True, compute_dtype=compute))
            losses[compute] = [m["loss"] for m in self.steps(cluster, 0, 4)]
        close(torch.tensor(losses["bfloat16"]), torch.tensor(losses["float32"]), "bfloat16", 1e-3)
        assert losses["bfloat16"] != losses["float32"]


def same_bits(a, b):
    """Equal through lists and dicts, NaN aside."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return a == b
