"""One rank; what several do together is in tests/dist/test_fsdp2.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from roll_td.config.base import WorkerConfig
from roll_td.config.model import LoraConfig, ModelConfig, TrainingConfig
from roll_td.config.strategies import StrategyArgs
from roll_td.distributed.topology import Topology, rank_infos
from roll_td.metrics import Mean, Sum
from roll_td.models import load_model
from roll_td.models.value_head import load_value_model
from roll_td.plan import default_plan, local
from roll_td.protocol import DataProto
from roll_td.strategies import states
from roll_td.strategies.base import StrategyContext
from roll_td.strategies.fsdp2 import Fsdp2Infer, Fsdp2Train
from roll_td.strategies.parts import Part

FIELDS = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "vocab_size": 31,
    "tie_word_embeddings": True,
}
MODEL = ModelConfig(config=FIELDS)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("dp",))
    dist.destroy_process_group()


def context(
    mesh: DeviceMesh | None, model: ModelConfig = MODEL, world_size: int = 1, **training: Any
) -> StrategyContext:
    config = WorkerConfig(
        name="actor",
        world_size=world_size,
        strategy_args=StrategyArgs("fsdp2_train"),
        training=TrainingConfig(**training),
    )
    return StrategyContext(
        role="actor",
        config=config,
        model=model,
        rank_info=rank_infos(Topology(dp=world_size))[0],
        groups={} if mesh is None else {"world": mesh.get_group()},
        mesh=mesh,
        device=torch.device("cpu"),
        seed=1,
    )


def made(cls: type[Any], mesh: DeviceMesh, *args: Any, **training: Any) -> Any:
    strategy = cls(context(mesh, *args, **training))
    strategy.initialize(load_model)
    return strategy


def batch(rows: int = 5) -> DataProto:
    ids = torch.randint(0, 31, (rows, 6), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([6, 2, 4, 1, 5])[:rows]
    return DataProto({"input_ids": ids, "lengths": lengths})


def loss_of(strategy: Any, factor: float = 1.0) -> Any:
    def loss_func(data: DataProto, output: Any) -> tuple[torch.Tensor, dict[str, float]]:
        loss = strategy.op_compute_language_loss(output, data["input_ids"]) * factor
        return loss, {"rows": Sum(len(data)), "first": Mean(float(data["input_ids"][0, 0]))}

    return loss_func


def test_metrics_are_those_of_all_micro_batches(mesh: DeviceMesh) -> None:
    strategy = made(Fsdp2Train, mesh, micro_batch_size=2, learning_rate=0.01)
    data = batch()
    metrics = strategy.train_step(data, loss_of(strategy))
    assert (metrics["rows"], metrics["tokens"], metrics["learning_rate"]) == (5, 18, 0.01)
    assert metrics["first"] == pytest.approx(data["input_ids"][[0, 2, 4], 0].float().mean())
    again = strategy.train_step(data, loss_of(strategy))
    assert again["loss"] < metrics["loss"]


def test_fillers_count_nowhere(mesh: DeviceMesh) -> None:
    """Rank 0 of two has all rows but a filler; a filler is rank 1's only micro-batch."""
    weights = []
    for fillers in (0, 2):
        strategy = made(Fsdp2Train, mesh)
        data = batch(2)
        plan = local(default_plan(2, 1, 1, {}), 0)
        data.plan = plan.__class__(  # type: ignore[assignment]
            plan.rows, 2, plan.micro_batches + ((1,),) * fillers, fillers, {}
        )
        metrics = strategy.train_step(data, loss_of(strategy))
        assert (metrics["rows"], metrics["tokens"]) == (2, 8)
        assert len(strategy.forward_step(data, lambda d, _: {"x": d["lengths"]})) == 2
        weights.append(dict(strategy.full_parameters()))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_forward_step_gives_rows_in_order_and_leaves_shards(mesh: DeviceMesh) -> None:
    strategy = made(Fsdp2Infer, mesh, micro_batch_size=2)
    assert not any(p.requires_grad for p in strategy.model.parameters())
    data = batch()

    def columns(micro: DataProto, output: Any) -> dict[str, torch.Tensor]:
        assert not torch.is_grad_enabled()
        log_probs = strategy.op_compute_log_probs(output, micro["input_ids"])
        return {"log_probs": log_probs, "lengths": micro["lengths"]}

    out = strategy.forward_step(data, columns)
    assert out["lengths"].tolist() == data["lengths"].tolist()
    logits = load_model(MODEL, 1)(input_ids=data["input_ids"]).logits.log_softmax(-1)
    for row, length in enumerate(data["lengths"].tolist()):
        for t in range(1, length):
            wanted = logits[row, t - 1, data["input_ids"][row, t]].item()
            assert out["log_probs"][row, t].item() == pytest.approx(wanted, abs=1e-5)
    assert not hasattr(strategy, "optimizer") and not hasattr(strategy, "train_step")
    assert len(strategy.forward_step(batch(0), columns)) == 0


