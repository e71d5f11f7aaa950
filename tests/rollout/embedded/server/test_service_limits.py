"""What one request or one failure may cost the others: nothing that lasts.

Why it must hold: see tests/rollout/embedded/server/test_hostile_requests.py; here are the parts, in this process. Not
covered: memory that the allocator keeps.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pytest import MonkeyPatch

from miles_like.types import Finish, SamplingParams
from rollout.embedded.engine.running import Rows
from rollout.embedded.model import plain_ops
from rollout.embedded.ranks.gloo import RankLost
from rollout.embedded.server.limits import RequestLimits, affordable_connections, weights_bytes
from rollout.embedded.server.log_limit import LogLimit
from rollout.embedded.server.service import Service
from rollout.embedded.server.worker import EngineStopped, EngineWorker
from rollout.episodes.pool import EnginePool
from rollout.episodes.serving import Serving
from rollout.sglang.client import SGLangClient
from rollout.sglang.http_replies import RolloutError
from rollout.wire.bodies import request_bytes
from rollout.wire.generate import GenerateReply, GenerateRequest, WireSpan, check_tokens, reply_bytes
from tests.support.embedded_fixtures import oracle, save, served, service, spec
from tests.support.fakes import make_prompt
from tests.support.refusals import Facts, check_refusal, refuses


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle(), tmp_path_factory.mktemp("hf"))


def start_rows(rows: Rows, n: int, *, stops: int, new: int) -> list[int]:
    taken = rows.take(n)
    at = spec([5, 9], max_new_tokens=new)
    slots = torch.zeros(n, 2 + new, dtype=torch.int64)
    rows.start(taken, at, np.array([5, 9]), slots, np.zeros(n, np.uint64), tuple(range(stops)))
    return taken.tolist()


def test_rows_are_as_narrow_again_as_before_a_wide_request() -> None:
    """Every later step of all clients would compare with as many stop tokens as the widest request ever had."""
    rows = Rows(4)
    narrow = start_rows(rows, 1, stops=1, new=8)
    before = rows.stop.shape, rows.tokens.shape
    rows.stop[narrow[0], 0], rows.tokens[narrow[0], 1] = 42, 7
    wide = start_rows(rows, 2, stops=64, new=4000)
    assert rows.stop.shape == (4, 64) and rows.tokens.shape[1] >= 4002
    rows.release(wide)
    assert (rows.stop.shape, rows.tokens.shape) == before
    assert rows.stop[narrow[0], 0] == 42 and int(rows.tokens[narrow[0], 1]) == 7
    assert rows.slots.shape == rows.logprobs.shape == rows.tokens.shape


def test_a_task_that_fails_fails_alone(path: Path) -> None:
    worker = EngineWorker(service(path), threads=1)
    worker.start()
    try:
        for error in (KeyError("F4"), OSError("gone"), MemoryError(), RecursionError(), OverflowError("large")):

            def fail(error: Exception = error) -> None:
                raise error

            with pytest.raises(type(error)):
                worker.call(fail).result(30)
        assert worker.alive
        done = worker.generate([spec([5, 9], max_new_tokens=3)]).done.result(60)
        assert len(done[0].reply.output_ids) == 3
    finally:
        worker.stop()


def test_an_error_in_a_step_is_told_to_everybody_who_waits(path: Path, monkeypatch: MonkeyPatch) -> None:
    """The fault matrix's row of a dead engine in a living process: health is 503, and no request hangs."""
    s = service(path)

    def broken() -> bool:
        if not s.engine.waiting:
            return False
        raise ZeroDivisionError("a fault that was planted")

    monkeypatch.setattr(s.engine, "step", broken)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    with served(s) as url, httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
        assert http.get("/health").status_code == 200
        for _ in range(2):  # the one that waits, and one that comes later
            reply = http.post("/generate", json={"input_ids": [5, 9]})
            assert reply.status_code == 503
            check_refusal(reply.json()["error"]["message"], "ZeroDivisionError", "a fault that was planted")
        assert http.get("/health").status_code == 503


