"""What TorchX would send to each scheduler. Nothing is sent; a real job is in tests/slurm."""

from __future__ import annotations

import base64
import re
import warnings
from pathlib import Path

import pytest

from launch import torchx_component as component
from launch.jobspec import JobSpec, Wishes, job_spec
from roll_td.config.base import BaseConfig

GOLDEN = Path(__file__).parent / "golden"
pytestmark = [
    # TorchX's own, and those of the clients it imports
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Cannot determine resource:UserWarning"),
]


def spec(nodes: int = 2, folder: str = "") -> JobSpec:
    config = BaseConfig(
        exp_name="try", num_nodes=nodes, num_gpus_per_node=4, num_cpu_ranks_per_node=1
    )
    wishes = Wishes(cpus_per_rank=2, mem_gb=64, torchrun_restarts=1)
    return job_spec(config, "a.yaml", ["x=1", "y=a $b"], wishes, {}, folder)


def app(nodes: int) -> str:
    made = component._app(spec(nodes), "img", "python", 3, 29500, "s3cret")
    (role,) = made.roles
    assert (made.name, role.num_replicas, role.max_retries) == ("try", nodes, 3)
    assert (role.resource.cpu, role.resource.gpu, role.resource.memMB) == (10, 4, 65536)
    assert role.env == {
        "OMP_NUM_THREADS": "2",
        "ROLL_TD_NOTICES": "TERM",
        "ROLL_TD_NOTICE_FILE": "runs/try/notice",
        "ROLL_TD_SECRET": "s3cret",
    }
    assert (role.entrypoint, role.args[0], role.image) == ("bash", "-c", "img")
    return str(role.args[1])


def test_a_node_is_a_replica_in_which_torchrun_starts_the_ranks() -> None:
    assert app(2) == (
        "ROLL_TD_RESTARTS=$${SLURM_RESTART_COUNT:-0} exec python -m torch.distributed.run "
        "--nnodes=2 --nproc-per-node=5 --max-restarts=1 --rdzv-backend=c10d --rdzv-id=${app_id} "
        "--shutdown-timeout=120 --rdzv-endpoint=$${${rank0_env}:=localhost}:29500 "
        "-m roll_td a.yaml x=1 'y=a $$b'"
    )
    assert "--local-addr=127.0.0.1 --rdzv-endpoint=localhost:0 -m" in app(1)


@pytest.mark.parametrize(
    ("scheduler", "options"),
    [
        ("local_cwd", {}),
        ("local_docker", {"image": "img"}),
        ("slurm", {"partition": "gpu", "time": "60"}),
        ("kubernetes", {"image": "img", "queue": "q"}),
        ("aws_batch", {"image": "img", "queue": "q"}),
        ("lsf", {"image": "img", "lsf_queue": "q", "jobdir": "/shared"}),
    ],
)
def test_requests_read_as_they_should(
    scheduler: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "me")
    monkeypatch.setenv("LOGNAME", "me")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.chdir("/")
    folder = "/s" if scheduler in component._OF_THIS_MACHINE else ""
    text = component.request_text(spec(folder=folder), scheduler, {"python": "python"} | options)
    assert plain(text) == plain((GOLDEN / f"torchx_{scheduler}.txt").read_text())


def plain(text: str) -> str:
    """Without the job's random id, and the places where lines are broken, which follow its
    length."""
    text = re.sub(r"'\s+'", "", re.sub(r"\btry-[a-z0-9]+", "try-ID", text))
    return " ".join(text.split())


def test_the_request_of_gcp_batch_holds_the_command() -> None:  # it prints as a protobuf
    text = component.request_text(spec(), "gcp_batch", {"image": "img", "project": "p"})
    request = base64.b64decode("".join(re.findall(r"^  (\S+)$", text, re.M)))
    assert b"--nnodes=2 --nproc-per-node=5 --max-restarts=1" in request
    assert b"-m roll_td a.yaml x=1 'y=a $b'" in request


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ValueError, match=r"runs an image; name one .*: --option image=NAME"):
        component.request_text(spec(), "kubernetes", {"queue": "q"})
    with pytest.raises(ValueError, match=r"torchx:cray: this TorchX has .*kubernetes"):
        component.request_text(spec(), "cray", {"image": "i"})


def test_the_component_loads_in_torchx_and_makes_the_job_of_a_config() -> None:
    from torchx.specs.builders import materialize_appdef
    from torchx.specs.finder import get_component

    path = Path(component.__file__)
    found = get_component(f"{path}:train")
    assert found.validation_errors == []
    tiny = path.parents[1] / "configs" / "sft" / "tiny.yaml"
    given = ["--config", str(tiny), "--image", "img", "--devices", "cpu", "--mem_gb", "4"]
    with warnings.catch_warnings():
        made = materialize_appdef(found.fn, [*given, "--env", "A=b", "seed=7"])
    (role,) = made.roles
    assert (role.resource.cpu, role.resource.gpu, role.resource.memMB) == (3, 0, 4096)
    assert role.args[1].endswith(f"-m roll_td {tiny} seed=7")
    assert role.env["A"] == "b" and len(role.env["ROLL_TD_SECRET"]) == 64
    again = component.train(config=str(tiny), image="img")
    assert again.roles[0].env["ROLL_TD_SECRET"] != role.env["ROLL_TD_SECRET"]
    with pytest.raises(ValueError, match="devices=tpu: must be gpu or cpu"):
        component.train(config=str(tiny), devices="tpu")