def test_lora_trains_adapters_alone(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = ModelConfig(config=FIELDS, dtype="bfloat16", lora=LoraConfig(rank=2))
    strategy = made(Fsdp2Train, mesh, model, compute_dtype="bfloat16", learning_rate=0.05)
    base = dict(load_model(ModelConfig(config=FIELDS, dtype="bfloat16"), 1).named_parameters())
    merged = dict(strategy.full_parameters())
    assert merged.keys() == base.keys()
    assert all(torch.equal(merged[name], base[name]) for name in base)  # B is 0
    losses = [strategy.train_step(batch(), loss_of(strategy))["loss"] for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    after = dict(strategy.full_parameters())
    changed = {name for name in base if not torch.equal(after[name], base[name])}
    assert changed and all(name.endswith("_proj.weight") for name in changed)
    strategy.save_checkpoint(tmp_path / "a")
    other = made(Fsdp2Train, mesh, model, compute_dtype="bfloat16")
    other.load_checkpoint(tmp_path / "a")
    assert all(torch.equal(after[n], w) for n, w in other.full_parameters())


def test_new_weights_reach_the_next_forward_pass(mesh: DeviceMesh) -> None:  # E01, E08
    strategy, source = made(Fsdp2Infer, mesh), made(Fsdp2Train, mesh)
    data = batch()

    def log_probs(of: Any) -> torch.Tensor:
        def columns(micro: DataProto, output: Any) -> dict[str, torch.Tensor]:
            return {"x": of.op_compute_log_probs(output, micro["input_ids"])}

        return of.forward_step(data, columns)["x"]

    for version in (1, 2):
        source.train_step(batch(), loss_of(source))
        assert not torch.equal(log_probs(strategy), log_probs(source))
        for name, weight in source.full_parameters():
            part = Part(name, tuple(weight.shape), 0, weight.reshape(-1).clone())
            strategy.update_parameter_in_bucket([part])
        strategy.process_weights_after_loading(version)
        assert torch.equal(log_probs(strategy), log_probs(source))
        assert strategy.weight_version == version


def test_a_checkpoint_of_another_model_is_refused(mesh: DeviceMesh, tmp_path: Path) -> None:
    made(Fsdp2Train, mesh).save_checkpoint(tmp_path / "a")
    wider = ModelConfig(config=FIELDS | {"intermediate_size": 32})
    with pytest.raises(ValueError, match=r"(?s)not of this model.*mlp.*\(16, 24\).*\(16, 32\)"):
        made(Fsdp2Train, mesh, wider).load_checkpoint(tmp_path / "a")
    with pytest.raises(ValueError, match=r"optimizer.exp_avg.* missing here"):
        made(Fsdp2Infer, mesh).load_checkpoint(tmp_path / "a")


def test_offloaded_states_are_asked_back_before_use(mesh: DeviceMesh) -> None:
    strategy = made(Fsdp2Train, mesh)
    for state in ("model", "optimizer"):
        strategy.offload_states([state])
        with pytest.raises(ValueError, match=rf"{state} of the strategy is offloaded; call load_"):
            strategy.train_step(batch(), loss_of(strategy))
        strategy.load_states([state])
    strategy.offload_states()
    with pytest.raises(ValueError, match="model of the strategy is offloaded"):
        strategy.full_parameters()
    strategy.load_states()
    strategy.train_step(batch(), loss_of(strategy))
    with pytest.raises(ValueError, match="no state 'weights'; there are model, optimizer, grad"):
        strategy.offload_states(["weights"])


@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
def test_a_model_that_was_read_from_a_folder_is_offloaded_too(
    compute_dtype: str | None, mesh: DeviceMesh, tmp_path: Path
) -> None:
    load_model(ModelConfig(config=FIELDS), 3).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    strategy = made(Fsdp2Train, mesh, model, compute_dtype=compute_dtype)
    wanted = {name: weight.clone() for name, weight in strategy.full_parameters()}
    strategy.offload_states()
    parts = [states.local(parameter) for parameter in strategy.model.parameters()]
    assert all(part.untyped_storage().nbytes() == 0 for part in parts)
    strategy.load_states()
    assert all(torch.equal(wanted[name], w) for name, w in strategy.full_parameters())
    strategy.train_step(batch(), loss_of(strategy))
    assert not any(torch.equal(wanted[name], w) for name, w in strategy.full_parameters())


def test_gradients_that_are_not_finite_leave_the_weights(mesh: DeviceMesh) -> None:
    strategy = made(Fsdp2Train, mesh)
    before = {name: weight.clone() for name, weight in strategy.full_parameters()}
    with pytest.raises(ValueError, match="gradients of step 0 have norm nan; the weights are as"):
        strategy.train_step(batch(), loss_of(strategy, math.nan))
    assert all(torch.equal(before[name], w) for name, w in strategy.full_parameters())


def test_what_can_not_be_trained_is_told(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"bfloat16, too coarse.*compute_dtype: bfloat16"):
        made(Fsdp2Train, mesh, ModelConfig(config=FIELDS, dtype="bfloat16"))
    with pytest.raises(ValueError, match="linear ends after max_steps"):
        made(Fsdp2Train, mesh, lr_schedule="linear")
    with pytest.raises(ValueError, match="let a Cluster make it"):
        Fsdp2Train(context(None))

    def on_meta(config: ModelConfig, seed: int) -> torch.nn.Module:
        with torch.device("meta"):
            return torch.nn.Linear(2, 2)

    with pytest.raises(ValueError, match="left weights on the meta device"):
        Fsdp2Train(context(mesh)).initialize(on_meta)


def test_wrong_calls_are_told(mesh: DeviceMesh) -> None:
    strategy = made(Fsdp2Train, mesh)
    with pytest.raises(ValueError, match="got no rows"):
        strategy.train_step(batch(0), loss_of(strategy))

    def clash(data: DataProto, output: Any) -> tuple[torch.Tensor, dict[str, float]]:
        return output.hidden.sum(), {"loss": 1.0}

    with pytest.raises(ValueError, match=r"\['loss'\] are train_step's own"):
        strategy.train_step(batch(), clash)
    alone = Fsdp2Infer(context(mesh, world_size=2))
    with pytest.raises(ValueError, match="no plan, and ranks that step together need one"):
        alone.forward_step(batch(), lambda *_: {})


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_a_model_with_a_head_of_one_number_learns_values(
    mesh: DeviceMesh, tmp_path: Path, lora: LoraConfig | None
) -> None:
    model = ModelConfig(config=FIELDS, lora=lora)

    def critic() -> Any:
        strategy = Fsdp2Train(context(mesh, model, learning_rate=0.02, max_grad_norm=0))
        strategy.initialize(load_value_model)
        return strategy

    def values(of: Any) -> torch.Tensor:
        columns = of.forward_step(batch(), lambda _, output: {"v": of.op_compute_values(output)})
        found: torch.Tensor = columns["v"]
        return found

    def loss_func(data: DataProto, output: Any) -> tuple[torch.Tensor, dict[str, float]]:
        errors = strategy.op_compute_values(output) - data["input_ids"] / 31
        inside = torch.arange(6) < data["lengths"][:, None]
        return (errors.square() * inside)[:, 1:].sum(), {}

    strategy = critic()
    assert not values(strategy).any()
    before = {name: weight.clone() for name, weight in strategy.full_parameters()}
    losses = [strategy.train_step(batch(), loss_func)["loss"] for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]
    changed = {n for n, w in strategy.full_parameters() if not torch.equal(w, before[n])}
    # of the body too, of which adapters change the linear layers alone
    assert "lm_head.weight" in changed and len(changed) > 2
    assert ("model.embed_tokens.weight" in changed) == (lora is None)
    strategy.save_checkpoint(tmp_path / "a")
    other = critic()
    other.load_checkpoint(tmp_path / "a")
    assert torch.equal(values(other), values(strategy)) and values(other).any()
    strategy.offload_states()
    strategy.load_states()
    again = [each.train_step(batch(), loss_func)["loss"] for each in (strategy, other)]
    assert again[0] == again[1]
