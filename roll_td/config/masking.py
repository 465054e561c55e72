"""Keeps secrets out of logs, saved configs and error texts."""

from __future__ import annotations

import re
from collections.abc import Mapping

MASK = "***"

_SECRET_KEY = re.compile(
    r"((api|access|secret|private)_?key|passw(or)?d|passphrase|secret|credential|authorization)s?$"
)
_TOKEN_KEY = re.compile(r"token$")
_VOCABULARY_KEY = re.compile(r"(^|_)(bos|eos|pad|unk|cls|sep|mask|stop|special|image)_token$")
_URL_LOGIN = re.compile(r"(?<=://)[^/\s]*:[^/\s]*@|(?<=http://)[^/\s]*@|(?<=https://)[^/\s]*@")
_URL_SECRET = re.compile(r"(?i)([?&][^=&\s]*(?:api_?key|token|password|secret)=)[^&#\s]+")


def masked(value: object, key: str = "") -> object:
    """`value`, found under `key`, as plain data with every secret in it replaced.

    Secret are values whose key is or ends with api_key, token, password, secret or the like, and
    logins in URLs. Truth values stay, and so do numbers and a tokenizer's special tokens under a
    key that ends with token.
    """
    if isinstance(value, Mapping):
        return {str(k): masked(v, key if _is_secret(key, v) else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, key) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if _is_secret(key, value):
        return MASK
    return value if isinstance(value, int | float) else mask_urls(str(value))


def mask_urls(text: str) -> str:
    """`text` without the logins and secret query values of the URLs in it."""
    return _URL_SECRET.sub(rf"\g<1>{MASK}", _URL_LOGIN.sub(f"{MASK}@", text))


def shown(key: str, value: object) -> str:
    """`value` as an error text shows it: masked, at most 80 characters."""
    text = repr(masked(value, key))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_secret(key: str, value: object) -> bool:
    name = key.rpartition(".")[2].lower().replace("-", "_")
    if _SECRET_KEY.search(name):
        return True
    is_token = _TOKEN_KEY.search(name) is not None and not _VOCABULARY_KEY.search(name)
    return is_token and not isinstance(value, int | float)
