"""The endpoints of SGLang's HTTP API that the embedded server implements, one method each.

Unsupported features (streaming, stop strings, penalties, pickled weights) are answered with status 400 and a message,
never ignored.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from miles_like import spans
from miles_like.types import NamedTensor
from rollout.embedded.engine.requests import Completed, PromptSpec, specs_of
from rollout.embedded.kernels.chosen import by_triton
from rollout.embedded.openai.text import Text
from rollout.embedded.server.answers import (
    aside,
    beside,
    client_of,
    error_reply,
    json_body,
    json_reply,
    parsed_json,
)
from rollout.embedded.server.limits import Refused, RequestLimits
from rollout.embedded.server.openai_handlers import OpenAIHandlers
from rollout.embedded.server.openapi import document
from rollout.embedded.server.routes_page import page
from rollout.embedded.server.service import held_bytes
from rollout.embedded.server.slice_handlers import SliceHandlers
from rollout.embedded.server.worker import EngineStopped, EngineWorker, Generation
from rollout.embedded.updates.groups import UpdateGroups, is_loopback
from rollout.embedded.updates.segments import read_segment
from rollout.wire import endpoints, layer_states
from rollout.wire.bodies import EmptyBody, read
from rollout.wire.checksum import engine_checksum
from rollout.wire.control import (
    SAFETENSORS,
    AbortRequest,
    BeginUpdate,
    ChecksumReply,
    ChecksumRequest,
    DestroyGroup,
    EndUpdate,
    InitGroup,
    ModelInfo,
    Outcome,
    PauseRequest,
    RankReply,
    ReleaseMemory,
    ResumeMemory,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensor,
    UpdateVersion,
    decode_safetensors,
)
from rollout.wire.deltas import DELTA
from rollout.wire.flat import SEGMENT
from rollout.wire.generate import GenerateRequest
from rollout.wire.replies import Json
from rollout.wire.scores import prompt_entries

_MAX_FLUSH_S = 600.0
_GONE = 499  # nginx's code: the client closed the connection
_log = logging.getLogger("uvicorn.error")  # written to stderr by uvicorn
T = TypeVar("T")


def answered(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Converts the exceptions of a handler into error responses. A ValueError is a client error."""

    async def answer(request: Request) -> Response:
        try:
            with spans.beside(request.url.path):
                return await handler(request)
        except ClientDisconnect:
            return Response(status_code=_GONE)  # never sent, as the connection is closed
        except Refused as e:
            return error_reply(str(e), e.status, {"connection": "close"})
        except EngineStopped as e:
            return error_reply(str(e), HTTPStatus.SERVICE_UNAVAILABLE)
        except ValueError as e:
            return error_reply(str(e))
        except Exception as e:
            _log.error("internal error at %s", request.url.path, exc_info=e)
            what = f"{type(e).__name__}: {e}"
            return error_reply(
                f"internal error at {request.url.path} ({what}); the server's log has the traceback", 500
            )

    return answer


async def http_error(request: Request, e: Exception) -> Response:
    """The response to a path or method that is not served."""
    assert isinstance(e, HTTPException)
    return error_reply(
        f"{request.method} {request.url.path} is not supported: {e.detail}",
        e.status_code,
        dict(e.headers or {}),
        path=request.url.path,
    )


async def _gone(request: Request) -> None:
    """Returns when the client has closed the connection. The body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def served_name(args: argparse.Namespace) -> str:
    """The name of the model in OpenAI's endpoints."""
    return vars(args).get("served_model_name") or Path(args.model_path).resolve().name


