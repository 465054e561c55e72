"""Which devices a role uses, as people write it."""

from __future__ import annotations

import re

_RANGE = re.compile(r"(\d+)\s*-\s*(\d+)")
_LIST_RANGE = re.compile(
    r"list\s*\(\s*range\s*\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?(?:,\s*(-?\d+)\s*)?,?\s*\)\s*\)"
)
_MOST = 1_000_000
_FORMS = "write a list [0, 1], one number, a range 0-7 or 0-3,6, or list(range(0, 8))"


def parse_device_mapping(value: object) -> list[int]:
    """The devices named by a list, a number, or a text such as 0-3,6 or list(range(0, 8)).

    Raises ValueError for anything else, no device, a negative one, or one named twice.
    """
    devices = _parse_text(value) if isinstance(value, str) else value
    if isinstance(devices, int):
        devices = [devices]
    if not isinstance(devices, list | tuple) or not all(type(d) is int for d in devices):
        raise ValueError(f"is not a set of device numbers; {_FORMS}")
    if not devices:
        raise ValueError("names no device; leave it out and set world_size for a role on CPUs")
    if min(devices) < 0:
        raise ValueError(f"device {min(devices)} is negative; devices count from 0")
    twice = sorted({d for d in devices if devices.count(d) > 1}) if _repeats(devices) else []
    if twice:
        raise ValueError(f"names device {twice[0]} twice; name each device once per role")
    return list(devices)


def _repeats(devices: list[int] | tuple[int, ...]) -> bool:
    return len(set(devices)) < len(devices)


def _parse_text(text: str) -> list[int]:
    call = _LIST_RANGE.fullmatch(text.strip())
    if call:
        return _expand(*_range_arguments(*call.groups()))
    devices: list[int] = []
    for part in text.split(","):
        span = _RANGE.fullmatch(part.strip())
        if span:
            low, high = int(span[1]), int(span[2])
            if high < low:
                raise ValueError(f"range {part.strip()} runs backwards; write {high}-{low}")
            devices += _expand(low, high + 1, 1)
        elif part.strip().isdecimal():
            devices.append(int(part))
        else:
            raise ValueError(f"cannot read {part.strip()!r}; {_FORMS}")
    return devices


def _range_arguments(first: str, second: str | None, step: str | None) -> tuple[int, int, int]:
    start, stop = (int(first), int(second)) if second else (0, int(first))
    return start, stop, int(step or 1)


def _expand(start: int, stop: int, step: int) -> list[int]:
    if step == 0:
        raise ValueError("has step 0; leave the step out or give another")
    span = range(start, stop, step)
    if len(span) > _MOST:
        raise ValueError(f"names {len(span)} devices, at most {_MOST} are allowed; {_FORMS}")
    return list(span)
