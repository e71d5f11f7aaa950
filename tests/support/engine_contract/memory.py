"""Release and resume of memory: the order of a turn, and the orders that end a stock server, which do not leave the
client."""

from __future__ import annotations

import asyncio

import pytest

from rollout.sglang import client as client_module
from rollout.sglang.client import SGLangClient
from rollout.wire.bodies import MemoryTag
from tests.support.engine_contract.control import one
from tests.support.engine_contract.served_engine import ServedEngine
from tests.support.refusals import refuses

KV, WEIGHTS, GRAPH = MemoryTag
ALL = tuple(MemoryTag)
PORT = "it names the port"


class MemoryContract:
    def test_the_order_of_a_turn(self, engine: ServedEngine) -> None:
        """Release, resume of the weights, a whole publication, resume of the rest, generation: twice, as in a run."""

        async def turns(client: SGLangClient) -> None:
            for version in (1, 2):
                await one(client, tokens=4)
                await client.release_memory(ALL)
                with refuses(RuntimeError, "kv_cache, weights, cuda_graph", unrecorded=PORT):
                    await one(client, tokens=4)
                await client.resume_memory([WEIGHTS])
                await asyncio.to_thread(engine.publish, engine.other, version)
                client.occupation.published()
                await client.resume_memory([KV, GRAPH])
                assert await client.weight_version() == version
                sample = await one(client, tokens=4)
                assert sample.response_len == 4 and {v.version for v in sample.versions} == {version}

        engine.ask(turns)

    def test_the_fatal_orders_do_not_leave_the_client(self, engine: ServedEngine) -> None:
        """The server lives on, and answers."""

        async def wrong(client: SGLangClient) -> None:
            async with engine.under_way(one(client)) as asked:
                with refuses(RuntimeError, "in flight", 1, unrecorded=PORT):
                    await client.release_memory(ALL)
                with refuses(RuntimeError, "kv_cache", unrecorded=PORT):
                    await client.resume_memory([KV])
                await client.abort_all()
                await asked
            assert (await one(client, tokens=4)).response_len == 4

        engine.ask(wrong)

    def test_a_server_that_another_process_keeps_busy_refuses_the_release(
        self, engine: ServedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The idle check before the release is an endpoint that a busy server survives."""
        monkeypatch.setattr(client_module, "_FLUSH_S", 0.2)

        async def busy(client: SGLangClient) -> None:
            other = engine.client()
            async with engine.under_way(one(other)) as asked:
                with refuses(RuntimeError, "/flush_cache", "HTTP", 400, unrecorded=PORT):
                    await client.release_memory(ALL)
                assert not client.occupation.released
                await client.abort_all()
                await asked
            await other.close()
            assert (await one(client, tokens=4)).response_len == 4

        engine.ask(busy)
