"""Abort, the three pauses, a publication while samples run, the prefix cache."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles_like.types import Finish, Prompt, Sample, VersionSpan
from rollout.sglang import client as client_module
from rollout.sglang.client import SGLangClient
from rollout.sglang.http_replies import RolloutError
from rollout.wire.control import PauseMode
from tests.support.engine_contract.served_engine import LONG, WAITS_S, A, B, ServedEngine, params
from tests.support.refusals import refuses


async def one(client: SGLangClient, prompt: Prompt = A, tokens: int = LONG) -> Sample:
    (group,) = await client.generate([prompt], n=1, params=params(tokens))
    return group.samples[0]


def with_rid(engine: ServedEngine, rid: str) -> Any:
    sampling = {"max_new_tokens": LONG, "ignore_eos": True, "temperature": 1.0}
    body = {"input_ids": list(A.token_ids), "sampling_params": sampling, "rid": rid}
    return asyncio.to_thread(engine.post, "/generate", body)


class ControlContract:
    def test_an_abort_keeps_the_tokens_and_the_sample_goes_on(self, engine: ServedEngine) -> None:
        async def aborted(client: SGLangClient) -> tuple[Sample, Sample]:
            async with engine.under_way(one(client)) as asked:
                await client.abort_all()
                cut = await asked
            return cut, await client.continue_sample(cut, params=params(4))

        cut, on = engine.ask(aborted)
        r = cut.response_len
        assert cut.finish is Finish.ABORT and 0 < r < LONG
        assert cut.versions == (VersionSpan(0, 0, r),)
        assert cut.routing is not None and len(cut.routing) == 5 + r - 1
        assert on.response_len == r + 4 and on.token_ids[: 5 + r].equal(cut.token_ids)
        assert on.routing is not None and len(on.routing) == 5 + r + 4 - 1

    def test_an_abort_of_what_waits_leaves_it_as_it_was(self, engine: ServedEngine) -> None:
        """More samples than run at once. They go on as others do."""
        many = [Prompt(id=f"w{i}", token_ids=(5, 6, 7 + i), answer="") for i in range(engine.running + 6)]

        async def aborted(client: SGLangClient) -> tuple[list[Sample], Sample]:
            asked = asyncio.ensure_future(client.generate(many, n=1, params=params(LONG)))
            async with asyncio.timeout(120):
                while not await asyncio.to_thread(engine.is_busy):
                    await asyncio.sleep(0.01)
                while not asked.done():
                    await asyncio.wait({asked}, timeout=WAITS_S)
                    await client.abort_all()
            samples = [group.samples[0] for group in await asked]
            waited = next(s for s in samples if not s.response_len)
            return samples, await client.continue_sample(waited, params=params(3))

        samples, on = engine.ask(aborted)
        assert {s.finish for s in samples} == {Finish.ABORT}
        for sample in samples:
            r = sample.response_len
            assert sample.versions == ((VersionSpan(0, 0, r),) if r else ()) and (sample.routing is None) is (r == 0)
        assert any(s.response_len for s in samples) and (on.response_len, on.finish) == (3, Finish.LENGTH)

    def test_an_abort_ends_the_request_that_it_names(self, engine: ServedEngine) -> None:
        """And those whose ids begin with the whole of it. An id of no request has no effect, whatever begins with it;
        nor has an empty one."""

        async def aborted() -> tuple[Any, Any]:
            async with engine.under_way(with_rid(engine, "first")) as first:
                second = asyncio.ensure_future(with_rid(engine, "second"))
                await engine.some_tokens_later()
                for rid in ("unknown", "fir", ""):
                    assert (await asyncio.to_thread(engine.post, "/abort_request", {"rid": rid})).status_code == 200
                await asyncio.sleep(WAITS_S)
                assert not first.done() and not second.done()
                await asyncio.to_thread(engine.post, "/abort_request", {"rid": "first"})
                ended = (await first).json()
                assert not second.done()
            await asyncio.to_thread(engine.post, "/abort_request", {"rid": "", "abort_all": True})
            return ended, (await second).json()

        first, second = asyncio.run(aborted())
        for reply in (first, second):
            reason = reply["meta_info"]["finish_reason"]
            assert (reason["type"], reason["status_code"]) == ("abort", None)
            assert 0 < len(reply["output_ids"]) < LONG

    @pytest.mark.parametrize("mode", PauseMode)
    @pytest.mark.parametrize("path", ["tensor", "disk"])
    def test_a_publication_while_a_sample_runs(self, engine: ServedEngine, path: str, mode: PauseMode) -> None:
        """Each token has the version that sampled it. Rows of a sample that was frozen are those of its log-probs; of
        one that was retracted only where the engine keeps them."""

        async def published(client: SGLangClient) -> tuple[Sample, int]:
            async with engine.under_way(one(client)) as asked:
                await asyncio.to_thread(engine.publish, engine.other, 1, path=path, mode=mode.value)
                if mode is PauseMode.ABORT:
                    cut = await asked
                    assert cut.versions == (VersionSpan(0, 0, cut.response_len),)
                    sample = await client.continue_sample(cut, params=params(5))
                else:
                    await engine.some_tokens_later()
                    assert not asked.done()
                    await client.abort_all()
                    sample = await asked
            return sample, await client.weight_version()

        sample, version = engine.ask(published)
        old, new = sample.versions
        r = sample.response_len
        assert version == 1 and (old.version, new.version) == (0, 1)
        assert old.start == 0 < old.end == new.start < new.end == r
        assert sample.routing is not None and len(sample.routing) == 5 + r - 1
        rows = sample.routing.versions
        whole = (VersionSpan(0, 0, 5 + old.end - 1), VersionSpan(1, 5 + old.end - 1, 5 + r - 1))
        if mode is PauseMode.IN_PLACE or engine.keeps_rows:
            assert rows == whole
        else:
            assert rows is not None and rows[-1] == whole[-1]

    @pytest.mark.parametrize("mode", PauseMode)
    def test_requests_wait_while_it_is_paused(self, engine: ServedEngine, mode: PauseMode) -> None:
        async def waited(client: SGLangClient) -> Sample:
            await client.pause(mode)
            asked = asyncio.ensure_future(one(client, tokens=4))
            await asyncio.sleep(WAITS_S)
            assert not asked.done()
            await client.resume()
            return await asked

        assert engine.ask(waited).response_len == 4

    @pytest.mark.parametrize(("mode", "status"), [(PauseMode.RETRACT, 200), (PauseMode.IN_PLACE, 400)])
    def test_the_cache_is_flushed_while_samples_wait_and_not_while_they_are_frozen(
        self, engine: ServedEngine, mode: PauseMode, status: int
    ) -> None:
        async def paused(client: SGLangClient) -> int:
            async with engine.under_way(one(client)) as asked:
                await client.pause(mode)
                found = (await asyncio.to_thread(engine.post, "/flush_cache")).status_code
                await client.resume()
                await client.abort_all()
                assert (await asked).response_len > 0
                return found

        assert engine.ask(paused) == status

    def test_a_busy_server_is_not_flushed_and_an_idle_one_forgets_prompts(
        self, engine: ServedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client_module, "_FLUSH_S", 0.2)

        async def busy(client: SGLangClient) -> None:
            async with engine.under_way(one(client)) as asked:
                with refuses(RolloutError, "/flush_cache", "HTTP", 400, unrecorded="it names the port"):
                    await client.flush_cache()
                await client.abort_all()
                await asked

        engine.ask(busy)

        def cached() -> int:
            return int(engine.generate(2, B.token_ids)["meta_info"]["cached_tokens"])

        engine.ask(lambda client: client.flush_cache())
        assert (cached(), cached() > 30) == (0, True)
        engine.ask(lambda client: client.flush_cache())
        assert cached() == 0

    def test_an_unknown_pause_is_refused(self, engine: ServedEngine) -> None:
        assert engine.post("/pause_generation", {"mode": "hard"}).status_code == 400
        assert len(engine.generate(2)["output_ids"]) == 2
