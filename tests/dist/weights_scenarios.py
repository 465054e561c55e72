"""Pipelines that check weight updates from inside a job, between every kind of roles."""

from __future__ import annotations

from dataclasses import replace

import torch
from training_scenarios import FIELDS, TIED, TRAINING, UNTIED, Roles, Trainer, recorded_batch

from roll_td import BasePipeline, Dispatch, register
from roll_td.config.model import LoraConfig
from roll_td.config.model_update import ModelUpdateConfig
from roll_td.weights.update import Pair

BUCKETS = ModelUpdateConfig(bucket_mb=0.002, verify=True)
"""Less than the embedding (7 kB), and than half of the other matrices."""
PACKED = replace(TRAINING, packing=True)


class Role(Trainer):
    """Either side of an update."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def every_weight(self):
        return {name: weight.clone() for name, weight in self.strategy.full_parameters()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def version(self):
        return self.strategy.weight_version


class Exchange(BasePipeline):
    """Trainers on 1, 2 and 3 ranks, targets that are apart from them, on the same or on some."""

    def __init__(self, pipeline_config: Roles):
        super().__init__(pipeline_config)
        specs = [(n, n, Role, config) for n, config in pipeline_config.roles.items()]
        self.roles = self.create_clusters_parallel(specs)
        for cluster in self.roles.values():
            cluster.initialize(pipeline_config)
        self.batch = recorded_batch(4)

    def run(self):
        trainers = [role for name, role in self.roles.items() if name.startswith("train")]
        targets = [role for role in self.roles.values() if role not in trainers]
        lora = LoraConfig(rank=3, alpha=6)
        for number, source in enumerate(trainers):
            model = (UNTIED, TIED, UNTIED)[number]
            source.make(model, PACKED)
            for target in targets:
                target.make(model, PACKED)
                self.check(source, target, exact=True)
            source.make(replace(model, lora=lora), PACKED)
            low = targets[number]
            low.make(replace(model, dtype="bfloat16"), PACKED)
            self.check(source, low, exact=False)
        self.restore(self.roles["train_2"], self.roles["hf_3"], self.roles["hf_1"])
        self.restore(self.roles["train_1"], self.roles["fsdp_3"], self.roles["hybrid"])
        self.refuse(trainers[0], targets[0])
        print("EXCHANGE CHECKED", flush=True)

    def check(self, source, target, exact):
        """Two updates in a row, the source trained in between."""
        what = f"{source.name} → {target.name}"
        pair = Pair(source, target, BUCKETS)
        for version in (1, 2):
            for _ in range(2):  # LoRA's B is 0 at first, A's gradient with it
                source.sft_step(recorded_batch())
            before = target.every_weight()
            metrics = pair.update(version)
            assert metrics[f"weights/{target.name}/version"] == version, metrics
            assert target.version() == [version] * target.world_size, what
            wanted = source.every_weight()[0]
            assert not all(torch.equal(before[0][n].float(), w) for n, w in wanted.items()), what
            for worker, got in enumerate(target.every_weight()):
                assert got.keys() == wanted.keys(), (what, got.keys() ^ wanted.keys())
                for name, weight in got.items():
                    same = torch.equal(weight, wanted[name].to(weight.dtype))
                    assert same, f"{what}: {name} on worker {worker}"
                # between two updates too: nothing that is made of the old weights stays
            if exact:
                trainer, infer = (r.log_probs(self.batch)["log_probs"] for r in (source, target))
                worst = float((trainer - infer).abs().max())
                assert worst <= 1e-5, f"{what}: log-probs are off by {worst}"

    def restore(self, source, target, other):
        """What a target held between updates comes back, on other ranks too."""
        folder = self.run_dir / target.name
        folder.mkdir()
        for role in (source, target, other):
            role.make(UNTIED, PACKED)
        pair = Pair(source, target, BUCKETS)
        source.sft_step(recorded_batch())
        pair.update(4)
        held = target.every_weight()
        target.call("save_checkpoint", folder)
        source.sft_step(recorded_batch())
        pair.update(6)
        for role in (target, other):
            role.call("load_checkpoint", folder)
            assert role.version() == [4] * role.world_size
            for worker, got in enumerate(role.every_weight()):
                wrong = [name for name in got if not torch.equal(got[name], held[0][name])]
                assert not wrong, f"{wrong} on worker {worker} of {role.name}"

    def refuse(self, source, target):
        source.make(UNTIED, PACKED)
        for model, words in (
            (TIED, "1 are left over ['lm_head.weight']"),
            (replace(UNTIED, config=FIELDS | {"vocab_size": 62}), "2 differ in shape"),
        ):
            target.make(model, PACKED)
            try:
                Pair(source, target, BUCKETS)
            except ValueError as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"no error: {words}")
