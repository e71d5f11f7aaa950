"""Law: stock vLLM is a rollout engine as this project means it: log-probabilities of what the temperature says, samples
that repeat by their seeds, keep their tokens when they are aborted and go on afterwards, and scores of a given text.
What it does wrong without a word is refused: experts that it loads again.

vLLM 0.32 as it is released, on CPU, with a Qwen3-MoE in fp32 (`make test-vllm`); transformers is the reference. Not
covered: GPUs, and so expert routes, which vLLM returns there only; tensor parallelism; latent attention.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from miles_like.types import Finish, Prompt, Sample, SamplingParams
from rollout.sglang.http_replies import RolloutError
from rollout.sglang.phases import VLLM, FollowedLog
from rollout.vllm.client import VLLMClient
from rollout.wire.control import PauseMode
from tests.support.refusals import refuses
from tests.vllm_cpu.checked import publish_checked
from tests.vllm_cpu.conftest import Served
from tests.vllm_cpu.served import Reference

pytestmark = pytest.mark.slow
T = TypeVar("T")
CLOSE = 1e-4  # nats; measured 3e-6
PARAMS = SamplingParams(max_new_tokens=24, sampling_seed=7)
PROMPTS = [
    Prompt(
        id=f"p{i}",
        token_ids=tuple(torch.randint(2, 128, (5 + 7 * i,), generator=torch.Generator().manual_seed(i)).tolist()),
        answer="",
    )
    for i in range(6)
]


def ask(served: Served, call: Callable[[VLLMClient], Awaitable[T]], **options: Any) -> T:
    async def run() -> T:
        client = VLLMClient(served.url, routing=None, vocabulary=128, request_timeout_s=300, **options)
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(run())


def off(reference: Reference, sample: Sample, temperature: float = 1.0) -> float:
    """The largest difference of the sample's log-probs from the model's."""
    apart = (sample.logprobs - reference.logprobs(sample.token_ids, temperature)).abs()
    return float(apart[sample.loss_mask].max())


def test_its_log_tells_the_phases_of_its_start(moe: Served, tmp_path: Path) -> None:
    """Line by line. Without graphs and compilation those phases are left out."""
    followed, seen = FollowedLog(tmp_path / "log", VLLM), ["starting"]
    for line in moe.log.read_text().splitlines(keepends=True):
        with (tmp_path / "log").open("a") as f:
            f.write(line)
        if (words := followed.phase().words) != seen[-1]:
            seen.append(words)
    assert seen == ["starting", "connecting its ranks", "loading weights", "allocating its cache", "warming up"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_temperature(moe: Served, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=24, sampling_seed=7, temperature=temperature)
    groups = ask(moe, lambda c: c.generate(PROMPTS, n=3, params=params))
    reference = moe.references[0]
    samples = [s for g in groups for s in g.samples]
    assert max(off(reference, s, temperature) for s in samples) < CLOSE
    assert max(off(reference, s, 1.0 if temperature != 1 else 0.7) for s in samples) > 0.1, "the test can tell"
    assert [s.name for s in samples] == [f"{p.id}/{i}" for p in PROMPTS for i in range(3)]
    assert all(v.version == 0 for s in samples for v in s.versions), "the version that the launch gave"


def test_a_seed_repeats_its_samples_alone_and_beside_others(moe: Served) -> None:
    together = ask(moe, lambda c: c.generate(PROMPTS, n=2, params=PARAMS))
    alone = [ask(moe, lambda c, p=p: c.generate([p], n=2, params=PARAMS))[0] for p in PROMPTS]
    for a, b in zip(together, alone, strict=True):
        assert [s.token_ids.tolist() for s in a.samples] == [s.token_ids.tolist() for s in b.samples]
        assert a.samples[0].token_ids.tolist() != a.samples[1].token_ids.tolist()


def test_a_sample_goes_on_with_other_noise_than_it_began_with(moe: Served) -> None:
    """A seed's stream begins again with each request: a model of equal logits at every position would repeat the
    beginning. Here one prompt token is repeated, so that a request with the same seed draws nearly the same tokens."""

    async def run(client: VLLMClient) -> tuple[Sample, Sample]:
        (group,) = await client.generate(PROMPTS[:1], n=1, params=PARAMS)
        first = group.samples[0]
        return first, await client.continue_sample(first, (5, 6), params=PARAMS)

    first, second = ask(moe, run)
    n, m = len(first.token_ids), len(second.token_ids)
    assert second.token_ids[:n].tolist() == first.token_ids.tolist() and second.token_ids[n : n + 2].tolist() == [5, 6]
    assert second.loss_mask[n:].tolist() == [False, False] + [True] * (m - n - 2)
    assert off(moe.references[0], second) < CLOSE
    assert second.token_ids[n + 2 :].tolist() != first.token_ids[len(PROMPTS[0].token_ids) :].tolist()


def test_aborted_samples_keep_their_tokens_and_go_on(moe: Served) -> None:
    params = SamplingParams(max_new_tokens=700, sampling_seed=3)

    async def run(client: VLLMClient) -> tuple[list[Sample], list[Sample]]:
        asked = asyncio.create_task(client.generate(PROMPTS[:3], n=4, params=params))
        await moe.sampled(24)
        await client.abort_all()
        cut = [s for g in await asked for s in g.samples]
        short = SamplingParams(max_new_tokens=8, sampling_seed=3)
        return cut, [await client.continue_sample(s, params=short) for s in cut]

    cut, longer = ask(moe, run)
    assert len(cut) == 12 and {s.finish for s in cut} == {Finish.ABORT}
    assert any(s.response_len for s in cut)
    for before, after in zip(cut, longer, strict=True):
        assert after.token_ids[: len(before.token_ids)].tolist() == before.token_ids.tolist()
        assert 0 < after.response_len - before.response_len <= 8 and off(moe.references[0], after) < CLOSE


@pytest.mark.parametrize("mode", list(PauseMode))
def test_a_paused_server_answers_after_it_is_resumed(moe: Served, mode: PauseMode) -> None:
    """Running samples end with an abort, or go on; a request that comes meanwhile waits."""
    params = SamplingParams(max_new_tokens=60, sampling_seed=5)

    async def run(client: VLLMClient) -> tuple[Any, bool, Any]:
        asked = asyncio.create_task(client.generate(PROMPTS[:2], n=1, params=params))
        await moe.sampled(8)
        await client.pause()
        later = asyncio.create_task(client.generate(PROMPTS[2:3], n=1, params=PARAMS))
        await asyncio.sleep(0.5)
        waited = not later.done()
        await client.resume()
        return await asked, waited, await later

    running, waited, (later,) = ask(moe, run, pause_mode=mode)
    assert waited and later.samples[0].finish is not Finish.ABORT
    for group in running:
        (sample,) = group.samples
        assert (sample.finish is Finish.ABORT) == (mode is PauseMode.ABORT)
        assert not sample.response_len or off(moe.references[0], sample) < CLOSE


def test_a_text_is_scored_as_the_model_scores_it(moe: Served) -> None:
    texts = [torch.tensor(p.token_ids) for p in PROMPTS]
    scores = ask(moe, lambda c: c.score(texts))
    (after,) = ask(moe, lambda c: c.score_after([texts[-1]], 9, top=5))
    reference = moe.references[0]
    for text, (found, routes) in zip(texts, scores, strict=True):
        torch.testing.assert_close(found, reference.logprobs(text)[1:], atol=CLOSE, rtol=0)
        assert routes is None
    torch.testing.assert_close(torch.from_numpy(after.logprobs), scores[-1][0][9:], atol=CLOSE, rtol=0)
    with torch.no_grad():
        best = reference.model(texts[-1][None]).logits[0, 9:-1].float().log_softmax(-1).topk(5)
    torch.testing.assert_close(torch.from_numpy(after.top.logprobs), best.values, atol=CLOSE, rtol=0)
    assert torch.equal(torch.from_numpy(after.top.ids), best.indices)


def test_what_it_lacks_is_refused_by_a_sentence(moe: Served) -> None:
    """A prompt that leaves no room, and routes, which need a GPU."""
    long = Prompt(id="long", token_ids=tuple([5] * 1020), answer="")
    with refuses(RolloutError, moe.url, unrecorded="ports differ"):
        ask(moe, lambda c: c.generate([long], n=1, params=PARAMS))


def test_experts_that_it_loads_again_are_refused_by_the_scored_text(moe: Served, tmp_path: Path) -> None:
    """vLLM answers 200 to each request of the publication. The last test: the server has wrong weights afterwards."""
    with refuses(RuntimeError, "version 1", moe.url, unrecorded="ports and gaps differ"):
        publish_checked(moe, tmp_path, moe.first, moe.references[0], 1)