class Handlers:
    """One method per endpoint. A ValueError is a client error and becomes status 400."""

    def __init__(self, worker: EngineWorker, args: argparse.Namespace, limits: RequestLimits) -> None:
        self.worker = worker
        self.limits = limits
        self.service = worker.service
        self.text = Text.of(Path(args.model_path))
        self.args = args
        self.started = time.time()
        self.groups, self.slices = UpdateGroups(), SliceHandlers(worker, limits)
        self.name = served_name(args)
        self.document = document(self.service.arch.vocab, (self.name, str(Path(args.model_path))))
        self.openai = OpenAIHandlers(
            worker,
            limits,
            model_path=Path(args.model_path),
            name=self.name,
            text=self.text,
            await_or_abort=self._await_or_abort,
        )

    async def _call(self, run: Callable[[], T], *, drain: bool = False) -> T:
        return await asyncio.wrap_future(self.worker.call(run, drain=drain))

    # ---- generation

    async def generate(self, request: Request) -> Response:
        began = time.time()
        raw = await request.body()
        parsed, specs, body = await beside(len(raw), self._parse_generate, raw)
        with spans.beside("generate", rids=parsed.rid, version=self.service.engine.version):
            done = await self._await_or_abort(request, self.worker.generate(specs))

        def answer(seconds: float) -> Response:
            replies = self._replies(parsed, specs, done, body, seconds)
            return json_reply(replies[0] if parsed.single and parsed.n == 1 else replies)

        return await beside(sum(len(c.reply.output_ids) for c in done), answer, time.time() - began)

    def _parse_generate(self, raw: bytes) -> tuple[GenerateRequest, list[PromptSpec], Json]:
        body = parsed_json(raw)
        if "text" in body and "input_ids" not in body:
            texts = body["text"]
            self._check_samples(len(texts) if isinstance(texts, list) else 1)
            body["input_ids"] = self.text.encode(texts)
        parsed = GenerateRequest.from_json(body)
        self._check_samples(len(parsed.input_ids) * parsed.n)
        self._check_entries(parsed)
        return parsed, specs_of(parsed), body

    def _check_samples(self, samples: int) -> None:
        if samples > self.limits.samples:
            raise ValueError(
                f"{endpoints.GENERATE}: {samples:,} samples in one request, but this server accepts "
                f"{self.limits.samples:,}: send fewer prompts at once, or start it with --max-samples-per-request"
            )

    def _check_entries(self, parsed: GenerateRequest) -> None:
        """Bounds the log-probs in the reply: each sample repeats those of its prompt, so a short request can cause a
        reply of any size."""
        if not parsed.return_logprob or parsed.logprob_start_len < 0:
            return
        scored = sum(max(0, len(ids) - parsed.logprob_start_len) for ids in parsed.input_ids)
        if (entries := scored * parsed.n * (1 + parsed.top_logprobs_num)) > self.limits.entries:
            raise ValueError(
                f"{endpoints.GENERATE}: {entries:,} log-probabilities of prompts in one reply, but this server "
                f"sends at most {self.limits.entries:,}: request fewer prompts, samples or candidates at once"
            )

    async def _await_or_abort(self, request: Request, generation: Generation) -> list[Completed]:
        """The results; aborts the generation, and no other with the same rid, when the client disconnects."""
        waiter, gone = asyncio.wrap_future(generation.done), asyncio.ensure_future(_gone(request))
        either: set[asyncio.Future[Any]] = {waiter, gone}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not waiter.done():
                await asyncio.wrap_future(self.worker.abort(generation))
            return await waiter
        finally:
            gone.cancel()
            waiter.cancel()  # still pending if the engine stopped before the abort

    def _replies(
        self,
        request: GenerateRequest,
        specs: Sequence[PromptSpec],
        done: Sequence[Completed],
        body: Json,
        seconds: float,
    ) -> list[Json]:
        params = body.get("sampling_params") or {}
        first = (params[0] if params else {}) if isinstance(params, list) else params
        texts = self.text.decode(
            [c.reply.output_ids.tolist() for c in done],
            trim=[c.reply.matched is not None and not first.get("no_stop_trim") for c in done],
            skip_special=bool(first.get("skip_special_tokens", True)),
        )
        out = []
        for i, c in enumerate(done):
            one = c.reply.to_json()
            meta = one["meta_info"]
            meta["e2e_latency"] = seconds
            if not request.return_logprob:
                for key in ("input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"):
                    meta.pop(key, None)
            elif request.logprob_start_len >= 0:
                ids = specs[i // request.n].token_ids[request.logprob_start_len :]
                if len(c.prompt_logprobs) == max(0, len(ids) - 1):  # else aborted before the prompt was fed
                    meta |= prompt_entries(c.prompt_logprobs, ids, c.prompt_top)
            if c.states is not None:
                meta[layer_states.KEY] = layer_states.states_to_json(c.states)
            out.append(one if texts is None else {"text": texts[i]} | one)
        return out

    async def abort(self, request: Request) -> Response:
        a = AbortRequest.from_json(await json_body(request))
        engine, rid = self.service.engine, a.rid or ""

        def run() -> None:
            if a.abort_all or engine.has_request(rid):  # as SGLang's front end, which passes on no other rid
                engine.abort(rid, everything=a.abort_all)

        await self._call(run)
        return Response()

    async def pause(self, request: Request) -> Response:
        mode = PauseRequest.from_json(await json_body(request)).mode
        await self._call(lambda: self.service.engine.pause(mode))
        return json_reply({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        read(EmptyBody, await json_body(request), endpoints.CONTINUE)
        await self._call(self.service.engine.resume)
        done = {"message": "Generation continued successfully.", "status": "ok"}
        return json_reply(done | {"triton": self._by_triton})

    @property
    def _by_triton(self) -> bool:
        """Whether kernels attend to the cache and draw tokens."""
        return by_triton(self.service.engine.cache.values[0])

    async def flush_cache(self, request: Request) -> Response:
        until = time.monotonic() + _flush_timeout(request.query_params.get("timeout", "0"))
        while not (idle := await self._call(self.service.engine.flush)) and time.monotonic() < until:
            if await request.is_disconnected():
                break
            await asyncio.sleep(0.05)
        if idle:
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Cache not flushed: requests are running or frozen in place.\n", 400)

    # ---- memory

    async def release_memory(self, request: Request) -> Response:
        tags = ReleaseMemory.from_json(await json_body(request)).named
        return json_reply({"held": await self._call(lambda: self.service.release(tags))})

    async def resume_memory(self, request: Request) -> Response:
        tags = ResumeMemory.from_json(await json_body(request)).named
        return json_reply({"held": await self._call(lambda: self.service.resume(tags))})

    # ---- information

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.worker.alive else 503)

    async def page(self, request: Request) -> Response:
        return PlainTextResponse(page(self.name, self.service.engine.limits.context_length))

    async def openapi(self, request: Request) -> Response:
        return json_reply(self.document)

    async def model_info(self, request: Request) -> Response:
        path = str(self.service.model_path)
        info = ModelInfo(model_path=path, weight_version=self.service.engine.version).to_json()
        more = {
            "served_model_name": path,
            "tokenizer_path": path if self.text.known else None,
            "load_format": SAFETENSORS,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": self.service.config.get("model_type"),
            "architectures": self.service.config.get("architectures"),
        }
        return json_reply(info | more)

    async def server_info(self, request: Request) -> Response:
        engine = self.service.engine
        ranks = await self._call(self.service.held_by_rank)
        state = {
            "running": engine.running,
            "waiting": engine.waiting,
            "paused": engine.paused,
            "free_slots": engine.cache.free_pages * engine.cache.page,
            "generated_tokens": engine.generated,
        }
        more = {
            "max_total_num_tokens": engine.cache.pages * engine.cache.page,
            "started_ts": self.started,
            "weights_bytes": sum(r.weights for r in ranks),
            "held_bytes": held_bytes(ranks),
            "ranks": [{"pid": pid, **r._asdict()} for pid, r in zip(self.service.pids, ranks, strict=True)],
            "weight_version": engine.version,  # the current one, not that of the command line
            "internal_states": [state],
            "exact_fingerprint": await self._call(lambda: getattr(engine.model.ops, "fingerprint", None)),
            "triton": self._by_triton,
            "version": "embedded",
        }
        return json_reply(vars(self.args) | more)

    async def checksum(self, request: Request) -> Response:
        action = ChecksumRequest.from_json(await json_body(request)).action
        if action != "checksum":
            return json_reply(
                Outcome(success=False, message=f"action {action!r} is not supported: send checksum").to_json(), 400
            )
        sums = await self._call(self.service.checksums)
        whole = engine_checksum(sums)
        rank = RankReply(checksums=sums, per_gpu_checksum=whole)
        return json_reply(ChecksumReply(ranks=(rank,), per_engine_checksum=whole).to_json())

    # ---- weights

    async def begin_update(self, request: Request) -> Response:
        u = BeginUpdate.from_json(await json_body(request))
        epoch = int(request.headers.get(endpoints.EPOCH, "0"))  # checked by `Access`
        return await self._outcome(lambda: self.service.begin_update(u.weight_version, epoch))

    async def update_from_tensor(self, request: Request) -> Response:
        u = UpdateFromTensor.from_json(await json_body(request))
        if u.load_format not in (SAFETENSORS, SEGMENT) or len(u.serialized_named_tensors) != 1:
            message = (
                f'this server accepts one safetensors file in base64 (load_format "{SAFETENSORS}") or one segment '
                f'of shared memory (load_format "{SEGMENT}"), and no pickle'
            )
            return json_reply(Outcome(success=False, message=message).to_json(), 400)
        (payload,) = u.serialized_named_tensors
        if u.load_format == SEGMENT:
            if not is_loopback(client := client_of(request)):
                message = f"shared memory is only read for clients at this host's loopback address, not for {client}"
                return json_reply(Outcome(success=False, message=message).to_json(), 400)
            tensors = await asyncio.to_thread(read_segment, payload, self.limits.weights_bytes)
        else:
            tensors = await asyncio.to_thread(decode_safetensors, payload)
        return await self._stage(tensors, u)

    async def _stage(self, tensors: list[NamedTensor], u: UpdateFromTensor | UpdateFromDistributed) -> Response:
        if u.abort_all_requests:
            await self._call(lambda: self.service.engine.abort(everything=True))
        return await self._outcome(
            lambda: self.service.update(tensors, flush_cache=u.flush_cache, version=u.weight_version)
        )

    async def init_group(self, request: Request) -> Response:
        u = InitGroup.from_json(await json_body(request))
        client = client_of(request)
        return await self._grouped(lambda: self.groups.join(u, client))

    async def destroy_group(self, request: Request) -> Response:
        u = DestroyGroup.from_json(await json_body(request))
        if await self.slices.leave(u):
            return json_reply(Outcome(success=True, message="Succeeded.").to_json())
        return await self._grouped(lambda: self.groups.leave(u))

    async def _grouped(self, run: Callable[[], None]) -> Response:
        try:
            await aside(run)
        except ValueError as e:
            return json_reply(Outcome(success=False, message=str(e)).to_json(), 400)
        return json_reply(Outcome(success=True, message="Succeeded.").to_json())

    async def update_from_distributed(self, request: Request) -> Response:
        u = UpdateFromDistributed.from_json(await json_body(request))
        try:
            await self._call(lambda: self.service.require_update(u.weight_version))
            tensors = await aside(lambda: self.groups.receive(u, self.limits.weights_bytes))
        except ValueError as e:
            return json_reply(Outcome(success=False, message=str(e)).to_json(), 400)
        return await self._stage(tensors, u)

    async def end_update(self, request: Request) -> Response:
        u = EndUpdate.from_json(await json_body(request))
        return await self._outcome(lambda: self.service.end_update(u.weight_version), drain=True)

    async def update_from_disk(self, request: Request) -> Response:
        u = UpdateFromDisk.from_json(await json_body(request))
        more, path = {"num_paused_requests": 0}, Path(u.model_path)
        try:  # before waiting for running requests
            if u.load_format == DELTA:
                return await self._update_from_delta(u, path)
            if u.prepare or u.load_format not in (None, "auto", SAFETENSORS):
                raise ValueError(
                    f"load_format {u.load_format!r} with prepare = {u.prepare} is not supported: send "
                    f'"{SAFETENSORS}", or "{DELTA}", which can also be prepared'
                )
            checkpoint = await asyncio.to_thread(self.service.candidate, path)
        except ValueError as e:
            return json_reply(Outcome(success=False, message=str(e)).to_json() | more, 400)
        if u.abort_all_requests:
            await self._call(lambda: self.service.engine.abort(everything=True))
        return await self._outcome(
            lambda: self.service.load(checkpoint, flush_cache=u.flush_cache, version=u.weight_version),
            drain=True,
            more=more,
        )

    async def _update_from_delta(self, u: UpdateFromDisk, path: Path) -> Response:
        more = {"num_paused_requests": 0}
        if u.prepare:
            read = await asyncio.to_thread(self.service.delta, path, u.weight_version)
            return await self._outcome(lambda: self.service.prepare_delta(read), more=more)
        if u.abort_all_requests:
            await self._call(lambda: self.service.engine.abort(everything=True))
        return await self._outcome(
            lambda: self.service.load_delta(path, flush_cache=u.flush_cache, version=u.weight_version),
            drain=True,
            more=more,
        )

    async def update_version(self, request: Request) -> Response:
        u = UpdateVersion.from_json(await json_body(request))

        def run() -> None:
            if u.abort_all_requests:
                self.service.engine.abort(everything=True)
            self.service.engine.set_version(u.new_version)

        return await self._outcome(run, more={"new_version": u.new_version})

    async def _outcome(self, run: Callable[[], None], *, drain: bool = False, more: Json | None = None) -> Response:
        try:
            await self._call(run, drain=drain)
        except ValueError as e:
            return json_reply(Outcome(success=False, message=str(e)).to_json() | (more or {}), 400)
        return json_reply(Outcome(success=True, message="Succeeded.").to_json() | (more or {}))


def _flush_timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MAX_FLUSH_S:
        raise ValueError(f"timeout = {text[:60]!r}: expected seconds from 0 to {_MAX_FLUSH_S:g}")
    return seconds
