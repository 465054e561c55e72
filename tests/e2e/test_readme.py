"""The README's own pipeline, run as the README says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OUTSIDE = ("SLURM_", "TORCHELASTIC", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_")

pytestmark = pytest.mark.timeout(90)


def block(language: str) -> str:
    """The README's one block of a language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_pipeline.py").write_text(block("python"), encoding="utf-8")
    (tmp_path / "my.yaml").write_text(block("yaml"), encoding="utf-8")
    return tmp_path


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(OUTSIDE)}
    return subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=80,
    )


def check_run(ended: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "[[0, 2], [4, 6], [8, 10], [12, 14]]" in ended.stdout
    assert (folder / "runs/my/metrics.jsonl").read_text().count("\n") == 3
    assert "my_pipeline.MyWorker" in (folder / "runs/my/config.yaml").read_text()
    assert len(list((folder / "runs/my/trace").glob("*.json"))) == 1


def test_check_prints_the_placement(folder: Path) -> None:
    ended = run(folder, "-m", "roll_td.cli", "check", "my.yaml")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ranks to start: 3" in ended.stdout


def test_run_starts_the_ranks(folder: Path) -> None:
    check_run(run(folder, "-m", "roll_td.cli", "run", "my.yaml"), folder)


def test_a_single_process_is_a_job(folder: Path) -> None:
    check_run(run(folder, "-m", "roll_td", "my.yaml", "double.world_size=1"), folder)


def test_torchrun_starts_it(folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    check_run(run(folder, *torchrun, "-m", "roll_td", "my.yaml"), folder)


def test_a_failure_ends_the_job_and_names_the_place(folder: Path) -> None:
    path = folder / "my_pipeline.py"
    text = path.read_text()
    path.write_text(text.replace('data["input"]', 'data["inputs"]'))
    ended = run(folder, "-m", "roll_td.cli", "run", "my.yaml")
    assert ended.returncode == 1
    said, promised = ended.stderr.strip().splitlines(), block("text").splitlines()
    # which of the two workers is first is chance
    place = re.compile(r"worker \d of double, rank \d on \S+\)")
    assert [place.sub("", line) for line in (said[0], said[-1])] == [
        place.sub("", line) for line in (promised[0], promised[-1])
    ]


def test_the_first_commands_come_early() -> None:
    lines = README.splitlines()
    line = lines.index("pip install torch==2.13.0 && pip install -e .") + 1
    assert line < 25
    assert lines[line : line + 2] == [
        "roll-td run configs/transform/transform.yaml",
        "roll-td run configs/sft/tiny.yaml",
    ]


def test_the_first_command_runs(tmp_path: Path) -> None:
    config = ROOT / "configs/transform/transform.yaml"
    ended = run(tmp_path, "-m", "roll_td.cli", "run", str(config))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step 2/3" in ended.stderr


def test_your_own_data_and_model(tmp_path: Path) -> None:
    """The second command of the README is that of test_sft."""
    command = "roll-td run configs/sft/sft.yaml model.path=my-model data.train=my.jsonl"
    assert command in README.splitlines()
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs/sft/tiny/tokenizer")
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**fields, **heads))
    model.save_pretrained(tmp_path / "my-model")
    tokenizer.save_pretrained(tmp_path / "my-model")
    turns = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    (tmp_path / "my.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    _, verb, config, *overrides = command.split()
    ended = run(tmp_path, "-m", "roll_td.cli", verb, str(ROOT / config), *overrides, "max_steps=2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step 1/2" in ended.stderr
