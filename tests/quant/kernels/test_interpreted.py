"""Kernels give the bits of the plain codecs: run by Triton's interpreter on CPU tensors.

All formats, conventions and kinds of blocks; ragged shapes, strides, fp32, -0, subnormal and largest numbers, NaN.
Not covered: what the compiler makes of a kernel (test_compiled.py), and a device (tests/gpu).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.interpreted_codecs import DIVISION, SPECS

HERE = "tests/quant/kernels/test_interpreted.py"


def _found(*words: str) -> dict[str, list[str]]:
    """What differs in each case."""
    command = [sys.executable, "-m", "tests.support.interpreted_codecs", *words]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    different: dict[str, list[str]] = json.loads(done.stdout)
    return different


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return _found()


@pytest.mark.parametrize("case", [*SPECS, DIVISION])
def test_codes_scales_and_values_are_the_plain_codecs(found: dict[str, list[str]], case: str) -> None:
    assert found[case] == []


@pytest.mark.long(beside=HERE)
def test_and_of_all_kinds_of_weights_and_memory_in_all_ways() -> None:
    assert {case: wrong for case, wrong in _found("--whole").items() if wrong} == {}
