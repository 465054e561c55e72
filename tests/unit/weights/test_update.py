"""Updates between roles whose ranks are threads; real ranks are in tests/dist/test_weights.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roll_td import Dispatch, Worker, WorkerConfig, register
from roll_td.config.model_update import ModelUpdateConfig
from roll_td.config.strategies import StrategyArgs
from roll_td.metrics import Last
from roll_td.placement import planned_places
from roll_td.runtime.cluster import Cluster, ResourceManager
from roll_td.runtime.failure import WorkerError
from roll_td.runtime.inprocess import LocalJob
from roll_td.strategies.exchange import HoldsWeights
from roll_td.weights.update import Pair, checksum

SIZES = {"long": (30, 40), "wide": (100, 5), "short": (3,), "number": ()}
BUCKETS = ModelUpdateConfig(bucket_mb=0.0015, verify=True)


ADAPTERS = ("wide", "number")
"""What the source of an update counts as such."""


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, fill: float) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(SIZES.items()):
            weight = torch.full(shape, fill + number, dtype=dtype)
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))


class Holder(HoldsWeights):
    spoilt = ""

    def __init__(self, dtype: torch.dtype, fill: float) -> None:
        self.model = Model(dtype, fill)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.model.state_dict().items())

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.model.get_parameter(name)) for name in ADAPTERS)

    def _require_model(self) -> None: ...

    def process_weights_after_loading(self, version: int) -> None:
        super().process_weights_after_loading(version)
        if self.spoilt:
            self.model.get_parameter(self.spoilt).view(-1)[-1] += 1


class Anything:
    """As a mock: without weights of its own."""

    weight_version = 0

    def __init__(self) -> None:
        self.names: list[str] = []

    def setup_model_update(self) -> None: ...

    def update_parameter_in_bucket(self, parts: Any) -> None:
        self.names += [part.name for part in parts]

    def process_weights_after_loading(self, version: int) -> None:
        self.weight_version = version


class Side(Worker):
    """Of an update."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def make(self, fill: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        self.strategy = Holder(dtype, fill)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def make_anything(self) -> None:
        self.strategy = Anything()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_adapters(self) -> None:
        """Alone."""
        for name in SIZES.keys() - ADAPTERS:
            delattr(self.strategy.model, name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, value: float) -> None:
        for weight in self.strategy.model.parameters():
            weight += value * torch.linspace(0, 1, weight.numel()).view(weight.shape)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shuffle(self) -> None:
        """Give the model's weights an order of this rank's own."""
        model = self.strategy.model
        weights = dict(model.named_parameters())
        order = random.Random(self.rank).sample(sorted(weights), len(weights))
        for name in weights:
            delattr(model, name)
        for name in order:
            model.register_parameter(name, weights[name])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def spoil(self, worker: int, name: str) -> None:
        self.strategy.spoilt = name if self.rank == worker else ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.strategy.full_parameters()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def look(self, attribute: str) -> Any:
        return getattr(self.strategy, attribute)


@pytest.fixture
def job() -> Iterator[LocalJob]:
    with LocalJob(planned_places(1, 4, 1), 1, 4) as running:
        yield running


def role(name: str, devices: list[int], strategy: Any = ("hf_infer",), **config: Any) -> Cluster:
    args = StrategyArgs(*strategy)
    given = WorkerConfig(name=name, device_mapping=devices, strategy_args=args, **config)
    return Cluster(name, Side, ResourceManager(1, 4), given)


def two(source: list[int], target: list[int]) -> tuple[Cluster, Cluster]:
    made = role("actor", source), role("infer", target)
    made[0].make(1.0)
    made[1].make()
    return made


PLACES = {
    "apart": ([0], [1]),
    "apart, many": ([1, 0], [3, 2]),
    "same": ([0, 1], [0, 1]),
    "same, other order": ([0, 1, 2], [2, 0, 1]),
    "one of them": ([0, 1, 2], [1]),
    "more": ([2], [0, 1, 2, 3]),
    "overlap": ([2, 0], [3, 2, 1]),
}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_target_has_what_the_source_has(job: LocalJob, places: str, dtype: torch.dtype) -> None:
    actor, infer = two(*PLACES[places])
    infer.make(0.0, dtype)
    pair = Pair(actor, infer, BUCKETS)
    for version in (1, 4):
        actor.add(0.1 * version, blocking=False)  # updates take their turn
        metrics = pair.update(version)
        (want, *_), got = actor.weights(), infer.weights()
        for worker in got:
            assert worker.keys() == SIZES.keys()
            assert all(torch.equal(worker[n], want[n].to(dtype)) for n in SIZES)
        assert infer.look("weight_version") == [version] * infer.world_size
        assert actor.look("weight_version") == [0] * actor.world_size
        assert metrics["weights/infer/version"] == Last(version)
        size = 4 if dtype == torch.float32 else 2
        assert metrics["weights/infer/megabytes"] == Last((1200 + 500 + 3 + 1) * size / 1e6)
        assert metrics["time/weights_infer_s"] > 0


