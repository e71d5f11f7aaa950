"""Law: a vLLM server that loaded a published directory computes with the published weights, and with nothing of the old
ones but what the pause mode leaves: tokens, and for running samples their keys and values.

vLLM 0.32 as it is released, on CPU, with a dense Qwen3 in fp32 (`make test-vllm`); transformers is the reference. Not
covered: GPUs; experts, which vLLM loads wrongly here (test_vllm_generation.py); quantized weights.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch

from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams
from rollout.publish.directory.vllm_reload import reload_weights
from rollout.publish.servers import ServerSet
from rollout.sglang.http_replies import RolloutError
from rollout.vllm.client import VLLMClient
from rollout.wire.control import PauseMode
from tests.support.refusals import refuses
from tests.vllm_cpu.checked import publish_checked, publisher
from tests.vllm_cpu.conftest import Served
from tests.vllm_cpu.served import Reference, stream

pytestmark = pytest.mark.slow
T = TypeVar("T")
CLOSE = 1e-4  # nats; measured 3e-6
FAR = 0.1
G = torch.Generator().manual_seed(0)
LONG = Prompt(id="long", token_ids=tuple(torch.randint(2, 128, (300,), generator=G).tolist()), answer="")  # 2 blocks
SHORT = [
    Prompt(id=f"p{i}", token_ids=tuple(torch.randint(2, 128, (9,), generator=G).tolist()), answer="") for i in range(4)
]
PARAMS = SamplingParams(max_new_tokens=24, sampling_seed=7)
NUMBERS = itertools.count(1)  # of versions: an earlier one than a server has is refused


def ask(served: Served, call: Callable[[VLLMClient], Awaitable[T]]) -> T:
    async def run() -> T:
        client = VLLMClient(served.url, routing=None, vocabulary=128, request_timeout_s=300)
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(run())


def apart(reference: Reference, sample: Sample) -> torch.Tensor:
    """[R] absolute differences of the sample's log-probs from the model's."""
    return (sample.logprobs - reference.logprobs(sample.token_ids)).abs()[sample.loss_mask]


def sampled(served: Served, prompts: list[Prompt]) -> list[SampleGroup]:
    return list(ask(served, lambda c: c.generate(prompts, n=2, params=PARAMS)))


def tokens(groups: list[SampleGroup]) -> list[list[int]]:
    return [s.token_ids.tolist() for g in groups for s in g.samples]


def test_new_weights_serve_new_requests_and_old_ones_come_back_bit_for_bit(dense: Served, tmp_path: Path) -> None:
    """Also where the prompt's keys and values were cached under the old weights."""
    old, new = dense.references
    pub, prompts = publisher(dense, tmp_path), [*SHORT, LONG]
    pub.publish(stream(dense.first), version=next(NUMBERS))
    before = sampled(dense, prompts)
    assert max(float(apart(old, s).max()) for g in before for s in g.samples) < CLOSE
    second, third = next(NUMBERS), next(NUMBERS)
    report = pub.publish(stream(dense.second), version=second)
    assert report.version == second and report.bytes == sum(t.nbytes for t in dense.second.values())
    assert 0 < report.pause_seconds <= report.seconds and report.checksums
    after = sampled(dense, prompts)
    for group in after:
        for s in group.samples:
            assert float(apart(new, s).max()) < CLOSE < FAR < float(apart(old, s).max())
            assert [(v.version, v.start, v.end) for v in s.versions] == [(second, 0, s.response_len)]
    again = pub.publish(stream(dense.first), version=third)
    assert [p.name for p in tmp_path.iterdir()] == [f"version_{third}"] and again.checksums != report.checksums
    back = sampled(dense, prompts)
    assert tokens(back) == tokens(before)
    for a, b in zip(back, before, strict=True):
        assert all(torch.equal(x.logprobs, y.logprobs) for x, y in zip(a.samples, b.samples, strict=True))


