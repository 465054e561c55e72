"""A model by its name on the hub, which is a server on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from roll_td.config.model import ModelConfig
from roll_td.models import load_model
from tests.dist.harness import Ended, Job
from tests.dist.hub import NAME, hub

TINY = Path(__file__).parents[2] / "configs" / "sft" / "tiny"
MADE = yaml.safe_load((TINY.parent / "tiny.yaml").read_text())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """Its URL, and what is fetched from it."""
    folder = tmp_path_factory.mktemp("repository")
    load_model(ModelConfig(config=MADE["model"]["config"]), 0).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY / "tokenizer").save_pretrained(folder)
    with hub(folder) as found:
        yield found


def run(command: str, folder: Path, url: str, model: str = NAME, **env: str) -> Ended:
    made: dict[str, Any] = {**MADE, "model": {"path": model}, "output_dir": str(folder)}
    made["data"] = {"train": str(TINY / "train.jsonl"), "max_length": 32}
    made |= {"max_steps": 2, "export_dir": None, "eval_steps": None}
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(made))
    env = {"HF_ENDPOINT": url, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "0"} | env
    program = "import sys; from roll_td.cli import main; sys.exit(main())"
    return Job(["-c", program, command, str(path)], **env).finish(100)


@pytest.mark.timeout(250)
def test_two_ranks_train_a_model_of_the_hub_and_fetch_it_once(
    tmp_path: Path, server: tuple[str, list[str]]
) -> None:
    url, fetched = server
    checked = run("check", tmp_path, url)
    assert checked.code == 0 and "memory in GB" in checked.out, checked.out
    fetched.clear()
    ended = run("run", tmp_path, url)
    assert ended.code == 0, ended.out
    assert fetched.count("model.safetensors") == 1
    lines = (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
    # now from the cache
    offline = run("check", tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert "memory in GB" in offline.out and offline.code == 0, offline.out


@pytest.mark.timeout(120)
def test_a_name_that_the_hub_does_not_have(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    ended = run("run", tmp_path, server[0], "someone/tinny")
    assert ended.code == 1
    assert ended.out.count("roll-td: ") == 1, ended.out
    assert "model.path=someone/tinny: can't load a tokenizer" in ended.cause
