"""Law: stock SGLang 0.5.23 keeps the contract of rollout engines, claim by claim, and it ends by the orders that this
project's client refuses.

Why it must hold: client, publisher and loop are tested with the embedded server, which keeps the same claims
(tests/rollout/embedded/server/test_embedded_contract.py); the orders and the fatal ones were read from SGLang's source,
and a server that hangs or dies of a turn ends the run. On CPU its memory saver frees nothing, so bytes are not part of
this. Latent attention; grouped attention is published to and sampled from in test_stock_sglang.py. Not covered: GPUs,
several ranks of a server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from rollout.sglang.servers import living
from tests.sglang_cpu.served import START_S, serve
from tests.support.engine_contract.control import ControlContract
from tests.support.engine_contract.generation import GenerationContract
from tests.support.engine_contract.memory import MemoryContract
from tests.support.engine_contract.served_engine import SHAPES, ServedEngine, write_models
from tests.support.engine_contract.weights import WeightsContract

pytestmark = pytest.mark.slow
HERE = "tests/sglang_cpu/test_stock_contract.py"
HF = SHAPES["deepseek"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_models(HF, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served_engine(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    home = tmp_path_factory.mktemp("stock")
    with serve(models[0], home / "sglang.log") as server:
        server.await_ready(START_S)
        yield ServedEngine(
            url=server.url,
            kind="sglang",
            hf=HF,
            first=models[0],
            other=models[1],
            directory=home / "published",
            seeded=False,  # on CPU
            rounding=0.03,  # BF16
            keeps_rows=False,
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


async def _release_while_busy(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}}
        running = asyncio.create_task(http.post("/generate", json=body))
        await asyncio.sleep(1)
        assert not running.done()
        released = asyncio.create_task(http.post("/release_memory_occupation", json={}))
        await asyncio.wait({running, released}, timeout=60)
        for task in (running, released):
            task.cancel()
        await asyncio.wait({running, released})


async def _resume_what_was_not_released(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        asked = asyncio.create_task(http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}))
        await asyncio.wait({asked}, timeout=60)
        asked.cancel()
        await asyncio.wait({asked})


@pytest.mark.sglang_all
@pytest.mark.parametrize(
    ("order", "why"),
    [(_release_while_busy, "AssertionError"), (_resume_what_was_not_released, "KeyError")],
    ids=["release while busy", "resume of what was not released"],
)
def test_a_stock_server_ends_by_the_orders_that_are_refused_here(
    models: tuple[Path, Path], tmp_path: Path, order: Callable[[str], Awaitable[None]], why: str
) -> None:
    """So the refusals are of what happens, and not of what was once read. The detokenizer outlives the scheduler, until
    the group of both is ended."""
    log = tmp_path / "sglang.log"
    with serve(models[0], log) as one:
        one.await_ready(START_S)
        asyncio.run(order(one.url))  # type: ignore[arg-type]
        until = time.monotonic() + 60
        while why not in log.read_text() and time.monotonic() < until:
            time.sleep(0.5)
        assert why in log.read_text()
    assert not living(one.pid)
