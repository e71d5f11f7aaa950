"""One server, stock SGLang or embedded, as a RolloutEngine over HTTP.

Letters: G samples a prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import orjson
from torch import Tensor

from miles_like.server_url import tls
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams
from rollout import wire
from rollout.samples import RoutingShape, SampleReader, all_begun, rows_of, version_number
from rollout.server_key import VARIABLE, ServerKey
from rollout.together import all_or_first_error
from rollout.wire import GenerateRequest
from rollout.wire_control import (
    AbortRequest,
    ChecksumReply,
    ModelInfo,
    Outcome,
    PauseMode,
    UpdateVersion,
    error_message,
)
from rollout.wire_scores import PromptScores, prompt_scores
from routing_replay.trace import RoutingTrace

_JSON = {"content-type": "application/json"}
# uvicorn, under SGLang too, closes a connection that was idle for 5 s, and httpx by default forgets it after the same
# 5 s: a request sent at that moment meets the closing and fails. Trainer steps of 5 s are the rule.
KEEPALIVE_S = 2.0
PLAIN = {"accept-encoding": "identity"}
REPLY_BYTES = 64 << 20  # of an answer, those of /generate excepted
_FLUSH_S = 5.0


class RolloutError(RuntimeError):
    """A server did not do what it was asked: one sentence saying which server, what happened and what to do."""


def seed_of(seed: int, prompt_id: str, index: int | None = None) -> int:
    """A sampling seed in [0, 2**31) from the run's seed, the prompt and, when given, the sample's index.

    Hashed, so that neighbouring prompts do not share streams; the same in every process and on every run.
    """
    key = f"{seed}\0{prompt_id}" if index is None else f"{seed}\0{prompt_id}\0{index}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little") & 0x7FFFFFFF


def _rids(count: int) -> tuple[str, ...]:
    """Names of a request's prompts that no other request has, so that its answers can be told from others'."""
    return tuple(uuid.uuid4().hex for _ in range(count))


def failure(error: httpx.HTTPError, *, url: str, endpoint: str, timeout_s: float, log: Path | None) -> RolloutError:
    """Say what an exception of httpx means to the user. `log`: of the server, when this run started it."""
    look = f"see the end of {log}" if log else "see its log"
    if isinstance(error, httpx.ConnectError) and "[SSL" in str(error):
        return RolloutError(
            f"server {url} gives no TLS connection for {endpoint} ({error}): a certificate of your own needs its "
            "authority's file in SSL_CERT_FILE, a server without TLS an http:// URL"
        )
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return RolloutError(f"server {url} cannot be reached for {endpoint}: it is not running or has died; {look}")
    if isinstance(error, httpx.TimeoutException):
        return RolloutError(
            f"server {url} did not answer {endpoint} within {timeout_s:g} s: it hangs or is overloaded; {look}, "
            "or raise rollout.request_timeout_s"
        )
    if isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
        return RolloutError(f"server {url} closed the connection during {endpoint}: it has died or was killed; {look}")
    return RolloutError(f"server {url} failed at {endpoint}: {type(error).__name__}: {error}; {look}")


def read_json(response: httpx.Response, *, url: str, endpoint: str, log: Path | None) -> Any:
    """The body, or RolloutError for HTTP 4xx and 5xx and for a body that is no JSON."""
    if response.status_code >= 400:
        text = error_message(response.status_code, response.content)
        if response.status_code in (401, 403):
            text += "; a server's key is given by --key-file or key_file, or in the variable " + VARIABLE
        look = f"; see the end of {log}" if log else ""
        raise RolloutError(f"server {url} refused {endpoint}: {text}{look}")
    try:
        return orjson.loads(response.content) if response.content else None
    except ValueError as e:
        raise RolloutError(f"server {url} answered {endpoint} with no JSON ({e}): is it an SGLang server?") from None


def check_plain(response: httpx.Response, *, url: str, endpoint: str) -> None:
    """Before the body is read: nothing would bound what a few compressed bytes become. Raises RolloutError."""
    coded = response.headers.get("content-encoding", "identity")
    if coded != "identity":
        raise RolloutError(f"server {url} answered {endpoint} compressed ({coded[:40]}), unasked: is a proxy between?")


def check_size(size: int, limit: int, *, url: str, endpoint: str) -> None:
    """size: bytes of the body so far. Raises RolloutError."""
    if size > limit:
        raise RolloutError(
            f"server {url} answered {endpoint} with more than {limit:,} bytes, the most that such a request is worth: "
            "is it an SGLang server?"
        )


class SGLangClient:
    """A RolloutEngine. Use it from one event loop.

    samples_from: "server" sends a prompt once with `n` (one prefill for its G samples; the embedded engine gives each
    its own random stream). "client" sends it G times with a seed each: a stock SGLang server with deterministic
    inference draws all `n` samples of a request from one seed, so they would be clones, and gives them ids of its own.
    decode: token ids -> text, for servers that run without a tokenizer; it goes before the server's own text.
    key: of the server; None where it has none.
    vocabulary: tokens of the model, which every sampled id must be below; None: not checked.
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
    ) -> None:
        self.url = url.rstrip("/")
        self._vocabulary = vocabulary
        self._prompts_per_request = prompts_per_request
        self._timeout_s = request_timeout_s
        self._pause_mode = pause_mode
        self._samples_from = samples_from
        self._reader = SampleReader(routing=routing, decode=decode)
        self._log = log
        self._key = key
        # No cap on connections: waiting for a free one would look like a hanging server.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=KEEPALIVE_S)
        timeout = httpx.Timeout(request_timeout_s, connect=min(10.0, request_timeout_s))
        self._http = httpx.AsyncClient(
            base_url=self.url, limits=limits, timeout=timeout, trust_env=False, verify=tls(self.url)
        )

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """`n` samples of each prompt, in order. Raises RolloutError; what was still running is then cancelled."""
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
            rid=_rids(len(prompts) * copies),
            return_logprob=True,
            return_routed_experts=self._reader.routing is not None,
            return_routed_weights=self._reader.gates,
        )
        samples = await self._ask(request, [s for p in prompts for s in all_begun(p, n)], [()] * (len(prompts) * n))
        return [SampleGroup(prompt=p, samples=tuple(samples[i * n : (i + 1) * n])) for i, p in enumerate(prompts)]

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        """The sample goes on: after tokens that an environment gave, after an abort, or from where it was cut off.

        All its tokens are sent, and what is sampled, at most `max_new_tokens` more, is appended with log-probs, weight
        versions and routes; only the routes of rows that it does not have yet are asked for. The environment's tokens
        are not under loss. With the parameters of the first part it draws the tokens that it would have drawn in one
        go (a stock server: with `samples_from` "client" and deterministic inference). Raises RolloutError.
        """
        by_client = self._samples_from == "client"
        request = GenerateRequest(
            input_ids=((*sample.token_ids.tolist(), *environment),),
            sampling=(replace(params, sampling_seed=self._seed(params, sample.prompt_id, sample.index)),),
            sample_index=0 if by_client else sample.index,
            rid=_rids(1),
            return_logprob=True,
            return_routed_experts=self._reader.routing is not None,
            return_routed_weights=self._reader.gates,
            routed_experts_start_len=rows_of(sample),
        )
        return (await self._ask(request, [sample], [environment]))[0]

    def _seed(self, params: SamplingParams, prompt_id: str, index: int) -> int | None:
        """The server tells the samples of one prompt apart, unless the client has to."""
        if params.sampling_seed is None:
            return None
        return seed_of(params.sampling_seed, prompt_id, index if self._samples_from == "client" else None)

    async def _ask(
        self, request: GenerateRequest, samples: Sequence[Sample], fed: Sequence[Sequence[int]]
    ) -> list[Sample]:
        body = await self._generated(request)
        try:
            wire.check_ids(body, request.reply_ids)
            replies = wire.replies_from_json(body, want=len(samples), want_logprobs=True)
            wire.check_tokens(replies, request, self._vocabulary)
            return self._reader.extend(samples, fed, replies)
        except ValueError as e:
            raise RolloutError(f"server {self.url} sent samples that cannot be used: {e}") from e

    async def score(self, sequences: Sequence[Tensor]) -> list[tuple[Tensor, RoutingTrace | None]]:
        """Of each sequence [S] of tokens: log p of tokens 1..S-1, [S-1] fp32, under the weights now and at temperature
        1, and the routes [S-1, L, K]. Nothing is sampled. Raises RolloutError."""
        request = GenerateRequest(
            input_ids=tuple(tuple(t.tolist()) for t in sequences),
            sampling=(SamplingParams(max_new_tokens=0),) * len(sequences),
            rid=_rids(len(sequences)),
            return_logprob=True,
            logprob_start_len=0,
            return_routed_experts=self._reader.routing is not None,
        )
        body = await self._generated(request)
        try:
            wire.check_ids(body, request.reply_ids)
            return self._reader.scores(sequences, body if isinstance(body, list) else [body])
        except ValueError as e:
            raise RolloutError(f"server {self.url} sent scores that cannot be used: {e}") from e

    async def score_after(self, sequences: Sequence[Tensor], start: int, *, top: int = 0) -> list[PromptScores]:
        """Of each sequence [S] of tokens: log p of tokens start+1..S-1 under the weights now and at temperature 1, and
        of the `top` likeliest tokens at each of these places. Nothing is sampled. Raises RolloutError."""
        request = GenerateRequest(
            input_ids=tuple(tuple(t.tolist()) for t in sequences),
            sampling=(SamplingParams(max_new_tokens=0),) * len(sequences),
            rid=_rids(len(sequences)),
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=top,
        )
        body = await self._generated(request)
        replies = body if isinstance(body, list) else [body]
        try:
            wire.check_ids(body, request.reply_ids)
            if len(replies) != len(sequences):
                raise ValueError(f"{len(replies)} replies to {len(sequences)} prompts")
            pairs = zip(replies, sequences, strict=True)
            return [prompt_scores(r, t.numpy(), start=start, top=top) for r, t in pairs]
        except ValueError as e:
            raise RolloutError(f"server {self.url} sent scores that cannot be used: {e}") from e

    async def _generated(self, request: GenerateRequest) -> Any:
        limit = wire.reply_bytes(request, self._reader.routes_per_token)
        return await self._call("POST", wire.GENERATE, request.to_json(), limit=limit)

    async def pause(self, mode: PauseMode | None = None) -> None:
        await self._call("POST", wire.PAUSE, (mode or self._pause_mode).to_json())

    async def resume(self) -> None:
        await self._call("POST", wire.CONTINUE, {})

    async def flush_cache(self) -> None:
        """Forget all keys and values. RolloutError while requests run or are paused in place.

        A stock server is busy for one more step after its last answer, the batch that it began before it knew: it is
        given the time.
        """
        await self._send("POST", f"{wire.FLUSH_CACHE}?timeout={_FLUSH_S:g}")

    async def abort(self, rid: str) -> None:
        """End one request where it is; no error when it is unknown."""
        await self._call("POST", wire.ABORT, AbortRequest(rid=rid).to_json())

    async def abort_all(self) -> None:
        await self._call("POST", wire.ABORT, AbortRequest(abort_all=True).to_json())

    async def health(self) -> bool:
        """Whether the server answers and says that it is well; never raises RolloutError."""
        try:
            return (await self._http.get(wire.HEALTH)).status_code == 200
        except httpx.HTTPError:
            return False

    async def model_info(self) -> ModelInfo:
        body = await self._call("GET", wire.MODEL_INFO)
        try:
            return ModelInfo.from_json(body)
        except ValueError as e:
            raise RolloutError(f"server {self.url}: {e}") from None

    async def server_info(self) -> wire.Json:
        """All resolved arguments of the server, as it names them."""
        return dict(await self._call("GET", wire.SERVER_INFO))

    async def weight_version(self) -> int:
        try:
            return version_number((await self.model_info()).weight_version)
        except ValueError as e:
            raise RolloutError(f"server {self.url}: {e}") from None

    async def checksum(self) -> ChecksumReply:
        return ChecksumReply.from_json(await self._call("POST", wire.CHECKSUM, {"action": "checksum"}))

    async def begin_weight_update(self) -> None:
        await self._change(wire.BEGIN_UPDATE, {})

    async def end_weight_update(self) -> None:
        await self._change(wire.END_UPDATE, {})

    async def set_weight_version(self, version: int) -> None:
        body = UpdateVersion(new_version=str(version), abort_all_requests=False)
        await self._change(wire.UPDATE_VERSION, body.to_json())

    async def close(self) -> None:
        await self._http.aclose()

    async def _change(self, endpoint: str, body: wire.Json) -> None:
        outcome = Outcome.from_json(await self._call("POST", endpoint, body), endpoint)
        if not outcome.success:
            raise RolloutError(f"server {self.url} refused {endpoint}: {outcome.message}")

    async def _call(
        self, method: str, endpoint: str, body: wire.Json | None = None, *, limit: int = REPLY_BYTES
    ) -> Any:
        response = await self._send(method, endpoint, body, limit)
        return read_json(response, url=self.url, endpoint=endpoint, log=self._log)

    async def _send(
        self, method: str, endpoint: str, body: wire.Json | None = None, limit: int = REPLY_BYTES
    ) -> httpx.Response:
        try:
            # httpx limits each read, not their sum: a server that trickles would never time out.
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
            read_json(response, url=self.url, endpoint=endpoint, log=self._log)
        return response

    async def _read(
        self, method: str, endpoint: str, content: bytes | None, headers: Mapping[str, str], limit: int
    ) -> httpx.Response:
        """The whole answer. Raises RolloutError for one of more than `limit` bytes, or a compressed one."""
        parts, size = [], 0
        async with self._http.stream(method, endpoint, content=content, headers=headers) as response:
            check_plain(response, url=self.url, endpoint=endpoint)
            async for part in response.aiter_raw():
                parts.append(part)
                size += len(part)
                check_size(size, limit, url=self.url, endpoint=endpoint)
        return httpx.Response(response.status_code, content=b"".join(parts))
