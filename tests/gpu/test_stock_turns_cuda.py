"""A run in which stock SGLang and the trainer take turns on one GPU: R3, and publication by CUDA IPC handles. Prints
the figures of each step.

The Python of an environment with SGLang 0.5.23 is named by SGLANG_PYTHON, unless this one has it. Not covered: several
ranks, quantized weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sglang_cpu.one_card import Card, check_run
from tests.support.stock_python import miles_like, sglang_python

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_two_steps_in_turns(tmp_path: Path) -> None:
    for figures in check_run(Card("cuda", tmp_path, miles_like, sglang_python())):
        print(json.dumps(figures))
