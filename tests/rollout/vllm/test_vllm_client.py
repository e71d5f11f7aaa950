"""One vLLM client against a server on loopback that gives recorded answers.

Not covered: what the tokens are (tests/vllm_cpu); time limits, sizes and dead servers, which the clients of all engines
have in common (tests/rollout/sglang/test_client.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from miles_like.types import Finish, Prompt, Sample, SamplingParams, VersionSpan
from rollout.seeds import seed_of
from rollout.sglang.http_replies import RolloutError
from rollout.sglang.samples import RoutingShape
from rollout.vllm.client import VLLMClient
from tests.support.fake_vllm import GENERATE, FakeVLLM
from tests.support.refusals import refuses

T = TypeVar("T")
PROMPTS = [Prompt(id=name, token_ids=(5, 6, 7, 8, 9, 10, 11), answer="") for name in "abc"]
PARAMS = SamplingParams(max_new_tokens=8, sampling_seed=3, stop_token_ids=(1,), temperature=0.7)


def ask(url: str, call: Callable[[VLLMClient], Awaitable[T]], **options: Any) -> T:
    async def run() -> T:
        client = VLLMClient(url, **({"routing": None, "request_timeout_s": 5.0, "vocabulary": 128} | options))
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(run())


def bodies(server: FakeVLLM) -> list[Any]:
    return [body for path, body in server.calls if path == GENERATE]


def test_a_reply_becomes_samples() -> None:
    with FakeVLLM() as server:
        groups = ask(server.url, lambda c: c.generate(PROMPTS, n=2, params=PARAMS), decode=lambda ids: f"{len(ids)}")
    answer = server.cases["whole"]["answer"]["choices"][0]
    assert [g.prompt for g in groups] == PROMPTS
    for i, s in enumerate(groups[1].samples):
        assert (s.name, s.finish, s.text) == (f"b/{i}", Finish.LENGTH, "8")
        assert s.token_ids.tolist() == [*PROMPTS[1].token_ids, *answer["token_ids"]]
        assert s.loss_mask.tolist() == [False] * 7 + [True] * 8
        assert s.versions == (VersionSpan(0, 0, 8),) and s.routing is None


def test_a_request_holds_one_prompt_and_one_seed_for_its_samples() -> None:
    with FakeVLLM() as server:
        ask(server.url, lambda c: c.generate(PROMPTS, n=4, params=PARAMS))
        ask(server.url, lambda c: c.generate(PROMPTS[:1], n=1, params=replace(PARAMS, sampling_seed=None)))
    params = [body["sampling_params"] for body in bodies(server)]
    assert sorted(p["seed"] for p in params[:3]) == sorted(seed_of(3, p.id) for p in PROMPTS)
    assert [p["n"] for p in params] == [4, 4, 4, 1] and params[3]["seed"] is None
    assert len({body["request_id"] for body in bodies(server)}) == 4
    assert {(p["temperature"], p["max_tokens"], *p["stop_token_ids"]) for p in params} == {(0.7, 8, 1)}


def test_a_sample_goes_on_with_a_seed_of_its_tokens() -> None:
    """vLLM begins a seed's stream again with each request: the seed of `generate` would draw the rest with the noise of
    the beginning. Equal samples go on equally, and each further request has another seed."""
    with FakeVLLM() as server:

        async def run(client: VLLMClient) -> list[Sample]:
            (group,) = await client.generate(PROMPTS[:1], n=2, params=PARAMS)
            first = [await client.continue_sample(s, (3, 4), params=PARAMS) for s in group.samples]
            again = await client.continue_sample(group.samples[0], (3, 4), params=PARAMS)
            return [*first, again, await client.continue_sample(again, params=PARAMS)]

        samples = ask(server.url, run)
    begun, one, two, same, later = (body["sampling_params"]["seed"] for body in bodies(server))
    assert one == same and len({begun, begun + 1, one, two, later}) == 5
    assert bodies(server)[1]["token_ids"] == [*samples[0].token_ids[:15].tolist(), 3, 4]
    assert samples[0].versions == (VersionSpan(0, 0, 8), VersionSpan(0, 10, 18))
    assert samples[0].loss_mask.tolist() == [False] * 7 + [True] * 8 + [False] * 2 + [True] * 8


def test_a_text_is_scored_with_one_token_that_is_not_read() -> None:
    text = torch.tensor(PROMPTS[0].token_ids)
    with FakeVLLM() as server:
        ((scores, routes),) = ask(server.url, lambda c: c.score([text]))
        (after,) = ask(server.url, lambda c: c.score_after([text], 2, top=3))
    rows = server.cases["scored"]["answer"]["prompt_logprobs"]
    want = torch.tensor([row[str(t)]["logprob"] for row, t in zip(rows[1:], text[1:].tolist(), strict=True)])
    assert torch.equal(scores, want) and routes is None
    assert torch.equal(torch.from_numpy(after.logprobs), want[2:]) and after.top is not None
    first, second = (body["sampling_params"] for body in bodies(server))
    assert (first["max_tokens"], first["temperature"], first["prompt_logprobs"]) == (1, 1.0, 0)
    assert second["prompt_logprobs"] == 3


def test_routes_that_are_not_there_are_missed() -> None:
    """As of every server on a CPU."""
    shape = RoutingShape(num_layers=3, moe_layers=(0, 1, 2), top_k=4, num_experts=16)
    with FakeVLLM() as server, refuses(RolloutError, server.url, "routed_experts", "--enable-return-routed-experts"):
        ask(server.url, lambda c: c.generate(PROMPTS[:1], n=1, params=PARAMS), routing=shape)
    assert bodies(server)[0]["sampling_params"]["routed_experts_prompt_start"] == 0


def test_control_requests_are_vllm_s() -> None:
    async def run(client: VLLMClient) -> tuple[int, Any, Any, Any]:
        await client.pause()
        await client.resume()
        await client.abort_all()
        await client.flush_cache()
        await client.set_weight_version(4)
        return (
            await client.weight_version(),
            await client.checksum(),
            await client.model_info(),
            await client.server_info(),
        )

    with FakeVLLM() as server:
        version, held, model, info = ask(server.url, run)
    assert server.calls[:5] == [
        ("/pause?mode=keep&clear_cache=true", None),
        ("/resume", None),
        ("/abort_requests", {}),
        ("/reset_prefix_cache", None),
        ("/update_weight_version", {"new_version": "4"}),
    ]
    assert (version, model.weight_version, info["version"]) == (0, "0", "0.32.0") and held.tensors


def test_refusals_name_the_server_and_what_it_lacks() -> None:
    """Without VLLM_SERVER_DEV_MODE vLLM has none of these endpoints, and without --enable-scale-out no other."""
    with FakeVLLM() as server:
        del server.answers["/pause"]
        with refuses(RolloutError, server.url, "/pause", 404, "VLLM_SERVER_DEV_MODE=1"):
            ask(server.url, lambda c: c.pause())
        server.answers["/reset_prefix_cache"] = 200, server.cases["not_reset"]["answer"]
        with refuses(RolloutError, server.url, "/reset_prefix_cache"):
            ask(server.url, lambda c: c.flush_cache())
        server.answers["/weight_info"] = 200, {"weight_version": "default"}
        with refuses(RolloutError, server.url, "default"):
            ask(server.url, lambda c: c.weight_version())
        server.samples = "no_tokens"
        with refuses(RolloutError, server.url, GENERATE):
            ask(server.url, lambda c: c.generate(PROMPTS[:1], n=1, params=PARAMS), vocabulary=None)
