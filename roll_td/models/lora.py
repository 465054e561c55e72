"""LoRA layers in a model, and weights with them merged in: the one importer of peft."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from roll_td.config.model import LoraConfig

ADAPTER = "default"


def add_lora(model: Any, lora: LoraConfig, transposed: bool) -> None:
    """Put adapters into a model of transformers; they alone are trainable then, in float32.

    transposed: its layers hold their weights as (inputs, outputs). ValueError if peft is missing,
    or target_modules name no layer, or one that is not linear, or the head.
    """
    _need_peft()
    import peft
    from peft.tuners.tuners_utils import cast_adapter_dtype

    alpha: Any = lora.alpha  # declared int, and only ever divided
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        fan_in_fan_out=transposed,
    )
    given = f"model.lora.target_modules={lora.target_modules}"
    try:
        peft.inject_adapter_in_model(settings, model, ADAPTER)
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from error
    cast_adapter_dtype(model, ADAPTER)
    ends = tuple(f".lora_{part}.{ADAPTER}.weight" for part in "AB")
    others = [n for n, p in model.named_parameters() if p.requires_grad and not n.endswith(ends)]
    if others or not isinstance(model.get_output_embeddings(), nn.Linear):
        rule = "must name linear layers, and not the head"
        raise ValueError(f"{given}: {rule} {others}")


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Compute with the weights under the LoRA layers. ValueError if the model has none."""
    _need_peft()
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    if not layers:
        raise ValueError("the model has no adapters to turn off; set model.lora")
    _enable(layers, False)
    try:
        yield
    finally:
        _enable(layers, True)


def full_weights(
    model: Any, whole_of: Callable[[Tensor], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Each weight once, whole, detached, by the name it has without LoRA; LoRA is merged in.

    Tied weights come once, by the name of the first. Where a weight is a DTensor all ranks of its
    mesh have to go through this together, as each step gathers one: by `whole_of` if it is given,
    else as DTensor does. A merged weight W + (alpha / rank) B A is summed in float32 and has the
    dtype of W.
    """
    whole_of = whole_of or _whole
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_A." in name or ".lora_B." in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        whole = whole_of(tensor)
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner and leaf == "weight":
            layer: Any = model.get_submodule(owner)
            parts = (layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight)
            a, b = (whole_of(part).float() for part in parts)
            delta = (b @ a) * layer.scaling[ADAPTER]
            # Conv1D of GPT-2 holds its weight transposed
            whole = (whole.float() + (delta.T if layer.fan_in_fan_out else delta)).to(whole.dtype)
        yield (f"{owner}.{leaf}" if owner else name), whole


def adapter_weights(
    model: Any, whole_of: Callable[[Tensor], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Each weight of the LoRA layers, as full_weights has others: OWNER.lora_A.weight (r, inputs)
    and OWNER.lora_B.weight (outputs, r). ValueError if there is none."""
    own = {n: t for n, t in model.state_dict(keep_vars=True).items() if f".{ADAPTER}." in n}
    if not own:
        raise ValueError("the model has no adapters to give; set model.lora")
    for name, tensor in own.items():
        yield name.replace(f".{ADAPTER}.", "."), (whole_of or _whole)(tensor)


def _need_peft() -> None:
    if find_spec("peft") is None:
        raise ValueError("model.lora needs peft; pip install 'roll-td[lora]'")


def _enable(layers: Iterable[Any], enabled: bool) -> None:
    for layer in layers:
        layer.enable_adapters(enabled)


def _whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor  # half a second, for who has a model alone

    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
