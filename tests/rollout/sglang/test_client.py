"""One client against a server on loopback that keeps SGLang's rules, and breaks each of them in turn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

import rollout.sglang.client
from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams, VersionSpan
from rollout.seeds import seed_of
from rollout.sglang.client import SGLangClient
from rollout.sglang.http_replies import RolloutError
from rollout.wire import endpoints
from rollout.wire.control import PauseMode
from tests.support.fakes import ROUTING, FakeServer, make_prompt
from tests.support.refusals import Facts, refuses

T = TypeVar("T")
PARAMS = SamplingParams(max_new_tokens=8, sampling_seed=3)


def ask(url: str, call: Callable[[SGLangClient], Awaitable[T]], **options: Any) -> T:
    """What `call` gives for a client of `url`, in a separate event loop."""

    async def run() -> T:
        client = SGLangClient(url, **({"routing": ROUTING, "request_timeout_s": 5.0} | options))
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(run())


def generate(url: str, prompts: list[Prompt], n: int = 2, params: SamplingParams = PARAMS, **options: Any) -> Any:
    return ask(url, lambda c: c.generate(prompts, n=n, params=params), **options)


def tokens(groups: list[SampleGroup]) -> list[list[list[int]]]:
    return [[s.token_ids.tolist() for s in g.samples] for g in groups]


PROMPTS = [make_prompt(f"p{i}", tokens=[i + 1] * (i + 1)) for i in range(5)]


def test_a_reply_becomes_samples() -> None:
    """Streams are over prompt and response; what belongs to the prompt is masked; a routing row for each fed token."""
    with FakeServer(version="7") as server:
        (group,) = generate(server.url, [make_prompt("a")], n=3, decode=lambda ids: f"{len(ids)} tokens")
    for i, s in enumerate(group.samples):
        r = 2 + i
        assert (s.index, s.prompt_id, s.finish, s.text) == (i, "a", Finish.LENGTH, f"{r} tokens")
        assert s.token_ids[:3].tolist() == [5, 6, 7] and len(s.token_ids) == 3 + r
        assert s.loss_mask.tolist() == [False] * 3 + [True] * r
        assert s.logprobs[:3].tolist() == [0, 0, 0] and bool((s.logprobs[3:] < 0).all())
        assert s.versions == (VersionSpan(7, 0, r),)
        assert s.routing is not None and s.routing.layers == (1, 2)
        assert tuple(s.routing.experts.shape) == (3 + r - 1, 2, 2) and s.routing.experts[0, 0].tolist() == [3, 15]


def test_order_and_batches() -> None:
    """Groups come in the order of the prompts however they are cut into requests; samples in theirs."""
    with FakeServer() as server:
        whole = generate(server.url, PROMPTS, prompts_per_request=16)
        cut = generate(server.url, PROMPTS, prompts_per_request=2)
        sizes = [len(body["input_ids"]) for _, body in server.calls]
    assert sizes[0] == 5 and sorted(sizes[1:]) == [1, 2, 2]
    assert [g.prompt for g in cut] == PROMPTS
    assert tokens(whole) == tokens(cut)
    assert [s.index for g in cut for s in g.samples] == [0, 1] * 5


def test_seeds_are_of_seed_and_prompt_and_stable() -> None:
    """A resumed run must sample what the first would have; the numbers are pinned, for they are part of every run."""
    assert seed_of(3, "p0") == 1609546837
    assert seed_of(3, "p0", 1) == 617988929
    seeds = [seed_of(s, p, i) for s in range(8) for p in ("a", "b", "1") for i in (None, 0, 1, 11)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**31 for s in seeds)


def test_each_prompt_has_its_seed_on_the_wire() -> None:
    """One seed a prompt and request item; without a run seed none is sent."""
    with FakeServer() as server:
        generate(server.url, PROMPTS[:2], n=4)
        generate(server.url, PROMPTS[:1], params=SamplingParams(max_new_tokens=8))
        (_, seeded), (_, unseeded) = server.calls
    assert [p["sampling_seed"] for p in seeded["sampling_params"]] == [seed_of(3, "p0"), seed_of(3, "p1")]
    assert [p["n"] for p in seeded["sampling_params"]] == [4, 4]
    assert "sampling_seed" not in unseeded["sampling_params"][0]


def test_samples_from_client_have_a_seed_each() -> None:
    """A stock server draws all `n` samples of one item from one seed; copies of the prompt are no clones."""
    with FakeServer() as server:
        groups = generate(server.url, PROMPTS[:2], n=3, samples_from="client")
        body = server.calls[0][1]
    assert body["input_ids"] == [[1]] * 3 + [[2, 2]] * 3
    assert [p["sampling_seed"] for p in body["sampling_params"]] == [
        seed_of(3, p, i) for p in ("p0", "p1") for i in range(3)
    ]
    assert [len(g.samples) for g in groups] == [3, 3]
    assert len({tuple(t) for t in tokens(groups)[0]}) == 3


def test_missing_routing_names_the_flag() -> None:
    """SGLang leaves the key out silently when the server was started without the flag."""
    with FakeServer() as server:
        server.forget = {"routed_experts"}
        with refuses(RolloutError, "--enable-return-routed-experts"):
            generate(server.url, PROMPTS)
        (group,) = generate(server.url, PROMPTS[:1], routing=None)  # a dense model has none
    assert group.samples[0].routing is None


@pytest.mark.parametrize("key", ["output_token_logprobs", "weight_versions", "prompt_tokens"])
def test_a_key_that_the_server_leaves_out_is_named(key: str) -> None:
    """The sentence names server, endpoint and key."""
    with FakeServer() as server:
        server.forget = {key}
        with refuses(RolloutError, server.url, "/generate", key):
            generate(server.url, PROMPTS)


def test_aborted_samples_come_back_as_such() -> None:
    """An abort is HTTP 200 with a partial output; it is for the caller to refuse it."""
    with FakeServer() as server:
        server.abort = True
        (group,) = generate(server.url, PROMPTS[:1])
    assert {s.finish for s in group.samples} == {Finish.ABORT}


@pytest.mark.parametrize(
    ("fault", "facts"),
    [
        ("hang", (0.3,)),
        ("reset", ()),
        ("http_400", ("HTTP", 400)),
        ("http_500", ("HTTP", 500)),
        ("html", ("JSON",)),
        ("large", ("706,880",)),
        ("gzip", ()),
    ],
)
def test_every_failure_is_one_sentence_that_names_the_server(fault: str, facts: Facts, tmp_path: Path) -> None:
    """Users see this line and nothing else. Not covered: a server that dies with half a reply written."""
    with FakeServer() as server:
        server.fault = {endpoints.GENERATE: fault}
        with refuses(RolloutError, server.url, *facts) as caught:
            generate(server.url, PROMPTS, request_timeout_s=0.3 if fault == "hang" else 5, log=tmp_path / "s.log")
    text = str(caught.value)
    assert "\n" not in text
    assert fault in ("html", "large", "gzip") or "s.log" in text


def test_the_log_of_a_server_is_named_with_its_last_error(tmp_path: Path) -> None:
    """A run has a log for each of its servers in one directory; of an earlier one at the same port too."""
    (tmp_path / "embedded_31007.log").write_text("ready\nOSError: no space left\nwaiting\n")
    (tmp_path / "embedded_31008.log").write_text("RuntimeError: another server's\n")
    with FakeServer() as server:
        port = server.url.rpartition(":")[2]
        (tmp_path / f"embedded_{port}.log").write_text("ready\nMemoryError: out of memory\nwaiting\n")
        server.fault = {endpoints.GENERATE: "reset"}
        with refuses(RolloutError, f"embedded_{port}.log", "MemoryError", unrecorded="its port differs"):
            generate(server.url, PROMPTS, request_timeout_s=5, log=tmp_path)


def test_a_server_that_is_not_there() -> None:
    """A port on which nothing listens, as after a crash."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
        with refuses(RolloutError, url, "/generate"):
            generate(url, PROMPTS)
        assert ask(url, lambda c: c.health()) is False


