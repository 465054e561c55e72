"""Fully sharded data parallel, second version, by torch: `fsdp2_infer` and `fsdp2_train`.

The workers of a role hold one copy of the model between them (or several, with fsdp_size), and
meet in a gather of each block's weights, in the same order on all: so each runs equally many
micro-batches, as the plan has them. Losses are sums over the global mini-batch, divided by the
plan's denominators, and gradients are added over ranks where FSDP would average them.

Where the head's weight is read: a block's weights are whole only while its forward runs, but those
of the root, which are all that no block has, stay whole from its forward to the end of its backward
pass. `_Root` is called for hidden states alone; what is made of them is made after it, with the
head as it is then. Its gradient arrives where FSDP collects those of the root, at the end of the
backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from roll_td import models
from roll_td.metrics import Last, Sum, merge_metrics
from roll_td.plan import LocalPlan, default_plan, local
from roll_td.platform import give_freed_memory_back
from roll_td.protocol import DataProto
from roll_td.strategies import optimizer, packing, states
from roll_td.strategies.base import (
    ForwardFunc,
    InferenceStrategy,
    LossFunc,
    ModelProvider,
    StrategyContext,
    TrainStrategy,
)
from roll_td.strategies.exchange import VERSION, HoldsWeights
from roll_td.strategies.operations import Operations

STATES = ("model", "optimizer", "gradients")


class Fsdp2Infer(HoldsWeights, Operations, InferenceStrategy):
    """A sharded model that gives log-probs and entropies."""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        if context.mesh is None:
            raise ValueError(
                f"role {context.role}: FSDP needs a device mesh, which a worker made by hand has "
                "not; let a Cluster make it"
            )
        self._training = context.config.training
        self._mesh = context.mesh
        self._offloaded: dict[str, states.Offloaded] = {}

    def initialize(self, model_provider: ModelProvider) -> None:
        """Make the model and shard it over the role's mesh.

        Raises ValueError if the model lies on the meta device, or does not keep packed rows apart.
        """
        self.model = cast(Any, model_provider(self.context.model, self.context.seed))
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise ValueError("the model provider left weights on the meta device; load them")
        self._prepare()
        self._wants_rows = self._training.packing and packing.keep_rows_apart(self.model)
        _, self._head = models.body_and_head(self.model)
        self._root = _Root(self.model)
        self._shard()

    def _prepare(self) -> None:
        self.model.requires_grad_(False)

    def _shard(self) -> None:
        compute = self._training.compute_dtype
        self._units: list[FSDPModule] = []
        if self._mesh.shape[-1] == 1:  # a shard is the weight itself, where it lies
            states.place(self.model, self.context.device)
        if self._mesh.size() == 1 and compute is None:
            return  # nothing to gather, and hooks that do nothing take 6 ms of a micro-batch
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, compute) if compute else None, reduce_dtype=torch.float32
        )
        after = self.settings.reshard_after_forward
        for block in _blocks(self.model):
            fully_shard(block, mesh=self._mesh, mp_policy=policy, reshard_after_forward=after)
        fully_shard(self._root, mesh=self._mesh, mp_policy=policy, reshard_after_forward=False)
        self._units = [unit for unit in self._root.modules() if isinstance(unit, FSDPModule)]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            # else a factor is left to the collective, in a way that gloo does not have
            unit.set_force_sum_reduction_for_comms(True)

    def forward_step(self, batch: DataProto, forward_func: ForwardFunc) -> DataProto:
        """The columns that forward_func returns for each micro-batch, for this rank's own rows in
        their order; no gradients. Raises ValueError if the model is offloaded, or several ranks
        have no plan."""
        plan = self._plan(batch)
        self._require("model")
        self.model.eval()
        parts = []
        with torch.no_grad():
            for i, micro in enumerate(self._micro_batches(batch, plan)):
                columns = forward_func(micro, self._forward(micro))
                if not plan.is_filler(i):
                    parts.append(DataProto.from_single_dict(dict(columns)))
        self._reshard()
        return DataProto.concat(parts) if parts else DataProto()

    def save_checkpoint(self, folder: Path) -> None:
        """Write this role's state into a folder, each rank its shards. What was offloaded is so
        after."""
        with self._resident():
            states.save(folder, self._checkpoint(), self._group)

    def stage_checkpoint(self) -> dict[str, memoryview]:
        """The files that save_checkpoint would write on this rank, in host memory, for
        states.write. What was offloaded is so after."""
        with self._resident():
            return states.stage(self._checkpoint(), self._group)

    def load_checkpoint(self, folder: Path) -> None:
        """Read what save_checkpoint wrote, on any number of ranks. Raises ValueError if it is of
        another model."""
        with self._resident():
            tensors = self._checkpoint()
            states.load(folder, tensors, self._group)
            self.weight_version = int(tensors[VERSION])

    def offload_states(self, include: Iterable[str] = STATES) -> None:
        """Move states to host memory; they take none of the device's until load_states. Gradients
        are not kept between steps, so there are none to move. ValueError for an unknown state."""
        for name in _check_states(include):
            if name not in self._offloaded:
                self._offloaded[name] = states.Offloaded(self._tensors(name))

    def load_states(self, include: Iterable[str] = STATES) -> None:
        """Move states back, bit-equal. ValueError for an unknown state."""
        for name in _check_states(include):
            if name in self._offloaded:
                self._offloaded.pop(name).load()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight once, whole, with the name that Hugging Face has for it, in one order; LoRA
        is merged in. All ranks of the role go through it together: each step gathers one."""
        self._require("model")
        return models.full_weights(self.model, states.whole)

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Those of the LoRA layers alone, as full_parameters has all. ValueError without LoRA."""
        self._require("model")
        return models.adapter_weights(self.model, states.whole)

    def export_hf(self, folder: Path) -> None:
        """Write a folder that transformers loads, on worker 0; all workers call it together."""
        is_writer = self.context.rank_info.rank == 0
        weights = {name: w.cpu() for name, w in self.full_parameters() if is_writer}
        if is_writer:
            config = self.context.model
            has_tokenizer = config.tokenizer or config.path
            tokenizer = models.load_tokenizer(config) if has_tokenizer else None
            models.export_hf(folder, self.model, weights, tokenizer)

    def _require_model(self) -> None:
        self._require("model")

    @property
    def _group(self) -> Any:
        return self.context.groups["world"]

    def _plan(self, batch: DataProto) -> LocalPlan:
        if isinstance(batch.plan, LocalPlan):
            return batch.plan
        if self.context.rank_info.world_size > 1:
            raise ValueError(
                f"role {self.context.role}: the batch has no plan, and ranks that step together "
                "need one; call through the Cluster, which makes it"
            )
        return local(default_plan(len(batch), 1, self._training.micro_batch_size, {}), 0)

    def _micro_batches(self, batch: DataProto, plan: LocalPlan) -> Iterator[DataProto]:
        batch = batch.to(self.context.device)
        for rows in plan.micro_batches:
            micro = batch[list(rows)]
            micro.plan = plan  # type: ignore[assignment]
            yield micro

    def _forward(self, micro: DataProto) -> packing.Output:
        layout, inputs = packing.arrange(
            micro, packs=self._training.packing, wants_rows=self._wants_rows
        )
        hidden = packing.line_states(self._root(**inputs), layout)
        return packing.Output(hidden, self._head(), layout)

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def _require(self, *names: str) -> None:
        away = [name for name in names if name in self._offloaded]
        if away:
            raise ValueError(
                f"role {self.context.role}: {' and '.join(away)} of the strategy is offloaded; "
                "call load_states() first"
            )

    @contextmanager
    def _resident(self) -> Iterator[None]:
        away = list(self._offloaded)
        self.load_states(away)
        try:
            yield
        finally:
            self.offload_states(away)

    def _tensors(self, state: str) -> list[Tensor]:
        return list(self.model.parameters()) if state == "model" else []

    def _checkpoint(self) -> dict[str, Tensor]:
        tensors = {f"model.{name}": tensor.detach() for name, tensor in states.named(self.model)}
        return tensors | {VERSION: torch.tensor(self.weight_version)}


class Fsdp2Train(Fsdp2Infer, TrainStrategy):
    """A sharded model that is trained by AdamW.

    The optimiser works on each rank's own parts as plain tensors: a step over 272 DTensors, 24
    million numbers, took 15 times as long on a CPU.
    """

    def initialize(self, model_provider: ModelProvider) -> None:
        """Make the model, shard it, and make the optimiser's state.

        Raises ValueError as Fsdp2Infer does, for weights to train that are not held in float32,
        and for a schedule that lacks max_steps.
        """
        optimizer.learning_rate(self._training, 0, self.context.max_steps)
        super().initialize(model_provider)
        self._trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self._parts = [states.local(parameter) for parameter in self._trained.values()]
        self.optimizer = optimizer.adamw(self._parts, self._training)
        self.step = torch.tensor(0)

    def _prepare(self) -> None:
        low = {str(p.dtype) for p in self.model.parameters() if p.requires_grad} - {"torch.float32"}
        if low:
            raise ValueError(
                f"role {self.context.role}: weights to train are {', '.join(low)}, too coarse to "
                "sum small updates; set model.dtype: float32 and training.compute_dtype: bfloat16"
            )
        if self._training.gradient_checkpointing:
            give_freed_memory_back()
            self.model.activation_checkpointing_enable()

    def train_step(self, batch: DataProto, loss_func: LossFunc) -> dict[str, Any]:
        """One optimiser step on this rank's rows of a global mini-batch, cut by batch.plan.

        Returns this rank's share of the metrics: "loss" and "tokens" (Sum over ranks), "grad_norm"
        before clipping and "learning_rate" (Last, the same on all ranks), and those of loss_func,
        merged over micro-batches by their types. Raises ValueError if the batch has no rows, the
        model or optimiser is offloaded, or the gradients are not finite.
        """
        plan = self._plan(batch)
        self._require("model", "optimizer")
        if not plan.micro_batches:
            raise ValueError(f"role {self.context.role}: train_step got no rows; give it some")
        self.model.train()
        loss, tokens = torch.zeros((), device=self.context.device), 0
        metrics = []
        for i, micro in enumerate(self._micro_batches(batch, plan)):
            value, own = loss_func(micro, self._forward(micro))
            if plan.is_filler(i):
                value = value * 0
            else:
                loss += value.detach()
                tokens += int(micro["lengths"].sum())
                metrics.append(own)
            value.backward()
        rate = optimizer.learning_rate(self._training, int(self.step), self.context.max_steps)
        ours = {"loss": Sum(loss), "grad_norm": Last(self._update(rate))}
        ours |= {"learning_rate": Last(rate), "tokens": Sum(tokens)}
        theirs = merge_metrics(metrics)
        if taken := sorted(ours.keys() & theirs.keys()):
            raise ValueError(f"loss_func's metrics {taken} are train_step's own; rename them")
        return ours | theirs

    def _update(self, rate: float) -> float:
        """Take the optimiser step; the norm of the gradients."""
        for part, parameter in zip(self._parts, self._trained.values(), strict=True):
            assert part.data_ptr() == states.local(parameter).data_ptr(), "FSDP moved a weight"
            part.grad = None if parameter.grad is None else states.local(parameter.grad)
        group = self._mesh.get_group(self._mesh.ndim - 1)
        norm = optimizer.clip_gradients(self._parts, self._training.max_grad_norm, group)
        if not math.isfinite(norm):
            raise ValueError(
                f"role {self.context.role}: the gradients of step {int(self.step)} have norm "
                f"{norm}; the weights are as before the step. Look for rows with NaN, lower "
                "learning_rate, or resume from a checkpoint"
            )
        for settings in self.optimizer.param_groups:
            settings["lr"] = rate
        self.optimizer.step()
        self.step += 1
        self.optimizer.zero_grad()
        self._root.zero_grad()
        return norm

    def load_checkpoint(self, folder: Path) -> None:
        """Weights, moments and step, as Fsdp2Infer does."""
        super().load_checkpoint(folder)
        for moments in self.optimizer.state.values():
            moments["step"].fill_(self.step)

    def _tensors(self, state: str) -> list[Tensor]:
        if state != "optimizer":
            return super()._tensors(state)
        return [
            self.optimizer.state[part][key] for part in self._parts for key in optimizer.MOMENTS
        ]

    def _checkpoint(self) -> dict[str, Tensor]:
        """Frozen weights are those that the model came with."""
        tensors = {
            f"model.{name}": tensor.detach()
            for name, tensor in states.named(self.model)
            if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        }
        for part, (name, parameter) in zip(self._parts, self._trained.items(), strict=True):
            for key in optimizer.MOMENTS:
                moment = self.optimizer.state[part][key]
                tensors[f"optimizer.{key}.{name}"] = states.shard_like(moment, parameter)
        return tensors | {"step": self.step, VERSION: torch.tensor(self.weight_version)}


class _Root(nn.Module):
    """The model, called for hidden states, (b, T, H)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        body, _ = models.body_and_head(self.model)
        hidden: Tensor = body(**inputs, use_cache=False).last_hidden_state
        return hidden


def _blocks(model: nn.Module) -> Iterable[nn.Module]:
    """The layers of a transformer: of its lists of modules that with the most weights."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda some: sum(p.numel() for p in some.parameters()), default=())


def _check_states(include: Iterable[str]) -> list[str]:
    names = [include] if isinstance(include, str) else list(include)
    if unknown := [name for name in names if name not in STATES]:
        raise ValueError(f"no state {', '.join(map(repr, unknown))}; there are {', '.join(STATES)}")
    return names
