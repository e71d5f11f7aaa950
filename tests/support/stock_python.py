"""The Python that runs stock SGLang beside a GPU, and the commands of this project beside it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

VARIABLE = "SGLANG_PYTHON"


def sglang_python() -> tuple[str, ...]:
    """`rollout.sglang.python` as a setting, from the environment variable SGLANG_PYTHON; none where this Python has
    SGLang. Skips the test where neither is there."""
    if python := os.environ.get(VARIABLE):
        return (f"rollout.sglang.python={python}",)
    if importlib.util.find_spec("sglang") is None:
        pytest.skip(f"this Python has no SGLang: set {VARIABLE} to the Python of an environment with SGLang 0.5.23")
    return ()


def miles_like(*words: object) -> subprocess.CompletedProcess[str]:
    """The command, which ends with this process."""
    command = [sys.executable, "-m", "miles_like.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)