def test_one_failing_request_ends_the_call_at_once() -> None:
    """The requests that still run are cancelled, not waited for: the hanging one would take its hour."""

    async def run(url: str) -> None:
        client = SGLangClient(url, routing=None, prompts_per_request=1, request_timeout_s=3600)
        async with asyncio.timeout(120):
            with refuses(RolloutError, "HTTP", 500):
                await client.generate(PROMPTS, n=1, params=PARAMS)
        await asyncio.sleep(0.1)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await client.close()

    with FakeServer() as server:
        server.fault = {endpoints.GENERATE: lambda body: "http_500" if body["input_ids"] == [[1]] else "hang"}
        asyncio.run(run(server.url))


def test_control_calls() -> None:
    """Each method is one request, with SGLang's path and body."""

    async def run(c: SGLangClient) -> tuple[int, str, int, bool]:
        await c.pause()
        await c.pause(PauseMode.IN_PLACE)
        await c.set_weight_version(9)
        await c.flush_cache()
        await c.resume()
        await c.abort("r1")
        await c.abort_all()
        info = await c.model_info()
        assert (await c.server_info())["version"] == "0.5.23"
        return await c.weight_version(), info.model_path, len((await c.checksum()).ranks), await c.health()

    with FakeServer() as server:
        assert ask(server.url, run) == (9, "tiny", 1, True)
    assert server.calls[:7] == [
        ("/pause_generation", {"mode": "retract"}),
        ("/pause_generation", {"mode": "in_place"}),
        ("/update_weight_version", {"new_version": "9", "abort_all_requests": False}),
        ("/flush_cache", {}),
        ("/continue_generation", {}),
        ("/abort_request", {"rid": "r1", "abort_all": False}),
        ("/abort_request", {"rid": "", "abort_all": True}),
    ]


