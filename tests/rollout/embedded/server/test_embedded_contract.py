"""Law: the embedded server keeps the contract of rollout engines, claim by claim, of latent and of grouped attention.

Why it must hold: one client, one publisher and one loop use this server and a stock one; what differs between them
shows here and not in a run. The same claims are asserted of stock SGLang in tests/sglang_cpu/test_stock_contract.py.
Not covered: what this server alone has (test_app.py, test_memory.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.embedded_fixtures import served, service
from tests.support.engine_contract.control import ControlContract
from tests.support.engine_contract.generation import GenerationContract
from tests.support.engine_contract.memory import MemoryContract
from tests.support.engine_contract.served_engine import SHAPES, STEP_S, ServedEngine, write_models
from tests.support.engine_contract.weights import WeightsContract

pytestmark = pytest.mark.slow
LATENT, GROUPED = SHAPES


@pytest.fixture(
    scope="module",
    params=[LATENT, pytest.param(GROUPED, marks=pytest.mark.long(beside="tests/rollout/embedded/server/test_app.py"))],
)
def served_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    home = tmp_path_factory.mktemp(request.param)
    first, other = write_models(SHAPES[request.param], home)
    s = service(first, context_length=1024, max_total_tokens=8192, max_running=16)
    step = s.engine.step

    def paced() -> bool:
        time.sleep(STEP_S)
        return step()

    s.engine.step = paced  # type: ignore[method-assign]
    with served(s) as url:
        yield ServedEngine(
            url=url,
            kind="embedded",
            hf=SHAPES[request.param],
            first=first,
            other=other,
            directory=home / "published",
            seeded=True,
            rounding=1e-4,
            keeps_rows=True,
        )


@pytest.fixture
def engine(served_engine: ServedEngine) -> ServedEngine:
    served_engine.restore()
    return served_engine


class TestGeneration(GenerationContract):
    """Of samples and scores."""


class TestControl(ControlContract):
    """Of aborts, pauses and the cache."""


class TestWeights(WeightsContract):
    """Of updates."""


class TestMemory(MemoryContract):
    """Of turns."""
