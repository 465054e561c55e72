"""device_mapping in every form, and what is none."""

from __future__ import annotations

import pytest

from roll_td.config.device_mapping import parse_device_mapping


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        ([0, 2, 1], [0, 2, 1]),
        (3, [3]),
        ("3", [3]),
        ("0-7", list(range(8))),
        ("0-3,6", [0, 1, 2, 3, 6]),
        (" 0 - 1 , 4 ", [0, 1, 4]),
        ("list(range(0, 8))", list(range(8))),
        ("list(range(4))", [0, 1, 2, 3]),
        ("list(range(4,8,2))", [4, 6]),
        ("list(range(3, 0, -1))", [3, 2, 1]),
    ],
)
def test_forms(given: object, devices: list[int]) -> None:
    assert parse_device_mapping(given) == devices


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0, 1, 0], "names device 0 twice"),
        ("0-3,2", "names device 2 twice"),
        ([-1, 0], "device -1 is negative"),
        ("list(range(1, -1, -1))", "list"),
        ([], "names no device"),
        ("list(range(4, 4))", "names no device"),
        ("3-1", "write 1-3"),
        ("list(range(0, 4, 0))", "step 0"),
        ("0-9999999999", "at most 1000000"),
        ("__import__('os').getcwd()", "cannot read"),
        ("", "cannot read ''"),
        ([0, True], "not a set of device numbers"),
        (True, "not a set of device numbers"),
        ([0, "1"], "not a set of device numbers"),
        ({0: 1}, "not a set of device numbers"),
        (1.5, "not a set of device numbers"),
    ],
)
def test_nonsense(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_device_mapping(given)