@pytest.mark.parametrize("places", ["apart, many", "overlap"])
def test_a_target_that_takes_adapters_gets_these_alone(job: LocalJob, places: str) -> None:
    source, target = PLACES[places]
    actor, infer = role("actor", source), role("infer", target, ("vllm", {"lora": "adapters"}))
    actor.make(1.0)
    infer.make()
    infer.keep_adapters()
    pair = Pair(actor, infer, BUCKETS)
    for version in (1, 2):
        actor.add(0.1, blocking=False)
        metrics = pair.update(version)
        (want, *_), got = actor.weights(), infer.weights()
        for worker in got:
            assert worker.keys() == set(ADAPTERS)
            assert all(torch.equal(worker[n], want[n]) for n in ADAPTERS)
        assert metrics["weights/infer/megabytes"] == Last((500 + 1) * 4 / 1e6)


@pytest.mark.parametrize("places", ["apart, many", "same", "overlap"])
def test_b13_weights_find_each_other_by_name(job: LocalJob, places: str) -> None:  # B13
    """In whatever order each rank of the target holds them."""
    actor, infer = two(*PLACES[places])
    infer.shuffle()
    orders = {tuple(own) for own in [*actor.weights(), *infer.weights()]}
    assert len(orders) > 2, "the ranks differ"
    Pair(actor, infer, BUCKETS).update(1)
    want = actor.weights()[0]
    assert all(torch.equal(own[name], want[name]) for own in infer.weights() for name in SIZES)


@pytest.mark.parametrize("name", ["long", "number"])
def test_verify_names_the_weight_that_differs(job: LocalJob, name: str) -> None:
    actor, infer = two([0, 1], [1, 3])
    pair = Pair(actor, infer, BUCKETS)
    infer.spoil(1, name)
    with pytest.raises(
        ValueError,
        match=rf"update 5 from actor to infer: on rank 3 1 of 4 weights are not .* \['{name}'\]",
    ):
        pair.update(5)
    quiet = Pair(actor, infer, ModelUpdateConfig())
    quiet.update(6)


def test_a_checksum_changes_with_each_number_and_place() -> None:
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        drawn = torch.randn(7, generator=random)
        numbers = drawn > 0 if dtype == torch.bool else drawn.to(dtype)
        sums = {checksum(numbers), checksum(numbers.view(7, 1))}
        assert len(sums) == 1
        for i in range(7):
            other = numbers.clone()
            other[i] = not other[i] if dtype == torch.bool else other[i] * 1.01
            sums.add(checksum(other))
        assert len(sums) == 8
        assert checksum(numbers.flip(0)) != checksum(numbers)
    # over several chunks, against numbers as wide as they come
    big = torch.randint(-(2**31), 2**31, ((1 << 20) + 3,), dtype=torch.int32, generator=random)
    want = sum(i * n for i, n in enumerate(big.tolist(), 1)) % 2**64
    assert checksum(big) == want


def test_a_target_without_weights_gets_them_all(job: LocalJob) -> None:
    actor, infer = two([0, 1], [1, 2])
    infer.make_anything()
    pair = Pair(actor, infer, ModelUpdateConfig(bucket_mb=0.0015))
    pair.update(2)
    for names in infer.look("names"):
        assert list(dict.fromkeys(names)) == list(SIZES)
    assert infer.look("weight_version") == [2, 2]


def test_a_role_can_not_update_itself(job: LocalJob) -> None:
    actor, _ = two([0], [1])
    with pytest.raises(ValueError, match="actor can't get its weights from itself"):
        Pair(actor, actor, BUCKETS)


def fails(words: str, actor: Cluster, infer: Cluster, config: ModelUpdateConfig = BUCKETS) -> None:
    with pytest.raises(WorkerError, match=words):
        Pair(actor, infer, config).update(1)


def test_roles_are_to_be_initialised_before(failing: LocalJob) -> None:
    fails("role .* has no strategy yet; call init", role("actor", [0]), role("infer", [1]))


def test_what_a_strategy_can_not_do_is_found_when_it_is_paired(failing: LocalJob) -> None:
    actor, infer = two([0], [1])
    actor.make_anything()
    fails("role actor: hf_infer has no model_update, so weights can't go from actor", actor, infer)


def test_verify_needs_weights_to_look_at(failing: LocalJob) -> None:
    actor, infer = two([0], [1])
    infer.make_anything()
    fails("infer: hf_infer has no full_parameters.* with verify; give it", actor, infer)


def test_an_error_in_an_update_names_the_role(failing: LocalJob) -> None:
    actor, infer = two([0], [1, 2])
    infer.spoil(1, "nothing")
    fails(r"infer.update_weights failed \(worker 1 of infer, rank 2 on node0\)", actor, infer)


@pytest.fixture
def failing() -> Iterator[LocalJob]:
    with pytest.raises(WorkerError), LocalJob(planned_places(1, 4, 1), 1, 4) as running:
        yield running