def test_refused_changes_and_foreign_versions_are_errors() -> None:
    """HTTP 200 with success = false is a failure all the same; "default" is the version of a server started by hand."""
    with FakeServer(version="default") as server:
        with refuses(RolloutError, "--weight-version", 0):
            ask(server.url, lambda c: c.weight_version())
        with refuses(RolloutError, "--weight-version", 0):
            generate(server.url, PROMPTS)
        with refuses(RolloutError, "/end_weight_update", "HTTP", 400):
            ask(server.url, lambda c: c._change(endpoints.END_UPDATE, {}))
        server.fault = {endpoints.BEGIN_UPDATE: "refuse"}
        with refuses(RolloutError, "/begin_weight_update"):
            ask(server.url, lambda c: c._change(endpoints.BEGIN_UPDATE, {}))


@pytest.mark.parametrize("token", [-1, 128])
def test_a_prompt_with_a_token_that_the_model_lacks_is_not_sent(token: int) -> None:
    """A stock server ends by it."""
    with FakeServer() as server:
        with refuses(RolloutError, server.url, 1, 2, token, 0, 127):
            generate(server.url, [make_prompt("a"), make_prompt("b", tokens=[5, token])], n=1, vocabulary=128)
        assert not server.calls


def test_an_idle_connection_is_given_up_before_a_server_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's limit for idle connections, at the worst moment: the next request is on its way when it closes."""
    closed: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        if second := await reader.read(1):  # b"": the client has closed it
            closed.append(second)
        writer.transport.abort()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = SGLangClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", routing=None)
        try:
            await client.server_info()
            await client.server_info()
        finally:
            await client.close()
            server.close()

    assert rollout.sglang.client.KEEPALIVE_S < 5  # uvicorn's limit, and so SGLang's
    monkeypatch.setattr(rollout.sglang.client, "KEEPALIVE_S", 600.0)
    with refuses(RolloutError, "/server_info"):  # the fault is there
        asyncio.run(run())
    assert len(closed) == 1
    monkeypatch.setattr(rollout.sglang.client, "KEEPALIVE_S", -1.0)  # over, however soon the next request comes
    asyncio.run(run())
    assert len(closed) == 1


def test_rows_that_were_not_asked_for_are_refused() -> None:
    """A server that does not know routed_experts_start_len sends all rows: appended, each would stand twice."""

    async def run(c: SGLangClient) -> Sample:
        (group,) = await c.generate([make_prompt("a")], n=1, params=PARAMS)
        return await c.continue_sample(group.samples[0], (17, 18, 19), params=PARAMS)

    with FakeServer() as server:
        sample = ask(server.url, run)
        assert sample.routing is not None and len(sample.routing) == len(sample.token_ids) - 1 == 9
        assert server.calls[-1][1]["routed_experts_start_len"] == 4
        server.ignores_start = True
        with refuses(RolloutError, "a/0", "routed_experts", 5):
            ask(server.url, run)
