"""One server as a RolloutEngine over HTTP: what clients of every engine share, and that of SGLang and the embedded one.

Letters: G samples a prompt.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import httpx
import orjson
import torch
from torch import Tensor

from miles_like import spans
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams
from rollout.concurrency import all_or_first_error
from rollout.seeds import seed_of
from rollout.server_key import ServerKey
from rollout.server_url import tls
from rollout.sglang.http_replies import (
    PLAIN,
    REMEDIES,
    REPLY_BYTES,
    Received,
    RolloutError,
    check_plain,
    check_size,
    failure,
    read_json,
)
from rollout.sglang.layer_states import StockStates
from rollout.sglang.occupation import Occupation
from rollout.sglang.payloads import read_generated, uncollected
from rollout.sglang.samples import RoutingShape, SampleReader, empty_samples, routing_rows, version_number
from rollout.sglang.transport import LargeReplies
from rollout.wire import endpoints
from rollout.wire.bodies import MemoryTag
from rollout.wire.control import (
    AbortRequest,
    ChecksumReply,
    ChecksumRequest,
    ModelInfo,
    Outcome,
    PauseMode,
    PauseRequest,
    ReleaseMemory,
    ResumeMemory,
    UpdateVersion,
)
from rollout.wire.generate import (
    GenerateRequest,
    check_ids,
    check_prompts,
    check_tokens,
    replies_from_json,
    reply_bytes,
)
from rollout.wire.layer_states import states_bytes, states_from_json
from rollout.wire.replies import Json
from rollout.wire.scores import PromptScores, prompt_scores
from routing_replay.trace import RoutingTrace

_JSON = {"content-type": "application/json"}
# uvicorn, which SGLang uses too, closes a connection that was idle for 5 s, and httpx by default drops it after the
# same 5 s: a request sent at that moment fails. Trainer steps of 5 s are common.
KEEPALIVE_S = 2.0
_FLUSH_S = 5.0


def new_ids(count: int) -> tuple[str, ...]:
    """Unique ids for the prompts of a request, so that a reply to another request is detected."""
    return tuple(uuid.uuid4().hex for _ in range(count))


class ServerClient(ABC):
    """A RolloutEngine whose requests have limits of time and size, and errors that name the server. Use it from one
    event loop.

    log: of the server, or its folder, if this run started it. key: the server's key; None if it requires none.
    occupation: the state of the server's memory, which all clients of one server in this process share; None: no other
    client of it releases memory.
    """

    remedies: ClassVar[Mapping[int, str]] = REMEDIES

    def __init__(
        self,
        url: str,
        *,
        request_timeout_s: float,
        log: Path | None = None,
        key: ServerKey | None = None,
        occupation: Occupation | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.occupation = Occupation(self.url) if occupation is None else occupation
        self._timeout_s = request_timeout_s
        self._log = log
        self._key = key
        timeout = httpx.Timeout(request_timeout_s, connect=min(10.0, request_timeout_s))
        transport = LargeReplies(tls=tls(self.url), keepalive_s=KEEPALIVE_S)
        self._http = httpx.AsyncClient(base_url=self.url, timeout=timeout, trust_env=False, transport=transport)

    @abstractmethod
    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """`n` samples of each prompt, in order. Raises RolloutError, and then cancels the requests still running."""

    @abstractmethod
    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample: ...

    @abstractmethod
    async def score(self, sequences: Sequence[Tensor]) -> list[tuple[Tensor, RoutingTrace | None]]:
        """For each sequence [S] of tokens: log p of tokens 1..S-1 as [S-1] fp32, under the current weights and at
        temperature 1, and the routes [S-1, L, K]. Keeps no sample. Raises RolloutError."""

    @abstractmethod
    async def score_after(self, sequences: Sequence[Tensor], start: int, *, top: int = 0) -> list[PromptScores]:
        """For each sequence [S] of tokens: log p of tokens start+1..S-1 under the current weights and at temperature 1,
        and of the `top` likeliest tokens at each of these positions. Keeps no sample. Raises RolloutError."""

    @abstractmethod
    async def pause(self, mode: PauseMode | None = None) -> None: ...

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def abort_all(self) -> None: ...

    @abstractmethod
    async def flush_cache(self) -> None:
        """Clear the cache of an idle server. Raises RolloutError while requests are running or paused in place."""

    @abstractmethod
    async def checksum(self) -> ChecksumReply:
        """Hashes of the weights. Raises RuntimeError, without a request, while their memory is released."""

    @abstractmethod
    async def model_info(self) -> ModelInfo: ...

    @abstractmethod
    async def server_info(self) -> Json:
        """The server's configuration, under its own key names."""

    @abstractmethod
    async def weight_version(self) -> int: ...

    @abstractmethod
    async def set_weight_version(self, version: int) -> None: ...

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(
        self,
        method: str,
        endpoint: str,
        body: Json | None = None,
        *,
        limit: int = REPLY_BYTES,
        loads: Callable[[bytes | memoryview], Any] = orjson.loads,
    ) -> Any:
        response = await self._send(method, endpoint, body, limit)
        return read_json(response, url=self.url, endpoint=endpoint, log=self._log, remedies=self.remedies, loads=loads)

    async def _send(self, method: str, endpoint: str, body: Json | None = None, limit: int = REPLY_BYTES) -> Received:
        try:
            # httpx limits the time of each read, not of all: a very slow reply would never time out.
            async with asyncio.timeout(self._timeout_s):
                content = None if body is None else orjson.dumps(body)
                headers = _JSON if self._key is None else _JSON | self._key.headers(endpoint)
                response = await self._read(method, endpoint, content, headers | PLAIN, limit)
        except TimeoutError:
            error = httpx.ReadTimeout("too slow")
            raise failure(error, url=self.url, endpoint=endpoint, timeout_s=self._timeout_s, log=self._log) from None
        except httpx.HTTPError as e:
            raise failure(e, url=self.url, endpoint=endpoint, timeout_s=self._timeout_s, log=self._log) from e
        if response.status_code >= 400:
            read_json(response, url=self.url, endpoint=endpoint, log=self._log, remedies=self.remedies)
        return response

    async def _read(
        self, method: str, endpoint: str, content: bytes | None, headers: Mapping[str, str], limit: int
    ) -> Received:
        """The complete reply. Raises RolloutError for a compressed one, or for more than `limit` bytes."""
        parts, size = list[bytes](), 0
        async with self._http.stream(method, endpoint, content=content, headers=headers) as response:
            check_plain(response, url=self.url, endpoint=endpoint)
            # before there is memory for it
            check_size(int(response.headers.get("content-length", 0)), limit, url=self.url, endpoint=endpoint)
            async for part in response.aiter_raw():
                parts.append(part)
                size += len(part)
                check_size(size, limit, url=self.url, endpoint=endpoint)
        return Received(response.status_code, parts[0] if len(parts) == 1 else b"".join(parts))


