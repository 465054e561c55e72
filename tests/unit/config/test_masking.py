"""C11: secrets stay out of logs, files and errors."""

from __future__ import annotations

import pytest

from roll_td.config.masking import MASK, mask_urls, masked, shown


@pytest.mark.parametrize(
    "key",
    [
        *("api_key", "WANDB_API_KEY", "wandb-api-key", "hf_token", "token", "password", "secret"),
        *("apiKey", "aws_secret_key", "access_key", "PRIVATE_KEY", "passwd", "passphrase"),
        *("client_secret", "credentials", "Authorization"),
    ],
)
def test_c11_secret_keys(key: str) -> None:
    assert masked({"a": [{key: "S3CRET"}]}) == {"a": [{key: MASK}]}
    assert shown(f"trackers.{key}", "S3CRET") == repr(MASK)


def test_secrets_below_a_secret_key() -> None:
    data = {"api_keys": ["S1", "S2"], "secret": {"a": "S3"}, "password": 1234}
    assert masked(data) == {"api_keys": [MASK, MASK], "secret": {"a": MASK}, "password": MASK}


def test_c11_what_is_no_secret_keeps_its_value() -> None:
    data = {
        "use_cls_token": True,
        "num_tokens": 512,
        "max_token": 3,
        "pad_token": "<pad>",
        "token": None,
        "ratio": 0.5,
        "keys": ("a", 1),
        "access_key_id": "x",
        "secretary": "x",
        "eos_token_id": 3,
        "stop_tokens": "x",
    }
    assert masked(data) == data | {"keys": ["a", 1]}


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("http://user:pw@host:80/x", f"http://{MASK}@host:80/x"),
        ("see http://u:p@ss@h and http://h2/y", f"see http://{MASK}@h and http://h2/y"),
        ("https://h/x?a=1&api_key=S3CRET&b=2", f"https://h/x?a=1&api_key={MASK}&b=2"),
        ("ssh://git@host/x:y@z", "ssh://git@host/x:y@z"),
        ("https://ghp_S3CRET@github.com/x", f"https://{MASK}@github.com/x"),
        ("git+https://u:p@h and redis://:pw@h", f"git+https://{MASK}@h and redis://{MASK}@h"),
        ("https://host/a@b", "https://host/a@b"),
    ],
)
def test_c11_urls(url: str, safe: str) -> None:
    assert mask_urls(url) == safe
    assert masked({"url": url}) == {"url": safe}


def test_long_values_are_cut() -> None:
    assert len(shown("text", "x" * 500)) == 80