@pytest.mark.parametrize("pause_mode", ["retract", "abort"])
def test_a_sample_that_runs_over_a_publication_knows_which_tokens_are_of_which_weights(
    dense: Served, tmp_path: Path, pause_mode: str
) -> None:
    old, new = dense.references
    before, after = next(NUMBERS), next(NUMBERS)
    params = SamplingParams(max_new_tokens=700, sampling_seed=5)  # longer than the directory takes

    async def run(client: VLLMClient) -> Sample:
        asked = asyncio.create_task(client.generate(SHORT[:1], n=1, params=params))
        await dense.sampled(12)
        await asyncio.to_thread(publisher(dense, tmp_path, pause_mode).publish, stream(dense.second), version=after)
        (group,) = await asked
        (sample,) = group.samples
        if sample.finish is Finish.ABORT:
            sample = await client.continue_sample(sample, params=PARAMS)
        return sample

    publisher(dense, tmp_path / "first").publish(stream(dense.first), version=before)
    sample = ask(dense, run)
    first, second = sample.versions
    assert (first.version, second.version, first.end) == (before, after, second.start) and 5 < first.end < 700
    assert float(apart(old, sample)[: first.end].max()) < CLOSE
    assert float(apart(new, sample)[first.end :].max()) < CLOSE, "keys and values are computed again"
    assert float(apart(new, sample)[: first.end].max()) > FAR


def test_a_tensor_that_is_not_there_is_found_by_the_scored_text(dense: Served, tmp_path: Path) -> None:
    """vLLM answers 200 and keeps the old one. Then all tensors arrive."""
    new = dense.references[1]
    publisher(dense, tmp_path).publish(stream(dense.first), version=next(NUMBERS))
    lacking = {n: t for n, t in dense.second.items() if not n.endswith("layers.1.mlp.down_proj.weight")}
    number = next(NUMBERS)
    with refuses(RuntimeError, f"version {number}", dense.url, unrecorded="ports and gaps differ"):
        publish_checked(dense, tmp_path, lacking, new, number)
    assert publish_checked(dense, tmp_path, dense.second, new, next(NUMBERS))[0] < CLOSE


def test_a_file_that_ends_early_is_named_and_the_next_directory_serves(dense: Served, tmp_path: Path) -> None:
    """The server stays paused meanwhile, so that no sample comes from part of the weights."""
    home = tmp_path / "short"
    pub = publisher(dense, home)
    number = next(NUMBERS)
    pub.publish(stream(dense.second), version=number)
    (file,) = (home / f"version_{number}").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    servers = ServerSet([dense.url], 300)
    with refuses(RolloutError, dense.url, "/collective_rpc", 500, unrecorded="ports differ"):
        reload_weights(
            servers, file.parent, next(NUMBERS), mode=PauseMode.RETRACT, verify=True, reached=lambda stage: None
        )
    servers.close()
    assert httpx.get(dense.url + "/is_paused", trust_env=False).json() == {"is_paused": True}
    assert publish_checked(dense, tmp_path, dense.first, dense.references[0], next(NUMBERS))[0] < CLOSE


def test_the_scored_text_passes_a_publication_that_arrived(dense: Served, tmp_path: Path) -> None:
    """Also a second one of other weights; that it refuses weights that did not, test_vllm_generation.py shows."""
    for tensors, model in zip((dense.second, dense.first), dense.references[::-1], strict=True):
        gap, printed = publish_checked(dense, tmp_path, tensors, model, next(NUMBERS))
        assert gap < CLOSE and not printed


def test_hashes_change_with_the_weights_and_with_nothing_else(dense: Served, tmp_path: Path) -> None:
    pub = publisher(dense, tmp_path)
    a = pub.publish(stream(dense.first), version=next(NUMBERS)).checksums
    sampled(dense, SHORT)
    held: Any = ask(dense, lambda c: c.checksum())
    assert held.per_rank == a
    assert pub.publish(stream(dense.second), version=next(NUMBERS)).checksums != a
