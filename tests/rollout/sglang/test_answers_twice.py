"""A server that answers twice, or with what was asked elsewhere, is named; no answer is made another prompt's sample.

Retrying proxies, caches and balancers do this, and the samples would look like any others: prompts of one length give
answers whose counts all agree. Not covered: a server that gives another sample's tokens under the right id.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams
from rollout.sglang.client import SGLangClient
from rollout.sglang.http_replies import RolloutError
from tests.support.fakes import ROUTING, FakeServer, make_prompt
from tests.support.refusals import Facts, refuses

PARAMS = SamplingParams(max_new_tokens=8, sampling_seed=3)
PROMPTS = [make_prompt(f"p{i}", tokens=[i + 1, 9]) for i in range(3)]  # of one length: every count would agree
Answers = list[dict[str, Any]]


class Changed(FakeServer):
    """Its answers to /generate, after `change` has seen them."""

    def __init__(self, change: Callable[[Answers], Answers]) -> None:
        super().__init__()
        self.change = change

    def _generate(self, body: Any) -> tuple[int, Any]:
        status, out = super()._generate(body)
        return status, self.change(out if isinstance(out, list) else [out])


def with_client(url: str, call: Callable[[SGLangClient], Any], **options: Any) -> Any:
    async def run() -> Any:
        client = SGLangClient(url, routing=ROUTING, request_timeout_s=5.0, **options)
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(run())


def the_first_again_at_the_end(answers: Answers) -> Answers:
    return [*answers, copy.deepcopy(answers[0])]


def the_first_in_place_of_the_last(answers: Answers) -> Answers:
    return [*answers[:-1], copy.deepcopy(answers[0])]


def two_change_places(answers: Answers) -> Answers:
    return [answers[1], answers[0], *answers[2:]]


FAULTS = [
    (the_first_again_at_the_end, (7, 6)),
    (the_first_in_place_of_the_last, (5, 6, 0)),
    (two_change_places, (0, 6, 1)),
]


@pytest.mark.parametrize(("change", "facts"), FAULTS)
@pytest.mark.parametrize("samples_from", ["server", "client"])
def test_an_answer_is_of_its_own_sample_alone(change: Any, facts: Facts, samples_from: Any) -> None:
    """Six samples of three prompts, whichever side tells the samples of a prompt apart."""
    with Changed(change) as server, refuses(RolloutError, server.url, "/generate", *facts):
        with_client(server.url, lambda c: c.generate(PROMPTS, n=2, params=PARAMS), samples_from=samples_from)


def test_an_answer_to_an_earlier_request_is_named() -> None:
    """As of a cache that looks at addresses alone. The prompts differ and the answers would fit."""
    seen: list[Answers] = []

    def the_first_ever(answers: Answers) -> Answers:
        seen.append(answers)
        return seen[0]

    async def twice(client: SGLangClient) -> None:
        await client.generate(PROMPTS[:1], n=2, params=PARAMS)
        facts = ("/generate", "reply 0 of 2 has id", "this request did not send")
        with refuses(RolloutError, *facts, unrecorded="the id of a request is random"):
            await client.generate(PROMPTS[1:2], n=2, params=PARAMS)

    with Changed(the_first_ever) as server:
        with_client(server.url, twice)


def test_a_sample_that_goes_on_is_answered_with_its_own_tokens() -> None:
    """The second turn is not the first one's answer once more."""
    seen: list[Answers] = []

    def the_first_ever(answers: Answers) -> Answers:
        seen.append(answers)
        return seen[0]

    async def two_turns(client: SGLangClient) -> None:
        (group,) = await client.generate(PROMPTS[:1], n=1, params=PARAMS)
        with refuses(RolloutError, "/generate", 0, 1):
            await client.continue_sample(group.samples[0], params=PARAMS)

    with Changed(the_first_ever) as server:
        with_client(server.url, two_turns)


def responses(groups: Sequence[SampleGroup]) -> list[list[int]]:
    def response(sample: Sample) -> list[int]:
        return [int(t) for t in sample.token_ids[sample.loss_mask]]

    return [response(s) for g in groups for s in g.samples]


def test_a_second_answer_on_a_kept_connection_reaches_nobody() -> None:
    """Head and body are there twice when the client reads the first: the next request must not be given the second."""

    class Twice(FakeServer):
        """`_serve`'s two writes, held back and sent two times in one."""

        def _serve(self, h: Any, body: Any) -> None:
            out, sent = h.wfile, bytearray()
            h.wfile = type("Held", (), {"write": lambda _, data: sent.extend(data), "flush": lambda _: None})()
            super()._serve(h, body)
            h.wfile = out
            out.write(bytes(sent) * 2)

    async def each_alone(client: SGLangClient, prompts: Sequence[Prompt]) -> list[list[int]]:
        out = []
        for prompt in prompts:
            out += responses(await client.generate([prompt], n=2, params=PARAMS))
        return out

    with FakeServer() as server:
        right = with_client(server.url, lambda c: each_alone(c, PROMPTS))
    assert len(set(map(json.dumps, right))) == len(right)
    with Twice() as server:
        try:
            assert with_client(server.url, lambda c: each_alone(c, PROMPTS)) == right
        except RolloutError as e:
            assert "which this request did not send" in str(e)
