"""Law: stock SGLang 0.5.23 takes the order of a turn call by call, and it ends by the orders that are refused here.

Why it must hold: the order and the fatal ones are read from its source; a server that hangs or dies of a turn ends the
run. On CPU its memory saver frees nothing, so bytes are not part of this: order and refusals are. Not covered: GPUs,
several ranks of a server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.types import Prompt, SampleGroup, SamplingParams
from rollout.config import PublishConfig
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.sglang.client import SGLangClient
from rollout.sglang.servers import living
from rollout.wire.bodies import MemoryTag
from tests.sglang_cpu.served import START_S, serve
from tests.support.refusals import refuses
from tests.support.tiny_models import random_tensors, tiny_qwen, write_checkpoint

pytestmark = pytest.mark.slow
HERE = "tests/sglang_cpu/test_turns_of_a_stock_server.py"
KV, WEIGHTS, GRAPH = MemoryTag
ALL = tuple(MemoryTag)
PROMPT = Prompt(id="a", token_ids=(5, 6, 7, 8, 9), answer="")
T = TypeVar("T")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    hf = tiny_qwen(eos_token_id=None)  # so that an answer has the length that is asked for
    return write_checkpoint(tmp_path_factory.mktemp("qwen") / "hf", hf, random_tensors(hf))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(model, tmp_path_factory.mktemp("log") / "sglang.log") as one:
        one.await_ready(START_S)
        yield one.url


def ask(url: str, run: Callable[[SGLangClient], Awaitable[T]]) -> T:
    async def alone() -> T:
        client = SGLangClient(url, routing=None, request_timeout_s=600, samples_from="client")
        try:
            return await run(client)
        finally:
            await client.close()

    return asyncio.run(alone())


async def answer(client: SGLangClient, tokens: int = 8) -> SampleGroup:
    (group,) = await client.generate([PROMPT], n=1, params=SamplingParams(max_new_tokens=tokens, temperature=1.0))
    return group


def publish(url: str, model: Path, version: int) -> None:
    target = PublishTarget(urls=(url,), kind="sglang", spec=None, config=PublishConfig())
    TensorPublisher(target, send=True).publish(HFCheckpoint(model).stream(), version=version)


def test_the_order_of_a_turn(server: str, model: Path) -> None:
    """Release, resume of the weights, a whole publication, resume of the rest, generation: twice, as in a run."""

    async def turns(client: SGLangClient) -> None:
        for version in (1, 2):
            await answer(client)
            await client.release_memory(ALL)
            with refuses(RuntimeError, "kv_cache, weights, cuda_graph", unrecorded="it names the port"):
                await answer(client)
            await client.resume_memory([WEIGHTS])
            await asyncio.to_thread(publish, server, model, version)
            client.occupation.published()
            await client.resume_memory([KV, GRAPH])
            assert await client.weight_version() == version
            (sample,) = (await answer(client)).samples
            assert sample.response_len == 8 and {v.version for v in sample.versions} == {version}

    ask(server, turns)


def test_the_fatal_orders_do_not_leave_this_process(server: str) -> None:
    """The server lives on, and answers."""

    async def wrong(client: SGLangClient) -> None:
        running = asyncio.create_task(answer(client, 200))
        while not client.occupation.in_flight:
            await asyncio.sleep(0.01)
        with refuses(RuntimeError, "in flight", 1, unrecorded="it names the port"):
            await client.release_memory(ALL)
        with refuses(RuntimeError, "kv_cache", unrecorded="it names the port"):
            await client.resume_memory([KV])
        await client.abort_all()
        await running
        assert (await answer(client)).samples[0].response_len == 8

    ask(server, wrong)


def test_a_server_that_another_process_keeps_busy_refuses_the_release(server: str) -> None:
    """The idle check before the release is an endpoint that a busy server survives."""

    async def busy(client: SGLangClient) -> None:
        other = SGLangClient(server, routing=None, request_timeout_s=600, samples_from="client")
        running = asyncio.create_task(answer(other, 900))
        await asyncio.sleep(1)
        assert not running.done()
        with refuses(RuntimeError, "/flush_cache", "HTTP", 400, unrecorded="it names the port"):
            await client.release_memory(ALL)
        assert not client.occupation.released
        await client.abort_all()
        await running
        await other.close()
        assert (await answer(client)).samples[0].response_len == 8

    ask(server, busy)


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


@pytest.mark.long(beside=HERE)
@pytest.mark.parametrize(
    ("order", "why"),
    [(_release_while_busy, "AssertionError"), (_resume_what_was_not_released, "KeyError")],
    ids=["release while busy", "resume of what was not released"],
)
def test_a_stock_server_ends_by_the_orders_that_are_refused_here(
    model: Path, tmp_path: Path, order: Callable[[str], Awaitable[None]], why: str
) -> None:
    """So the refusals are of what happens, and not of what was once read. The detokenizer outlives the scheduler, until
    the group of both is ended."""
    log = tmp_path / "sglang.log"
    with serve(model, log) as one:
        one.await_ready(START_S)
        asyncio.run(order(one.url))  # type: ignore[arg-type]
        until = time.monotonic() + 60
        while why not in log.read_text() and time.monotonic() < until:
            time.sleep(0.5)
        assert why in log.read_text()
    assert not living(one.pid)