class SGLangClient(ServerClient):
    """The client of stock SGLang and of the embedded engine.

    samples_from: "server" sends a prompt once with `n`: one prefill for its G samples, and the embedded engine uses a
    separate random stream for each. "client" sends it G times with different seeds: a stock SGLang server draws all `n`
    samples of a request from one seed, so they would be equal, and it does not keep the request's ids for them.
    decode: token ids -> text, for servers that run without a tokenizer; replaces the text that the server returns.
    vocabulary: the model's vocabulary size, which every id of a prompt and of an answer must be below; None: not
    checked.
    """

    def __init__(
        self,
        url: str,
        *,
        routing: RoutingShape | None,
        vocabulary: int | None = None,
        prompts_per_request: int = 16,
        request_timeout_s: float = 120.0,
        pause_mode: PauseMode = PauseMode.RETRACT,
        samples_from: Literal["server", "client"] = "server",
        decode: Callable[[Sequence[int]], str] | None = None,
        log: Path | None = None,
        key: ServerKey | None = None,
        occupation: Occupation | None = None,
    ) -> None:
        super().__init__(url, request_timeout_s=request_timeout_s, log=log, key=key, occupation=occupation)
        self._vocabulary = vocabulary
        self._prompts_per_request = prompts_per_request
        self._pause_mode = pause_mode
        self._samples_from = samples_from
        self._reader = SampleReader(routing=routing, decode=decode)

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        step = self._prompts_per_request
        batches = [prompts[i : i + step] for i in range(0, len(prompts), step)]
        done = await all_or_first_error(self._generate_batch(b, n, params) for b in batches)
        return [group for groups in done for group in groups]

    async def _generate_batch(self, prompts: Sequence[Prompt], n: int, params: SamplingParams) -> list[SampleGroup]:
        copies = n if self._samples_from == "client" else 1
        request = GenerateRequest(
            input_ids=tuple(p.token_ids for p in prompts for _ in range(copies)),
            sampling=tuple(
                replace(params, sampling_seed=self._seed(params, p.id, i)) for p in prompts for i in range(copies)
            ),
            n=n // copies,
            rid=new_ids(len(prompts) * copies),
            return_logprob=True,
            return_routed_experts=self._reader.routing is not None,
            return_routed_weights=self._reader.gates,
        )
        samples = await self._ask(request, [s for p in prompts for s in empty_samples(p, n)], [()] * (len(prompts) * n))
        return [SampleGroup(prompt=p, samples=tuple(samples[i * n : (i + 1) * n])) for i, p in enumerate(prompts)]

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        """Continue a sample after an environment's tokens, after an abort, or after the token limit.

        All its tokens are sent. At most `max_new_tokens` sampled tokens are appended with log-probs, weight versions
        and routes; only routes of rows that the sample lacks are requested. The environment's tokens are not loss
        tokens. With the parameters of the first part the tokens equal those of an uninterrupted sample (on a stock
        server with `samples_from` "client" and deterministic inference). Raises RolloutError.
        """
        by_client = self._samples_from == "client"
        request = GenerateRequest(
            input_ids=((*sample.token_ids.tolist(), *environment),),
            sampling=(replace(params, sampling_seed=self._seed(params, sample.prompt_id, sample.index)),),
            sample_index=0 if by_client else sample.index,
            rid=new_ids(1),
            return_logprob=True,
            return_routed_experts=self._reader.routing is not None,
            return_routed_weights=self._reader.gates,
            routed_experts_start_len=routing_rows(sample),
        )
        return (await self._ask(request, [sample], [environment]))[0]

    def _seed(self, params: SamplingParams, prompt_id: str, index: int) -> int | None:
        """The seed of a request. It includes the sample's index if the client and not the server separates samples."""
        if params.sampling_seed is None:
            return None
        return seed_of(params.sampling_seed, prompt_id, index if self._samples_from == "client" else None)

    async def _ask(
        self, request: GenerateRequest, samples: Sequence[Sample], environment: Sequence[Sequence[int]]
    ) -> list[Sample]:
        with spans.beside("request", server=self.url) as span:
            if spans.on():
                span.add(rids=list(request.rid or ()), samples=[s.name for s in samples])
            body = await self._generated(request)
        try:
            check_ids(body, request.reply_ids)
            with uncollected():
                replies = replies_from_json(body, want=len(samples), want_logprobs=True)
                del body  # a list for each token
            check_tokens(replies, request, self._vocabulary)
            return self._reader.extend(samples, environment, replies)
        except ValueError as e:
            raise RolloutError(f"server {self.url} returned invalid samples: {e}") from e

    async def score(self, sequences: Sequence[Tensor]) -> list[tuple[Tensor, RoutingTrace | None]]:
        request = self._scoring(sequences)
        body = await self._generated(request)
        try:
            check_ids(body, request.reply_ids)
            return self._reader.scores(sequences, body if isinstance(body, list) else [body])
        except ValueError as e:
            raise RolloutError(f"server {self.url} returned invalid scores: {e}") from e

    def _scoring(self, sequences: Sequence[Tensor]) -> GenerateRequest:
        """Of all tokens of each sequence, and of their routes."""
        return GenerateRequest(
            input_ids=tuple(tuple(t.tolist()) for t in sequences),
            sampling=(SamplingParams(max_new_tokens=0),) * len(sequences),
            rid=new_ids(len(sequences)),
            return_logprob=True,
            logprob_start_len=0,
            return_routed_experts=self._reader.routing is not None,
        )

    async def score_after(self, sequences: Sequence[Tensor], start: int, *, top: int = 0) -> list[PromptScores]:
        request = GenerateRequest(
            input_ids=tuple(tuple(t.tolist()) for t in sequences),
            sampling=(SamplingParams(max_new_tokens=0),) * len(sequences),
            rid=new_ids(len(sequences)),
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=top,
        )
        body = await self._generated(request)
        replies = body if isinstance(body, list) else [body]
        try:
            check_ids(body, request.reply_ids)
            if len(replies) != len(sequences):
                raise ValueError(f"{len(replies)} replies to {len(sequences)} prompts")
            pairs = zip(replies, sequences, strict=True)
            return [prompt_scores(r, t.numpy(), start=start, top=top) for r, t in pairs]
        except ValueError as e:
            raise RolloutError(f"server {self.url} returned invalid scores: {e}") from e

    async def layer_states(self, text: Tensor, *, values: int) -> tuple[Tensor, RoutingTrace | None]:
        """The residual stream of a text [S] at every layer, [S, 2L+1, H] fp32 (rollout/wire/layer_states.py), and its
        routes [S-1, L, K] of the same pass. values: the most numbers expected. Raises RolloutError for a server that
        was not started for it."""
        info = await self.server_info()
        try:
            if info.get("version") != "embedded":
                stock = StockStates.of(self.url, info)
                with stock.written():
                    ((_, routes),) = await self.score([text])
                return stock.read(len(text)), routes
            request = replace(self._scoring([text]), return_layer_states=True)
            body = await self._generated(request, more=states_bytes(values))
            reply = body[0] if isinstance(body, list) else body
            ((_, routes),) = self._reader.scores([text], [reply])
            return torch.from_numpy(states_from_json(reply).copy()), routes
        except ValueError as e:
            raise RolloutError(f"server {self.url} returned no valid states of its layers: {e}") from e

    async def _generated(self, request: GenerateRequest, *, more: int = 0) -> Any:
        """more: bytes that the reply may have beyond those of its samples and scores."""
        if self._vocabulary is not None:
            try:
                check_prompts(request, self._vocabulary)
            except ValueError as e:
                raise RolloutError(f"nothing was sent to server {self.url}: {e}") from None
        limit = reply_bytes(request, self._reader.routes_per_token) + more
        with self.occupation.generating():
            return await self._call("POST", endpoints.GENERATE, request.to_json(), limit=limit, loads=read_generated)

    async def pause(self, mode: PauseMode | None = None) -> None:
        await self._call("POST", endpoints.PAUSE, PauseRequest(mode=mode or self._pause_mode).to_json())

    async def resume(self) -> None:
        await self._call("POST", endpoints.CONTINUE, {})

    async def flush_cache(self) -> None:
        """After its last reply a stock server runs one more step, for which the request waits."""
        await self._send("POST", f"{endpoints.FLUSH_CACHE}?timeout={_FLUSH_S:g}")

    async def abort(self, rid: str) -> None:
        """Abort one request. An unknown id is no error."""
        await self._call("POST", endpoints.ABORT, AbortRequest(rid=rid).to_json())

    async def abort_all(self) -> None:
        await self._call("POST", endpoints.ABORT, AbortRequest(abort_all=True).to_json())

    async def release_memory(self, tags: Collection[MemoryTag]) -> None:
        """Free parts of the server's memory. Raises RuntimeError as `Occupation.releasing`, without a request, and
        RolloutError, before anything is released, if the server has not become idle within 5 s."""
        with self.occupation.releasing(tags):
            await self.flush_cache()  # an idle check that a busy server refuses, where it would die of the release
        await self._call("POST", endpoints.RELEASE_MEMORY, ReleaseMemory(tags=list(tags)).to_json())

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Allocate released parts again. Raises RuntimeError as `Occupation.resume`, without a request."""
        self.occupation.resume(tags)
        await self._call("POST", endpoints.RESUME_MEMORY, ResumeMemory(tags=list(tags)).to_json())

    async def health(self) -> bool:
        """Whether /health answers 200: a stock server generates a token for it. Never raises RolloutError; raises
        RuntimeError where a part of the server's memory is released."""
        self.occupation.require_parts("report its health")
        try:
            return (await self._http.get(endpoints.HEALTH)).status_code == 200
        except httpx.HTTPError:
            return False

    async def model_info(self) -> ModelInfo:
        body = await self._call("GET", endpoints.MODEL_INFO)
        try:
            return ModelInfo.from_json(body, endpoints.MODEL_INFO)
        except ValueError as e:
            raise RolloutError(f"server {self.url}: {e}") from None

    async def server_info(self) -> Json:
        """All resolved arguments of the server, under its names."""
        return dict(await self._call("GET", endpoints.SERVER_INFO))

    async def weight_version(self) -> int:
        try:
            return version_number((await self.model_info()).weight_version)
        except ValueError as e:
            raise RolloutError(f"server {self.url}: {e}") from None

    async def checksum(self) -> ChecksumReply:
        self.occupation.require_parts("hash its weights", [MemoryTag.WEIGHTS])
        body = await self._call("POST", endpoints.CHECKSUM, ChecksumRequest().to_json())
        return ChecksumReply.from_json(body, endpoints.CHECKSUM)

    async def set_weight_version(self, version: int) -> None:
        body = UpdateVersion(new_version=str(version), abort_all_requests=False)
        await self._change(endpoints.UPDATE_VERSION, body.to_json())

    async def _change(self, endpoint: str, body: Json) -> None:
        outcome = Outcome.from_json(await self._call("POST", endpoint, body), endpoint)
        if not outcome.success:
            raise RolloutError(f"server {self.url} rejected {endpoint}: {outcome.message}")
