"""config.json of a model on the Hugging Face hub, without waiting long for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

TIMEOUT_S = 2.0
"""The hub's own client tries for 23 s and more."""
CONFIG = "config.json"


def hub_config(name: str) -> dict[str, Any]:
    """Fields of the config.json of the hub's model `name`, from the cache on this machine, else
    from the hub (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE count as for its own client).

    ValueError if the name can't be one, the hub has no such model, or can't be reached.
    """
    # not needed for models in folders
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers

    fix = f"fetch it once with `hf download {name}`, or give a folder"
    cached = try_to_load_from_cache(name, CONFIG)
    if isinstance(cached, str):
        text = Path(cached).read_text(encoding="utf-8")
    elif constants.HF_HUB_OFFLINE:
        raise ValueError(f"{name} is not in the cache of the hub, and HF_HUB_OFFLINE is set; {fix}")
    else:
        request = Request(hf_hub_url(name, CONFIG), headers=build_hf_headers())
        try:
            with urlopen(request, timeout=TIMEOUT_S) as answer:
                text = answer.read().decode()
        except HTTPError as error:
            rule = f"{constants.ENDPOINT} has no model {name} for you ({error.code} {error.reason})"
            raise ValueError(f"{rule}; see to the name, or to HF_TOKEN") from error
        except OSError as error:
            rule = (
                f"{name} is not in the cache, and {constants.ENDPOINT} can't be reached ({error})"
            )
            raise ValueError(f"{rule}; {fix}") from error
    fields: dict[str, Any] = json.loads(text)
    return fields
