"""Pipelines that check FSDP2 training from inside a job, against plain PyTorch on the driver."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from roll_td import (
    BaseConfig,
    BasePipeline,
    DataProto,
    Dispatch,
    Worker,
    WorkerConfig,
    register,
)
from roll_td.config.model import LoraConfig, ModelConfig, TrainingConfig
from roll_td.metrics import Sum
from roll_td.models import load_model
from roll_td.plan import token_plan
from roll_td.strategies import optimizer
from roll_td.strategies.factory import create_strategy

# 61 rows, 50 and 6 on 2 to 4 ranks: shards are uneven, some empty
FIELDS = {
    "model_type": "qwen3",
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "intermediate_size": 50,
    "vocab_size": 61,
    "tie_word_embeddings": False,
}
UNTIED = ModelConfig(config=FIELDS)
TIED = ModelConfig(config=FIELDS | {"tie_word_embeddings": True})
TRAINING = TrainingConfig(
    learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, packing=False, micro_batch_size=3
)
TEMPERATURE = 0.7


class Trainer(Worker):
    """Does what it is told with a strategy, and tells what is in it."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def make(self, model, training):
        """A new model from the job's seed."""
        self.worker_config = replace(self.worker_config, model=model, training=training)
        self.strategy = create_strategy(self)
        self.strategy.initialize(load_model)
        self.gradients = {}
        if hasattr(self.strategy, "optimizer"):
            self.strategy.optimizer.register_step_pre_hook(self._keep_gradients)

    def _keep_gradients(self, *_):
        weights = self.strategy.model.named_parameters()
        gradients = {name: p.grad for name, p in weights if p.requires_grad}
        self.gradients = {
            name: grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
            for name, grad in gradients.items()
        }

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def sft_step(self, data):
        metrics = self.strategy.train_step(data, self.sft_loss)
        self.norm = float(metrics["grad_norm"])
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def rl_step(self, data):
        return DataProto(meta_info={"metrics": self.strategy.train_step(data, self.rl_loss)})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def log_probs(self, data):
        return self.strategy.forward_step(data, self.columns)

    def sft_loss(self, data, output):
        loss = self.strategy.op_compute_language_loss(output, data["labels"])
        return loss / data.plan.denominators["tokens"], {"micro_batches": Sum(1)}

    def rl_loss(self, data, output):
        log_probs = self.strategy.op_compute_log_probs(output, data["input_ids"], TEMPERATURE)
        entropy = self.strategy.op_compute_entropy(output, TEMPERATURE)
        return rl_loss(data, log_probs, entropy) / data.plan.denominators["tokens"], {}

    def columns(self, data, output):
        return {
            "log_probs": self.strategy.op_compute_log_probs(output, data["input_ids"]),
            "entropy": self.strategy.op_compute_entropy(output, TEMPERATURE),
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def grad_norms(self):
        return self.norm

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def seen_gradients(self):
        return self.gradients

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def weights(self):
        return {name: weight.clone() for name, weight in self.strategy.full_parameters()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def call(self, method, *args):
        getattr(self.strategy, method)(*args)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def state(self):
        """Bytes of everything that makes up the state, by kind."""
        strategy = self.strategy
        parts = [s.clone() for s in strategy._parts]
        moments = [dict(strategy.optimizer.state[part]) for part in strategy._parts]
        flat = [m[key].clone() for m in moments for key in ("step", *optimizer.MOMENTS)]
        return parts, flat, int(strategy.step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def bytes_held(self):
        strategy = self.strategy
        moments = [strategy.optimizer.state[part]["exp_avg"] for part in strategy._parts]
        return [
            sum(t.untyped_storage().nbytes() for t in tensors)
            for tensors in (strategy._parts, moments)
        ]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def clip(self, by_shard, max_norm):
        """Norm and clipped gradient of this rank's part of a gradient."""
        mesh = self.mesh
        weight = torch.zeros(len(by_shard[0]))
        weight.grad = torch.tensor(by_shard[mesh.get_local_rank(mesh.ndim - 1)])
        norm = optimizer.clip_gradients([weight], max_norm, mesh.get_group(mesh.ndim - 1))
        return norm, weight.grad.tolist()


def rl_loss(data, log_probs, entropy):
    """A sum over response tokens, as GRPO's: clipped ratio times advantage, and entropy."""
    mask = data["response_mask"]
    ratio = (log_probs - data["old_log_probs"]).exp()
    advantages = data["advantages"]
    clipped = ratio.clamp(0.8, 1.2)
    gain = torch.minimum(ratio * advantages, clipped * advantages) + 0.01 * entropy
    return -torch.where(mask, gain, 0.0).sum()


def recorded_batch(rows=7, seed=3):
    """Rows of 1 to 15 tokens; the labels and responses leave out the first ones."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([15, 3, 9, 1, 12, 6, 5, 15])[:rows]
    ids = torch.randint(0, 61, (rows, 15), generator=random)
    at = torch.arange(15)
    real = at < lengths[:, None]
    response = real & (at >= 2)
    noise = torch.randn((3, rows, 15), generator=random)
    return DataProto(
        {
            "input_ids": torch.where(real, ids, 0),
            "lengths": lengths,
            "labels": torch.where(response, ids, -100),
            "response_mask": response,
            "old_log_probs": -4.0 + 0.3 * noise[0],
            "advantages": noise[1],
        }
    )


class Plain:
    """The same training written down with nothing but PyTorch: one process, padded, one batch."""

    def __init__(self, model_config, training, seed):
        self.model = load_model(model_config, seed)
        self.max_norm = training.max_grad_norm
        weights = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in weights if p.ndim > 1], "weight_decay": training.weight_decay},
            {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=training.learning_rate, betas=tuple(training.adam_betas), eps=1e-8
        )

    def log_probs(self, batch, temperature=1.0):
        ids = batch["input_ids"]
        mask = torch.arange(ids.shape[1]) < batch["lengths"][:, None]
        logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1] / temperature
        every = torch.nn.functional.pad(logits.log_softmax(-1), (0, 0, 1, 0))
        log_probs = every.gather(-1, ids[..., None]).squeeze(-1)
        return log_probs * mask, -(every.exp() * every).sum(-1) * mask

    def step(self, batch, kind):
        tokens = (batch["labels"] != -100).sum()
        if kind == "sft":
            ids = batch["input_ids"]
            mask = torch.arange(ids.shape[1]) < batch["lengths"][:, None]
            logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1]
            labels = batch["labels"][:, 1:]
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
        else:
            loss = rl_loss(batch, *self.log_probs(batch, TEMPERATURE)) / tokens
        loss.backward()
        weights = [p for p in self.model.parameters() if p.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(weights, self.max_norm)
        gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item(), gradients


@dataclass
class Roles(BaseConfig):
    roles: dict[str, WorkerConfig] = field(default_factory=dict)
    model: ModelConfig | None = None
    max_steps: int = 4


def close(got, wanted, what, tolerance=1e-5):
    error = float((got - wanted).abs().max()) if got.numel() else 0.0
    assert got.shape == wanted.shape and error <= tolerance, f"{what}: off by {error}"
    return error


class Base(BasePipeline):
    def __init__(self, pipeline_config: Roles):
        super().__init__(pipeline_config)
        made = self.create_clusters_parallel(
            [(n, n, Trainer, config) for n, config in pipeline_config.roles.items()]
        )
        self.roles = made
        for cluster in made.values():
            cluster.initialize(pipeline_config)
        self.worst = 0.0

    def same(self, got: dict, wanted: dict, what: str):
        assert got.keys() == wanted.keys(), (what, got.keys() ^ wanted.keys())
        for name in wanted:
            self.worst = max(self.worst, close(got[name], wanted[name], f"{what} {name}"))


class Parity(Base):
    """Worlds of 1, 2, 3, 4 ranks and hybrid 2 x 2 give plain PyTorch's numbers."""

    def run(self):
        packed = replace(TRAINING, packing=True)
        variants = {
            "padded": (UNTIED, TRAINING, "rows"),
            "packed, tied": (TIED, replace(packed, micro_batch_size=2), "rows"),
            "by tokens": (UNTIED, packed, "tokens"),
            "checkpointed": (UNTIED, replace(packed, gradient_checkpointing=True), "tokens"),
            "eager": (replace(UNTIED, attn_implementation="eager"), packed, "rows"),
        }
        for kind in ("sft", "rl"):
            for variant, (model, training, cut) in variants.items():
                if kind == "sft" or variant in ("padded", "by tokens"):
                    self.check(kind, variant, model, training, cut)
        self.check_lora()
        print(f"PARITY CHECKED, worst error {self.worst:.1e}", flush=True)

    def check(self, kind, variant, model, training, cut):
        plain = Plain(model, training, self.pipeline_config.seed)
        with torch.no_grad():
            log_probs = plain.log_probs(recorded_batch())[0]
        first = plain.step(recorded_batch(), kind)
        # 3 rows: some ranks have fillers only
        second = plain.step(recorded_batch(3), kind)
        wanted = {n: w.detach() for n, w in plain.model.named_parameters()}
        for name, cluster in self.roles.items():
            what = f"{kind}, {variant}, {name}:"
            cluster.make(model, training)
            got = cluster.log_probs(self.planned(cluster, recorded_batch(), cut))
            close(got["log_probs"], log_probs, f"{what} log-probs")
            for rows, (loss, norm, gradients) in ((7, first), (3, second)):
                batch = self.planned(cluster, recorded_batch(rows), cut)
                step = cluster.sft_step if kind == "sft" else cluster.rl_step
                metrics = step(batch).meta_info["metrics"]
                close(torch.tensor(float(metrics["loss"])), torch.tensor(loss), f"{what} loss")
                close(torch.tensor(float(metrics["grad_norm"])), torch.tensor(norm), f"{what} norm")
                assert metrics["tokens"] == float(batch["lengths"].sum()), what
                self.same(cluster.seen_gradients(), gradients, f"{what} gradient of")
            if kind == "sft":
                assert len(set(cluster.grad_norms())) == 1, f"{what} norms differ between ranks"
            self.same(cluster.weights(), wanted, f"{what} weight")

    def planned(self, cluster, batch, cut):
        if cut == "tokens":
            denominators = {"tokens": float(batch["response_mask"].sum())}
            lengths = batch["lengths"].tolist()
            batch.plan = token_plan(lengths, cluster.dp_size, 20, denominators)
        return batch

    def check_lora(self):
        model = replace(UNTIED, lora=LoraConfig(rank=3, alpha=6))
        plain = Plain(model, TRAINING, self.pipeline_config.seed)
        base = {
            n: w.clone()
            for n, w in load_model(UNTIED, self.pipeline_config.seed).named_parameters()
        }
        for _ in range(3):
            plain.step(recorded_batch(), "sft")
        with torch.no_grad():
            log_probs = plain.log_probs(recorded_batch())[0]
        for name, cluster in self.roles.items():
            cluster.make(model, replace(TRAINING, packing=True, gradient_checkpointing=True))
            for _ in range(3):
                cluster.sft_step(recorded_batch())
            got = cluster.log_probs(recorded_batch())["log_probs"]
            close(got, log_probs, f"LoRA, {name}: log-probs")
            weights = cluster.weights()  # merged
            merged = load_model(UNTIED, self.pipeline_config.seed)
            assert weights.keys() == base.keys()
            merged.load_state_dict(weights)
            plain.model = merged
            with torch.no_grad():
                close(plain.log_probs(recorded_batch())[0], log_probs, f"LoRA, {name}: merged")
            assert not torch.equal(
                weights["model.layers.0.mlp.up_proj.weight"],
                base["model.layers.0.mlp.up_proj.weight"],
            )
