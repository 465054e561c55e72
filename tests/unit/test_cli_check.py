"""`roll-td check` and the refusals of `roll-td run`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType

import pytest
from huggingface_hub import constants

from roll_td.cli import main
from roll_td.config import strategies, vllm

REPOSITORY = Path(__file__).parents[2]
TRANSFORM = REPOSITORY / "configs" / "transform" / "transform.yaml"
SFT = REPOSITORY / "configs" / "sft" / "tiny.yaml"

USER_MODULE = """
from dataclasses import dataclass, field
from roll_td.config.base import BaseConfig, WorkerConfig

@dataclass
class CliConfig(BaseConfig):
    actor: WorkerConfig = field(default_factory=WorkerConfig)
    rewards: dict[str, WorkerConfig] = field(default_factory=dict)
    api_key: str = ""

class CliPipeline:
    def __init__(self, pipeline_config: CliConfig): ...

class CliWorker: ...
"""
GOOD = """
pipeline_cls: cli_user.CliPipeline
actor: {worker_cls: cli_user.CliWorker, device_mapping: 0-1}
rewards:
  math: {worker_cls: cli_user.CliWorker, world_size: 1}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "cli_user.py").write_text(USER_MODULE)
    (tmp_path / "exp.yaml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "cli_user", raising=False)
    return "exp.yaml"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], int]]:
    """What was asked of the local launcher, which starts nothing here."""
    calls: list[tuple[str, list[str], int]] = []

    def run_local(config: str, overrides: list[str], ranks_per_node: int) -> int:
        calls.append((config, overrides, ranks_per_node))
        return 7

    launcher = ModuleType("launch.local")
    launcher.__dict__["run_local"] = run_local
    monkeypatch.setitem(sys.modules, "launch.local", launcher)
    return calls


def test_a_right_config(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "role    worker  rank  host slot  device  shared with",
        "driver  -       2     node0:2    -       -",
        "actor   0       0     node0:0    0       -",
        "actor   1       1     node0:1    1       -",
        "math    0       3     node0:3    -       -",
        "",
        "ranks to start: 4 (2 device and 2 CPU ranks a node)",
    ]


def test_overrides_and_warnings(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config, "num_cpu_ranks_per_node=0"]) == 0
    out = capsys.readouterr().out
    assert "warning: driver shares rank 0 with device 0" in out
    assert "warning: math has 1 workers on CPUs and shares ranks with the driver" in out
    assert "ranks to start: 2 (" in out


def test_arguments_of_an_engine_where_it_is_installed(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "actor.strategy_args.strategy_config"
    given = ["actor.strategy_args.strategy_name=vllm", f"{key}.max_modellen=3"]
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    assert main(["check", config, *given]) == 0
    assert f"warning: {key}: the engine's arguments are not checked" in capsys.readouterr().out
    known = make_dataclass("EngineArgs", [("max_model_len", int, 1)])
    monkeypatch.setattr(strategies, "import_object", lambda path: lambda: known)
    assert main(["check", config, *given]) == 1
    wrong = f"{key}.max_modellen=3: the engine has no such argument; did you mean max_model_len?"
    assert wrong in capsys.readouterr().out


def test_every_problem_and_the_placement_of_the_rest(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        "actor.device_mapping=[0,0]",
        "rewards.math.worker_cls=cli_user.CliWorkr",
        "rewards.code.world_size=2",
        "rewards.code.worker_cls=nowhere.Worker",
        "rewards.far.device_mapping=5",
        "rewards.far.worker_cls=cli_user.CliWorker",
        "num_gpus_per_node=2",
        "sed=1",
    ]
    assert main(["check", config, *overrides]) == 1
    table, _, problems = capsys.readouterr().out.partition("\nexp.yaml: 5 problems\n")
    assert [line.split()[0] for line in table.splitlines()[1:5]] == [
        "driver",
        "math",
        "code",
        "code",
    ]
    keys = [line.split(":")[0].split("=")[0].strip() for line in problems.splitlines()]
    assert sorted(keys) == [
        "actor.device_mapping",
        "rewards.code.worker_cls",
        "rewards.far",
        "rewards.math.worker_cls",
        "sed",
    ]
    assert "did you mean cli_user.CliWorker?" in problems
    assert "there is no module nowhere" in problems
    assert "far uses devices [5], the world has 2" in problems


def test_c04_a_division_that_leaves_a_rest(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config, "actor.num_gpus_per_worker=4"]) == 1
    text = "actor.num_gpus_per_worker=4: does not divide the 2 devices of device_mapping"
    assert text in capsys.readouterr().out


def test_a_missing_worker_cls(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config, "rewards.x.world_size=1"]) == 1
    assert "rewards.x.worker_cls: is missing" in capsys.readouterr().out


def test_c11_no_secret_is_printed(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config, "api_key=[S3CRET]", "api_ky=S3CRET"]) == 1
    assert "S3CRET" not in "".join(capsys.readouterr())


def test_run_starts_what_check_counts(
    config: str, started: list[tuple[str, list[str], int]]
) -> None:
    assert main(["run", config, "seed=3"]) == 7
    assert started == [(config, ["seed=3"], 4)]


@pytest.mark.parametrize(
    ("overrides", "status", "message"),
    [
        (["sed=3"], 1, "did you mean seed?"),
        (["num_nodes=2", "num_gpus_per_node=1"], 2, "use roll-td submit, torchrun or srun"),
        (["actor.device_mapping=0-3", "num_gpus_per_node=2"], 1, "actor uses devices [2, 3]"),
    ],
)
def test_run_refuses_before_any_rank_starts(
    config: str,
    started: list[tuple[str, list[str], int]],
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    status: int,
    message: str,
) -> None:
    assert main(["run", config, *overrides]) == status
    assert message in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize("arguments", [[], ["check"], ["fly", "exp.yaml"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: roll-td" in capsys.readouterr().err


@pytest.mark.parametrize(("config", "role"), [(TRANSFORM, "transform"), (SFT, "actor_train")])
def test_a_shipped_config_needs_no_torch(config: Path, role: str) -> None:
    code = (
        "import sys; from roll_td.cli import main; "
        f"status = main(['check', {str(config)!r}]); "
        "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks to start: " in done.stdout
    assert role in done.stdout


def test_memory_of_each_role(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    large = ["model.config.num_hidden_layers=400", "model.config.hidden_size=640"]
    assert main(["check", str(SFT), *large, "device_memory_gb=2"]) == 1
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("actor_train   0-1  ")]
    weights, optimizer, gradients = (float(cell) for cell in line.split()[2:5])
    # of attention, MLP and norms; tied embeddings and the last norm; in float32 on two ranks
    parameters = 400 * (640 * (2 * 64 + 2 * 32 + 3 * 128) + 2 * 640 + 2 * 16) + (101 + 1) * 640
    assert weights == gradients == pytest.approx(parameters * 4 / 2 / 2**30, abs=0.005)
    assert optimizer == pytest.approx(parameters * 8 / 2 / 2**30, abs=0.005)
    assert "device_memory_gb=2: is less than the " in out


def test_memory_that_is_not_known_is_no_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    of_hub = ["~model.config", "model.path=some/model"]
    assert main(["check", str(SFT), *of_hub]) == 0
    assert "memory of actor_train is not known: some/model is not in" in capsys.readouterr().out
