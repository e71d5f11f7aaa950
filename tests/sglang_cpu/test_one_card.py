"""Law: the steps of `make gpu` with stock SGLang hold on a CPU: what a card then finds is of the card.

SGLang 0.5.23 as it is released (`make test-sglang`). Not covered: CUDA, where handles are of the GPU's memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang_cpu.conftest import Run
from tests.sglang_cpu.one_card import Card, check_run, check_server
from tests.sglang_cpu.served import INTERPRETER, PORTS

pytestmark = pytest.mark.slow
HERE = (*PORTS, f"rollout.sglang.python={INTERPRETER}")


def test_a_server_by_handles_and_verify(miles_like: Run, tmp_path: Path) -> None:
    check_server(Card("cpu", tmp_path, miles_like, HERE))


def test_a_run_of_turns(miles_like: Run, tmp_path: Path) -> None:
    check_run(Card("cpu", tmp_path, miles_like, HERE))
