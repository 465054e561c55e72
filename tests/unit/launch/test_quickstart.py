"""The quick start: its data, and the scripts that install and run it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from launch import quickstart
from roll_td.cli import check

ROOT = Path(__file__).parents[3]
PIP = [f"python -m pip install {what}" for what in ("--upgrade pip", "torch==2.13.0", "-e .")]

Rows = list[dict[str, str]]


def read(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "quickstart"
    quickstart.make(folder)
    return folder


def numbers(row: dict[str, str]) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d\d)\+([1-9]\d\d)", row["prompt"])
    assert found, row
    return int(found[1]), int(found[2])


def test_the_working_is_column_by_column() -> None:
    assert quickstart.work(237, 682) == "7+2+0=09,3+8+0=11,2+6+1=09"
    assert quickstart.work(999, 999) == "9+9+0=18,9+9+1=19,9+9+1=19"


def test_every_demonstration_is_right(made: Path) -> None:
    rows = read(made / "sft.jsonl")
    for row in rows:
        a, b = numbers(row)
        working, _, answer = row["response"].partition("#")
        assert answer == str(a + b) and working in ("", quickstart.work(a, b))
    share = sum("," in row["response"] for row in rows) / len(rows)
    assert share == pytest.approx(0.3, abs=0.01)  # five standard deviations


def test_no_sum_is_in_two_files(made: Path) -> None:
    rows = {path.stem: read(path) for path in made.iterdir()}
    assert {name: len(own) for name, own in rows.items()} == quickstart.SIZES
    pairs = [numbers(row) for own in rows.values() for row in own]
    assert len(set(pairs)) == len(pairs)
    for row in rows["prompts"] + rows["held_out"]:
        assert row["ground_truth"] == str(sum(numbers(row)))


def test_the_same_seed_makes_the_same_files(made: Path, tmp_path: Path) -> None:
    for seed, same in ((0, True), (1, False)):
        quickstart.make(tmp_path, seed)
        for path in made.iterdir():
            assert ((tmp_path / path.name).read_bytes() == path.read_bytes()) == same


def test_the_configs_fit_the_data(made: Path) -> None:
    sft, grpo = (
        yaml.safe_load((ROOT / "configs" / name).read_text())
        for name in ("quickstart/sft.yaml", "rlvr/quickstart.yaml")
    )
    for config, name in ((sft, "sft"), (grpo, "prompts")):
        assert config["data"]["train"].endswith(f"/{name}.jsonl")
        assert config["batch_size"] * config["max_steps"] == quickstart.SIZES[name]
    assert grpo["data"]["validation"].endswith("/held_out.jsonl")
    tokenizer = ROOT / sft["model"]["tokenizer"] / "tokenizer.json"
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    assert len(vocabulary) == sft["model"]["config"]["vocab_size"]
    rows = read(made / "sft.jsonl")
    assert {letter for row in rows for letter in row["prompt"] + row["response"]} < set(vocabulary)
    response = max(len(row["response"]) for row in rows) + 1  # the end token
    assert response <= grpo["actor_infer"]["generation"]["max_new_tokens"]
    assert 10 + response <= sft["data"]["max_length"]  # start, user, 7 of the prompt, assistant


def test_the_config_has_no_problem(made: Path) -> None:
    override = [f"data.train={made / 'sft.jsonl'}"]
    report = check(str(ROOT / "configs/quickstart/sft.yaml"), override)
    assert report.problems == () and report.size is not None and report.size.num_gpus_per_node == 2


PYTHON = """#!/usr/bin/env bash
echo "python $*" >>"$LOG"
if [[ "$1 $2" == "-m venv" ]]; then
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    printf '#!/usr/bin/env bash\\necho "roll-td $*" >>"$LOG"\\n[[ "$*" != *"$FAILING"* ]]\\n' \
        >"$3/bin/roll-td"
    chmod +x "$3/bin/roll-td"
fi
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the scripts, with a python that writes down what it is to do."""
    (tmp_path / "launch").mkdir()
    for name in ("launch/install", "launch/quickstart", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def did(checkout: Path, *command: str, failing: str = "nothing", rc: int = 0) -> list[str]:
    """Run a script of the checkout from elsewhere; gives what it called."""
    log = checkout / "log"
    log.write_text("")
    env = {"LOG": str(log), "PYTHON": str(checkout / "python"), "FAILING": failing}
    argv = [str(checkout / command[0]), *command[1:]]
    ended = subprocess.run(argv, cwd="/", env=os.environ | env, capture_output=True, timeout=50)
    assert ended.returncode == rc, ended.stderr
    return log.read_text().splitlines()


STEPS = [
    "python -m launch.quickstart runs/quickstart-data",
    "roll-td run configs/quickstart/sft.yaml",
    "roll-td report runs/quickstart-sft",
    "roll-td run configs/rlvr/quickstart.yaml",
    "roll-td report runs/quickstart",
]


def test_the_quick_start_installs_once(checkout: Path) -> None:
    install = ["python -m venv .venv", *PIP]
    assert did(checkout, "launch/quickstart") == [*install, *STEPS]
    assert did(checkout, "launch/quickstart") == STEPS
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert did(checkout, "launch/quickstart") == [*install[1:], *STEPS]


def test_what_the_tests_need_is_more_than_what_running_needs(checkout: Path) -> None:
    did(checkout, "launch/install")
    assert did(checkout, "launch/install", "test") == [*PIP[:2], PIP[2] + "[test]"]
    assert did(checkout, "launch/install", "test") == []
    assert did(checkout, "launch/install") == []


def test_a_part_that_fails_ends_the_quick_start(checkout: Path) -> None:
    did(checkout, "launch/install")
    assert did(checkout, "launch/quickstart", failing="sft.yaml", rc=1) == STEPS[:2]


def test_the_scripts_can_be_started() -> None:
    for name in ("launch/quickstart", "launch/install", "tests/run"):
        assert os.access(ROOT / name, os.X_OK), name
    assert "launch/install test" in (ROOT / "tests/run").read_text().splitlines()
