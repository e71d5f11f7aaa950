"""Stock SGLang and the trainer on one GPU: weights by CUDA IPC handles, and `verify`. Prints its figures.

The Python of an environment with SGLang 0.5.23 is named by SGLANG_PYTHON, unless this one has it. Not covered: several
ranks, NCCL, quantized weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sglang_cpu.one_card import Card, check_server
from tests.support.stock_python import miles_like, sglang_python

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_a_server_by_handles_and_verify(tmp_path: Path) -> None:
    print(json.dumps(check_server(Card("cuda", tmp_path, miles_like, sglang_python()))))
