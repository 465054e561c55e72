"""The README's own pipeline, run as the README says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OUTSIDE = ("SLURM_", "TORCHELASTIC", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_")

pytestmark = pytest.mark.timeout(90)


def block(file: str) -> str:
    """What the README shows of a file, or, by its language, the one block without a file."""
    start = rf"`{file}`:\n\n```\w+" if "." in file else f"^```{file}"
    (text,) = re.findall(rf"{start}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_pipeline.py").write_text(block("my_pipeline.py"), encoding="utf-8")
    (tmp_path / "my.yaml").write_text(block("my.yaml"), encoding="utf-8")
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
    lines = [line.split(" ")[0] for line in README.splitlines()]
    assert lines.index("launch/quickstart") < 25 and lines.index("tests/run") < 25


@pytest.fixture
def my_model(folder: Path) -> Path:
    """A folder with a model, prompts, and chats."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs/sft/tiny/tokenizer")
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**fields, **heads))
    model.save_pretrained(folder / "my-model")
    tokenizer.save_pretrained(folder / "my-model")
    turns = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    row = {"prompt": "1+2", "ground_truth": "3", "chosen": "3", "rejected": "4"}
    row |= {"messages": turns}
    (folder / "my.jsonl").write_text(json.dumps(row) + "\n")
    return folder


SHORT = (
    "max_steps=2", "batch_size=2", "eval_steps=null", "actor_infer.generation.max_new_tokens=4",
    "actor_infer.generation.num_return_sequences=2",
)  # fmt: skip


@pytest.mark.parametrize("which", ["plain", "own functions", "ahead"])
def test_your_own_model_data_and_functions(my_model: Path, which: str) -> None:
    (my_model / "my_functions.py").write_text(block("my_functions.py"))
    start = "roll-td run configs/rlvr/rlvr.yaml model.path=my-model data.train=my.jsonl"
    commands = [line.split() for line in README.replace("\\\n", "").splitlines()
                if line.startswith(start)]  # fmt: skip
    assert [len(words) for words in commands] == [5, 9, 8]
    _, verb, config, *overrides = commands[["plain", "own functions", "ahead"].index(which)]
    overrides = [item.replace("=0-3", "=[0]").replace("=4-7", "=[1]") for item in overrides]
    ended = run(my_model, "-m", "roll_td.cli", verb, str(ROOT / config), *overrides, *SHORT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = (my_model / "runs/rlvr/metrics.jsonl").read_text().splitlines()
    named = {"plain": "default/math_rule", "own functions": "default/brief", "ahead": "mean"}
    reward = "reward/" + named[which]
    assert [reward in json.loads(line) for line in lines] == [True, True]


@pytest.mark.parametrize("pipeline", ["dpo", "distill", "rollout", "sft"])
def test_the_other_pipelines(my_model: Path, pipeline: str) -> None:
    readme = README.replace("\\\n", "")
    (command,) = re.findall(rf"^roll-td run configs/{pipeline}/.*$", readme, re.MULTILINE)
    (my_model / "prompts.jsonl").write_bytes((my_model / "my.jsonl").read_bytes())
    _, verb, config, *overrides = command.split()
    overrides = [item.replace("=small", "=my-model").replace("=large", "=my-model")
                 for item in overrides]  # fmt: skip
    short = {
        "rollout": ["actor_infer.generation.max_new_tokens=4"],
        "sft": ["max_steps=2", "batch_size=1", "validation.generation.max_new_tokens=4"],
    }
    overrides += short.get(pipeline, ["max_steps=2", "batch_size=1"])
    ended = run(my_model, "-m", "roll_td.cli", verb, str(ROOT / config), *overrides)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert pipeline != "sft" or "val/score" in ended.stderr
    assert (my_model / "runs" / pipeline / "metrics.jsonl").read_text().count("\n") >= 1


def test_a_judge_of_the_job_itself(my_model: Path) -> None:
    (judge,) = re.findall(r"^```yaml\n(rewards:.*?)^```$", README, re.MULTILINE | re.DOTALL)
    config = yaml.safe_load((ROOT / "configs/rlvr/rlvr.yaml").read_text()) | yaml.safe_load(judge)
    (my_model / "judged.yaml").write_text(yaml.safe_dump(config))
    (my_model / "my-model").rename(my_model / "my-judge")
    own = ("model.path=my-judge", "data.train=my.jsonl", "reward.world_size=1")
    own += ("actor_train.device_mapping=[1]", "judges.strict.generation.max_new_tokens=4")
    ended = run(my_model, "-m", "roll_td.cli", "run", "judged.yaml", *own, *SHORT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = (my_model / "runs/judged/metrics.jsonl").read_text().splitlines()
    # a model of random weights says no number that would be a score
    assert [json.loads(line)["judge/strict/without_score"] for line in lines] == [4, 4]


def test_a_real_model_s_config_with_another_model(my_model: Path) -> None:
    readme = README.replace("\\\n", "")
    (command,) = re.findall(r"^roll-td run configs/rlvr/smollm2.yaml", readme, re.MULTILINE)
    own = (f"model.path={my_model / 'my-model'}", f"output_dir={my_model / 'runs'}")
    short = ("max_steps=1", "batch_size=2", "eval_steps=null", "data.max_length=80")
    ended = run(ROOT, "-m", "roll_td.cli", *command.split()[1:], *own, *short)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step 0/1" in ended.stderr


SUBMITS = re.findall(r"^(roll-td submit .*?) *(?:#.*)?$", README, re.MULTILINE)


@pytest.mark.parametrize("command", SUBMITS)
def test_what_would_be_submitted_is_printed(folder: Path, command: str) -> None:
    ended = run(folder, "-m", "roll_td.cli", *command.split()[1:], "--dry-run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "runs/my/logs" in ended.stdout or "my.yaml" in ended.stdout


def test_both_ways_to_submit_are_shown() -> None:
    assert len(SUBMITS) == 2


def test_a_config_for_gpus_checks_out(my_model: Path) -> None:
    (command,) = re.findall(r"^roll-td check configs.*$", README.replace("\\\n", ""), re.MULTILINE)
    _, verb, config, *overrides = command.split()
    ended = run(my_model, "-m", "roll_td.cli", verb, str(ROOT / config), *overrides)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ranks to start: 10 (8 device and 2 CPU ranks a node)" in ended.stdout
    assert re.search(r"^actor_infer +6-7 ", ended.stdout, re.MULTILINE)


def test_your_own_model_is_fine_tuned(my_model: Path) -> None:
    text = "roll-td run configs/sft/sft.yaml model.path=my-model data.train=my.jsonl"
    assert f"`{text}`" in README
    _, verb, config, *overrides = text.split()
    ended = run(my_model, "-m", "roll_td.cli", verb, str(ROOT / config), *overrides, "max_steps=2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step 1/2" in ended.stderr
