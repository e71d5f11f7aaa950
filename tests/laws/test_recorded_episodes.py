"""Law: an episode that is recorded of an agent is the one that the same environment plays in this process: tokens,
log-probs, routes, weight versions and spans, of every sample of a prompt.

Why it must hold: an agent sends texts, and its samples are trained as those of an environment are. A request that began
another random stream, was encoded again or lost a row of routes would train on what was not sampled.

The embedded engine over HTTP, a random model with the tokenizer of a chat. Not covered: tool calls
(tests/rollout/recorder/test_recorder.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from miles_like.types import Observation, Prompt, Sample, SamplingParams
from rollout.config import RolloutConfig
from rollout.episodes.runner import make_episode_runner
from rollout.sglang.client import SGLangClient
from rollout.sglang.samples import RoutingShape
from rollout.tool_config import AgentConfig
from tests.support.chat_templates import tokenizer
from tests.support.embedded_fixtures import served, service
from tests.support.tiny_models import felt_tensors, tiny, write_checkpoint

HERE = Path(__file__)
SHAPE = RoutingShape(num_layers=3, moe_layers=(1, 2), top_k=4, num_experts=16)
ASKED, MORE = {"role": "user", "content": "1+1="}, {"role": "user", "content": "go on"}
COMMON: dict[str, Any] = {"max_new_tokens": 12, "max_episode_tokens": 200, "renderer": "template"}
PLAYED = RolloutConfig(environment=f"{HERE}:Patient", max_turns=3, **COMMON)
RECORDED = RolloutConfig(agent=AgentConfig(function=f"{HERE}:patient"), **COMMON)
# a quarter of the vocabulary are stop tokens, so that most turns of random weights end
PARAMS = SamplingParams(max_new_tokens=12, sampling_seed=5, stop_token_ids=tuple(range(0, 240, 4)))
G = 6


class Patient:
    """Asks for more, twice."""

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        self.turns = 0

    def __call__(self, sample: Sample, turn: str) -> Observation:
        self.turns += 1
        return Observation(ends=True) if self.turns == 3 else Observation(messages=(MORE,))


async def patient(prompt: Prompt, *, base_url: str, api_key: str, seed: int) -> None:
    messages: list[Any] = [ASKED]
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}, timeout=60) as http:
        for _ in range(3):
            body = {"model": "m", "messages": messages}
            reply = (await http.post(f"{base_url}/v1/chat/completions", json=body)).json()
            choice = reply["choices"][0]
            if choice["finish_reason"] == "length":
                return
            messages += [choice["message"], MORE]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Sample]]]:
    where, words = tmp_path_factory.mktemp("recorded"), tokenizer("tools")
    hf = tiny(torch_dtype="float32", vocab_size=-(-len(words) // 16) * 16)
    write_checkpoint(where, hf, felt_tensors(hf))
    words.save_pretrained(where)
    engine = service(where, context_length=512, max_total_tokens=8192)
    engine.engine.set_version("3")
    ids = words.apply_chat_template([ASKED], tokenize=True, add_generation_prompt=True, return_dict=False)
    prompt = Prompt(id="p", token_ids=tuple(ids), answer="", messages=(ASKED,))

    async def play(url: str) -> dict[str, list[Sample]]:
        client = SGLangClient(url, routing=SHAPE, decode=lambda ids: str(words.decode(ids)))
        out = {}
        for name, config in (("played", PLAYED), ("recorded", RECORDED)):
            runner = make_episode_runner(config, words, timed=False).wrap(client)
            (group,) = await runner.generate([prompt], n=G, params=PARAMS)
            out[name] = list(group.samples)
            await client.flush_cache()
        await runner.close()
        return out

    with served(engine) as url:
        yield asyncio.run(play(url))


def test_the_episodes_have_turns(found: dict[str, list[Sample]]) -> None:
    assert sorted({s.turns for s in found["played"]})[-1] == 3 and len(found["played"]) == G


def test_a_recorded_episode_is_the_played_one(found: dict[str, list[Sample]]) -> None:
    for a, b in zip(found["played"], found["recorded"], strict=True):
        assert (a.name, a.finish, a.versions) == (b.name, b.finish, b.versions)
        assert torch.equal(a.token_ids, b.token_ids) and torch.equal(a.loss_mask, b.loss_mask)
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
        assert a.routing is not None and b.routing is not None
        assert torch.equal(a.routing.experts, b.routing.experts)
        # what ends an episode in this process has no tokens
        assert [replace(s, seconds=0.0) for s in a.spans if s.end > s.start] == list(b.spans)
