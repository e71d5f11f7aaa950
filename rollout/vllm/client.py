"""One stock vLLM server as a RolloutEngine over HTTP.

A request holds one prompt and asks for its G samples, of which sample i draws from the request's seed + i. vLLM begins
the random stream of a seed with each request: a sample that is continued draws from another seed, made of its tokens,
because with the first one it would be drawn with the noise of its beginning. Its tokens are therefore not those of one
uninterrupted sample.

Letters: G samples a prompt, S tokens of a sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams
from rollout.concurrency import all_or_first_error
from rollout.seeds import seed_of
from rollout.sglang.client import ServerClient, new_ids
from rollout.sglang.http_replies import RolloutError
from rollout.sglang.samples import RoutingShape, SampleReader, empty_samples, routing_rows, version_number
from rollout.vllm.control import REMEDIES, check_reset, pause_query, served_model, weight_hashes
from rollout.vllm.wire import generate_body, sampled_replies, scored_prompt
from rollout.wire import vllm_endpoints as endpoints
from rollout.wire.control import ChecksumReply, ModelInfo, PauseMode
from rollout.wire.generate import GenerateRequest, check_tokens, reply_bytes
from rollout.wire.replies import Json, an_object, need
from rollout.wire.scores import PromptScores
from routing_replay.trace import RoutingTrace

T = TypeVar("T")


class VLLMClient(ServerClient):
    """The client of a server that `rollout.vllm_command` describes. Use it from one event loop.

    routing: None for a dense model, and for a server that returns no routes. vocabulary, decode: as those of
    SGLangClient.
    """

    remedies: ClassVar[Mapping[int, str]] = REMEDIES

    def __init__(
        self,
        url: str,
        *,
        routing: RoutingShape | None,
        vocabulary: int | None = None,
        request_timeout_s: float = 120.0,
        pause_mode: PauseMode = PauseMode.RETRACT,
        decode: Callable[[Sequence[int]], str] | None = None,
        log: Path | None = None,
    ) -> None:
        super().__init__(url, request_timeout_s=request_timeout_s, log=log)
        self._vocabulary = vocabulary
        self._pause_mode = pause_mode
        self._reader = SampleReader(routing=routing, decode=decode)

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        requests = [self._group(prompt, n, params) for prompt in prompts]
        return await all_or_first_error(requests)

    async def _group(self, prompt: Prompt, n: int, params: SamplingParams) -> SampleGroup:
        seed = params.sampling_seed
        request = self._request(
            prompt.token_ids, replace(params, sampling_seed=None if seed is None else seed_of(seed, prompt.id)), n=n
        )
        samples = await self._ask(request, empty_samples(prompt, n), [()] * n)
        return SampleGroup(prompt=prompt, samples=tuple(samples))

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        """As `RolloutEngine.continue_sample`, except that the tokens are other draws of the same distribution than
        those of an uninterrupted sample."""
        ids = (*sample.token_ids.tolist(), *environment)
        seed = params.sampling_seed
        if seed is not None:
            digest = hashlib.sha256(repr(ids).encode()).hexdigest()
            seed = seed_of(seed, f"{sample.prompt_id}\0{digest}", sample.index)
        request = self._request(ids, replace(params, sampling_seed=seed), start=routing_rows(sample))
        return (await self._ask(request, [sample], [environment]))[0]

    def _request(self, ids: Sequence[int], params: SamplingParams, *, n: int = 1, start: int = 0) -> GenerateRequest:
        return GenerateRequest(
            input_ids=(tuple(ids),),
            sampling=(params,),
            n=n,
            rid=new_ids(1),
            return_logprob=True,
            return_routed_experts=self._reader.routing is not None,
            routed_experts_start_len=start,
        )

    async def _ask(
        self, request: GenerateRequest, samples: Sequence[Sample], environment: Sequence[Sequence[int]]
    ) -> list[Sample]:
        body = await self._generated(request)
        try:
            replies = sampled_replies(body, request)
            check_tokens(replies, request, self._vocabulary)
            return self._reader.extend(samples, environment, replies)
        except ValueError as e:
            raise RolloutError(f"server {self.url} returned invalid samples: {e}") from e

    async def score(self, sequences: Sequence[Tensor]) -> list[tuple[Tensor, RoutingTrace | None]]:
        routed = self._reader.routing is not None
        scores = await self._scores(sequences, 0, routed=routed)
        try:
            return self._reader.scored(sequences, scores)
        except ValueError as e:
            raise RolloutError(f"server {self.url} returned invalid scores: {e}") from e

    async def score_after(self, sequences: Sequence[Tensor], start: int, *, top: int = 0) -> list[PromptScores]:
        return await self._scores(sequences, start, top=top)

    async def _scores(
        self, sequences: Sequence[Tensor], start: int, *, top: int = 0, routed: bool = False
    ) -> list[PromptScores]:
        return await all_or_first_error(self._scored(s, start, top, routed) for s in sequences)

    async def _scored(self, sequence: Tensor, start: int, top: int, routed: bool) -> PromptScores:
        request = GenerateRequest(
            input_ids=(tuple(sequence.tolist()),),
            sampling=(SamplingParams(max_new_tokens=1),),
            rid=new_ids(1),
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=top,
            return_routed_experts=routed,
        )
        body = await self._generated(request)
        try:
            return scored_prompt(body, request)
        except ValueError as e:
            raise RolloutError(f"server {self.url} returned invalid scores: {e}") from e

    async def _generated(self, request: GenerateRequest) -> Any:
        limit = reply_bytes(request, self._reader.routes_per_token)
        with self.occupation.generating():
            return await self._call("POST", endpoints.GENERATE, generate_body(request), limit=limit)

    async def pause(self, mode: PauseMode | None = None) -> None:
        await self._call("POST", endpoints.PAUSE + pause_query(mode or self._pause_mode))

    async def resume(self) -> None:
        await self._call("POST", endpoints.RESUME)

    async def abort_all(self) -> None:
        await self._call("POST", endpoints.ABORT, {})

    async def flush_cache(self) -> None:
        self._parsed(check_reset, await self._call("POST", endpoints.RESET_CACHE))

    async def checksum(self) -> ChecksumReply:
        """Hashes of vLLM's own fused tensors, which can be compared with its earlier ones or another server's. Raises
        RolloutError."""
        return self._parsed(weight_hashes, await self._call("POST", endpoints.CHECKER, {"action": "checksum"}))

    async def model_info(self) -> ModelInfo:
        body = await self._call("GET", endpoints.MODELS)
        return self._parsed(served_model, body, await self.weight_version())

    async def server_info(self) -> Json:
        """{"version": vLLM's}."""
        return dict(an_object(await self._call("GET", endpoints.VERSION), endpoints.VERSION))

    async def weight_version(self) -> int:
        body = await self._call("GET", endpoints.WEIGHT_INFO)
        info = self._parsed(an_object, body, endpoints.WEIGHT_INFO)
        return self._parsed(version_number, str(self._parsed(need, info, "weight_version", endpoints.WEIGHT_INFO)))

    async def set_weight_version(self, version: int) -> None:
        await self._call("POST", endpoints.UPDATE_VERSION, {"new_version": str(version)})

    def _parsed(self, parse: Callable[..., T], *args: Any) -> T:
        try:
            return parse(*args)
        except ValueError as e:
            raise RolloutError(f"server {self.url}: {e}") from None