def test_what_was_asked_of_a_server_whose_engine_has_ended_is_asked_of_another(
    path: Path, monkeypatch: MonkeyPatch
) -> None:
    """It answers, with status 503, as a server does one of whose ranks has died. Without another one it is an error."""
    broken, whole, said = service(path), service(path), list[str]()
    for s in (broken, whole):
        s.engine.set_version("0")

    def fails() -> bool:
        if not broken.engine.waiting:
            return False
        raise RankLost("rank 1 ended: planted")

    monkeypatch.setattr(broken.engine, "step", fails)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    params, prompts = SamplingParams(max_new_tokens=3), [make_prompt(f"p{i}") for i in range(4)]

    async def run(*urls: str) -> int:
        serving = Serving(urls, lambda url, error: said.append(str(error)), limit_s=60.0)
        pool = EnginePool([SGLangClient(url, routing=None) for url in urls], serving if len(urls) > 1 else None)
        try:
            return sum(len(g.samples) for g in await pool.generate(prompts, n=2, params=params))
        finally:
            await pool.close()

    with served(broken) as first, served(whole) as second:
        assert asyncio.run(run(first, second)) == 8
        assert len(said) == 1 and first in said[0] and "rank 1 ended: planted" in said[0]
        with refuses(RolloutError, first, "RankLost", "rank 1 ended: planted"):
            asyncio.run(run(first))


def test_a_task_behind_a_step_that_fails_is_answered(path: Path, monkeypatch: MonkeyPatch) -> None:
    """A task that waits for running requests to end is no longer in the inbox while the step runs."""
    s = service(path)
    worker = EngineWorker(s, threads=1)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    monkeypatch.setattr(type(s.engine), "running", property(lambda engine: 1))

    def broken() -> bool:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(s.engine, "step", broken)
    waiting = worker.call(lambda: None, drain=True)
    worker.start()
    with refuses(EngineStopped, "planted"):
        waiting.result(30)


def test_a_newer_version_replaces_the_update_of_a_publisher_that_died(path: Path, monkeypatch: MonkeyPatch) -> None:
    s = service(path)
    s.begin_update("4")
    for version in ("3", None, "x"):
        with refuses(ValueError, 4):
            s.begin_update(version)
    s.begin_update("5")
    for change in (lambda: s.update([], flush_cache=True, version="4"), lambda: s.end_update("4")):
        with refuses(ValueError, 5, 4):
            change()
    s.end_update("5")
    held = s.store.checksums()
    s.begin_update("6")
    s.update([("model.norm.weight", torch.zeros(64))], flush_cache=True, version="6")  # type: ignore[list-item]
    s.begin_update("6")  # a run that goes on publishes the version again that it died with
    s.end_update("6")
    assert s.store.checksums() == held and s.engine.version == "default", "nothing of the update that was left"
    s.begin_update("6")
    with refuses(ValueError, 6):
        s.begin_update("4")
    monkeypatch.setattr("rollout.embedded.server.service.SESSION_IDLE_S", 0.0)
    s.begin_update("4")


def test_a_later_epoch_replaces_the_update_of_a_process_that_was_cut_off(path: Path) -> None:
    """Also with an older version: a run that went back to a checkpoint. An earlier epoch replaces none."""
    s = service(path)
    s.begin_update("6", 1)
    s.begin_update("4", 2)
    with refuses(ValueError, 4):
        s.begin_update("3", 1)
    with refuses(ValueError, 4, 6):
        s.end_update("6")
    s.end_update("4")


def test_a_failed_publication_leaves_the_old_weights(path: Path, monkeypatch: MonkeyPatch) -> None:
    """Whatever fails, after the tensors were checked too."""
    s = service(path)
    before, weights = s.store.checksums(), s.engine.model.weights
    s.begin_update()
    s.update([("model.norm.weight", torch.zeros(64))], flush_cache=True, version=None)  # type: ignore[list-item]

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as m:
        m.setattr(type(s.part.preparation), "prepare", fail)
        with pytest.raises(MemoryError):
            s.end_update()
        with pytest.raises(MemoryError):
            s.update_from_disk(path, flush_cache=True, version=None)
    assert s.store.checksums() == before and s.engine.model.weights is weights


