"""Reward functions as users write them, for the tests."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np


def length(response: str, *, share: float = 1.0) -> float:
    return share * len(response)


def always(response: str, *, value: Any) -> Any:
    return value


def numpy_mean(response: str, ground_truth: Any) -> Any:
    return np.mean([len(response), ground_truth])


def raises_on_bad(response: str, ground_truth: Any) -> float:
    if response == "bad":
        raise ZeroDivisionError("one of four")
    return float(response == ground_truth)


def exits(response: str) -> float:
    if response == "exit":
        sys.exit(0)
    if response == "end":
        os._exit(0)
    return 1.0


def sleeps(response: str) -> float:
    time.sleep(float(response))
    return float(response)


def process_id(response: str) -> float:
    time.sleep(0.2)
    return os.getpid()


def torch_is_imported(response: str) -> bool:
    return "torch" in sys.modules
