"""config.json of a model on the hub: from the cache, or from it, or neither."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from roll_td.config.hub import hub_config
from roll_td.config.model import ModelConfig
from roll_td.config.model_size import model_size
from tests.dist.hub import COMMIT, NAME, hub

FIELDS = {
    "model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 64,
    "n_positions": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that can't be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return use(monkeypatch, "http://127.0.0.1:9") or tmp_path / "cache"


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def test_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "config.json").write_text(json.dumps(FIELDS))
    with hub(tmp_path / "repository") as (url, fetched):
        use(monkeypatch, url)
        assert model_size(ModelConfig(path=NAME)) == model_size(ModelConfig(config=FIELDS))
        assert fetched == ["config.json"]
        with pytest.raises(ValueError, match=r"has no model someone/else for you .404 Not Found."):
            hub_config("someone/else")


def test_from_the_cache(cache: Path) -> None:
    folder = cache / "models--someone--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "snapshots" / COMMIT / "config.json").write_text(json.dumps(FIELDS))
    assert hub_config(NAME) == FIELDS


def test_from_nowhere_it_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"can't be reached .*; fetch it once with `hf download"):
        hub_config(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set; fetch it once"):
        hub_config(NAME)
    assert time.monotonic() - began < 5
    with pytest.raises(ValueError, match="Repo id must"):
        hub_config("no name")