@pytest.mark.parametrize("width", [26, 25, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_any_width_are_computed(width: int, dtype: torch.dtype) -> None:
    """torch's grouped product wants rows of a multiple of 16 bytes; others are multiplied expert by expert."""
    torch.manual_seed(0)
    x, w, counts = torch.randn(7, width).to(dtype), torch.randn(3, 12, width).to(dtype), [2, 0, 5]
    got = plain_ops.grouped_linear(x, w, counts)
    want = torch.cat([F.linear(rows, one) for rows, one in zip(x.split(counts), w, strict=True)])
    torch.testing.assert_close(got, want)


def test_a_model_whose_experts_are_26_wide_is_served(tmp_path: Path) -> None:
    """It once ended the engine at its first request."""
    s: Service = service(save(oracle(moe_intermediate_size=26), tmp_path))
    done: list[object] = []
    s.engine.submit(spec([5, 9, 3], max_new_tokens=4), done.extend)
    while s.engine.step():
        pass
    assert len(done) == 1


@pytest.mark.slow
def test_a_million_lines_of_a_kind_are_a_hundred() -> None:
    sparing, written = LogLimit(), 0
    for i in range(100_000):
        record = logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, "bad request %d", (i,), None)
        written += sparing.filter(record)
    assert written == 20 + 4 and record.getMessage().endswith("(100,000 times so far)")
    for i in range(100_000):
        sparing.filter(logging.LogRecord("x", logging.WARNING, "", 0, f"{i} " + "a" * 1000, (), None))
    assert len(sparing._seen) <= 1001


def reply(ids: list[int]) -> GenerateReply:
    n = len(ids)
    return GenerateReply(
        rid="a",
        output_ids=np.array(ids, np.int64),
        logprobs=np.zeros(n, np.float32),
        finish=Finish.LENGTH,
        prompt_tokens=2,
        weight_version="1",
        weight_versions=(WireSpan("1", 0, n),),
    )


@pytest.mark.parametrize(
    ("ids", "facts"),
    [
        ([1, 2, 3, 4], (1, 4, 3)),
        ([1, 96], (96, 0, 95)),
        ([-1], (-1, 1, 0)),
    ],
)
def test_a_reply_of_foreign_tokens_is_refused(ids: list[int], facts: Facts) -> None:
    request = GenerateRequest(input_ids=((1, 2),), sampling=(SamplingParams(max_new_tokens=3),), n=2)
    check_tokens([reply([1, 95, 0]), reply([])], request, 96)
    with refuses(ValueError, *facts):
        check_tokens([reply([1]), reply(ids)], request, 96)


def test_the_bounds_leave_room_for_what_a_run_sends() -> None:
    """A bucket in base64, a largest request in JSON, and the reply to it."""
    mib = 1 << 20
    bucket = 256 * mib
    assert weights_bytes(bucket_bytes=bucket, largest=40 * mib, total=10_000 * mib) > bucket * 4 / 3 + 40 * mib
    assert weights_bytes(bucket_bytes=bucket, largest=mib, total=2 * mib) < 32 * mib
    ids, k = tuple(range(150_000, 150_000 + 1000)), 61 * 8
    rids = tuple("x" * 32 + str(i) for i in range(16))
    request = GenerateRequest(input_ids=(ids,) * 16, sampling=(SamplingParams(max_new_tokens=24),) * 16, rid=rids)
    assert len(json.dumps(request.to_json())) < request_bytes(prompts=16, context_length=1024)
    one = reply([150_000] * 24).to_json()
    one["meta_info"]["routed_experts"] = "A" * (1024 * k * 4 * 4 // 3)
    assert len(json.dumps([one] * 16)) < reply_bytes(request, k)
    assert affordable_connections(64) == 64 and RequestLimits(request_bytes=1, weights_bytes=9).largest == 9
