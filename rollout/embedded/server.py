"""SGLang's HTTP surface in front of the engine: `python -m rollout.embedded.server --model-path DIR --port P`.

Differences from a stock server are refusals with a sentence, never silent: streaming, stop strings, penalties and
pickled weights are answered with 400.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import orjson
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from rollout import wire
from rollout.checksum import engine_checksum
from rollout.embedded.engine import EngineLimits
from rollout.embedded.exact_ops import operations
from rollout.embedded.requests import Completed, PromptSpec, specs_of
from rollout.embedded.service import Service
from rollout.embedded.text import Text
from rollout.embedded.worker import EngineWorker
from rollout.wire import GenerateRequest, Json
from rollout.wire_control import (
    SAFETENSORS,
    AbortRequest,
    ChecksumReply,
    ModelInfo,
    Outcome,
    PauseMode,
    UpdateFromDisk,
    UpdateFromTensor,
    UpdateVersion,
    decode_safetensors,
)
from rollout.wire_scores import prompt_entries

HEALTH_GENERATE = "/health_generate"
_DISCONNECT_POLL_S = 1.0
T = TypeVar("T")


def _json(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _error(message: str, status: int = 400) -> Response:
    return _json({"error": {"message": message}}, status)


async def _body(request: Request) -> Json:
    raw = await request.body()
    try:
        body = orjson.loads(raw) if raw else {}
    except ValueError as e:
        raise ValueError(f"the request is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise ValueError(f"the request is a JSON {type(body).__name__}, want an object")
    return body


class Handlers:
    """One method an endpoint. A ValueError is the caller's mistake and becomes a 400."""

    def __init__(self, worker: EngineWorker, args: argparse.Namespace) -> None:
        self.worker = worker
        self.service = worker.service
        self.text = Text.of(Path(args.model_path))
        self.args = args
        self.started = time.time()

    async def _call(self, run: Callable[[], T], *, drain: bool = False) -> T:
        return await asyncio.wrap_future(self.worker.call(run, drain=drain))

    # ---- generation

    async def generate(self, request: Request) -> Response:
        began = time.time()
        body = await _body(request)
        if "text" in body and "input_ids" not in body:
            body["input_ids"] = self.text.encode(body["text"])
        asked = GenerateRequest.from_json(body)
        specs = specs_of(asked)
        future = self.worker.generate(specs)
        done = await self._await_or_abort(request, future, specs)
        replies = self._replies(asked, specs, done, body, time.time() - began)
        return _json(replies[0] if asked.single and asked.n == 1 else replies)

    async def _await_or_abort(
        self, request: Request, future: Future[list[Completed]], specs: Sequence[PromptSpec]
    ) -> list[Completed]:
        """A client that went away gets no more work done for it."""
        waiter = asyncio.wrap_future(future)

        def abort() -> None:
            for s in specs:
                self.service.engine.abort(s.rid)

        while not (await asyncio.wait({waiter}, timeout=_DISCONNECT_POLL_S))[0]:
            if await request.is_disconnected():
                await self._call(abort)
        return await waiter

    def _replies(
        self, asked: GenerateRequest, specs: Sequence[PromptSpec], done: Sequence[Completed], body: Json, seconds: float
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
            if not asked.return_logprob:
                for key in ("input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"):
                    meta.pop(key, None)
            elif asked.logprob_start_len >= 0:
                ids = specs[i // asked.n].token_ids[asked.logprob_start_len :]
                meta |= prompt_entries(c.prompt_logprobs[: len(ids) - 1], ids, c.prompt_top)
            out.append(one if texts is None else {"text": texts[i]} | one)
        return out

    async def abort(self, request: Request) -> Response:
        a = AbortRequest.from_json(await _body(request))
        await self._call(lambda: self.service.engine.abort(a.rid, everything=a.abort_all))
        return Response()

    async def pause(self, request: Request) -> Response:
        mode = PauseMode.from_json(await _body(request))
        await self._call(lambda: self.service.engine.pause(mode))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        await self._call(self.service.engine.resume)
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, request: Request) -> Response:
        until = time.monotonic() + float(request.query_params.get("timeout", 0))
        while not (idle := await self._call(self.service.engine.flush)) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        if idle:
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Cache not flushed: requests are running or frozen in place.\n", 400)

    # ---- what it is

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.worker.alive else 503)

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
        return _json(info | more)

    async def server_info(self, request: Request) -> Response:
        engine = self.service.engine
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
            "weights_bytes": self.service.weights_bytes,
            "weight_version": engine.version,  # of now, not of the command line
            "internal_states": [state],
            "exact_fingerprint": await self._call(lambda: getattr(engine.model.ops, "fingerprint", None)),
            "version": "embedded",
        }
        return _json(vars(self.args) | more)

    async def checksum(self, request: Request) -> Response:
        action = (await _body(request)).get("action", "checksum")
        if action != "checksum":
            return _json(
                Outcome(success=False, message=f"action {action!r} is not served: ask for checksum").to_json(), 400
            )
        sums = await self._call(lambda: self.service.store.checksums())
        whole = engine_checksum(sums)
        return _json(ChecksumReply(per_engine=whole, ranks=(sums,), per_gpu=(whole,)).to_json())

    # ---- weights

    async def begin_update(self, request: Request) -> Response:
        return await self._outcome(self.service.begin_update)

    async def update_from_tensor(self, request: Request) -> Response:
        u = UpdateFromTensor.from_json(await _body(request))
        if u.load_format != SAFETENSORS or len(u.tensors) != 1:
            message = f'this server reads one safetensors file in base64: send load_format "{SAFETENSORS}" (no pickle)'
            return _json(Outcome(success=False, message=message).to_json(), 400)
        tensors = await asyncio.to_thread(decode_safetensors, u.tensors[0])
        if u.abort_all_requests:
            await self._call(lambda: self.service.engine.abort(everything=True))
        return await self._outcome(
            lambda: self.service.update(tensors, flush_cache=u.flush_cache, version=u.weight_version)
        )

    async def end_update(self, request: Request) -> Response:
        return await self._outcome(self.service.end_update, drain=True)

    async def update_from_disk(self, request: Request) -> Response:
        u = UpdateFromDisk.from_json(await _body(request))
        if u.abort_all_requests:
            await self._call(lambda: self.service.engine.abort(everything=True))
        return await self._outcome(
            lambda: self.service.update_from_disk(
                Path(u.model_path), flush_cache=u.flush_cache, version=u.weight_version
            ),
            drain=True,
            more={"num_paused_requests": 0},
        )

    async def update_version(self, request: Request) -> Response:
        u = UpdateVersion.from_json(await _body(request))

        def run() -> None:
            if u.abort_all_requests:
                self.service.engine.abort(everything=True)
            self.service.engine.set_version(u.new_version)

        return await self._outcome(run, more={"new_version": u.new_version})

    async def _outcome(self, run: Callable[[], None], *, drain: bool = False, more: Json | None = None) -> Response:
        try:
            await self._call(run, drain=drain)
        except ValueError as e:
            return _json(Outcome(success=False, message=str(e)).to_json() | (more or {}), 400)
        return _json(Outcome(success=True, message="Succeeded.").to_json() | (more or {}))


def make_app(worker: EngineWorker, args: argparse.Namespace) -> FastAPI:
    h = Handlers(worker, args)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    get, post, both = ["GET"], ["POST"], ["GET", "POST"]
    for path, methods, handler in (
        (wire.GENERATE, ["POST", "PUT"], h.generate),
        (wire.HEALTH, get, h.health),
        (HEALTH_GENERATE, get, h.health),
        (wire.MODEL_INFO, get, h.model_info),
        (wire.SERVER_INFO, get, h.server_info),
        (wire.FLUSH_CACHE, both, h.flush_cache),
        (wire.ABORT, post, h.abort),
        (wire.PAUSE, post, h.pause),
        (wire.CONTINUE, post, h.resume),
        (wire.BEGIN_UPDATE, post, h.begin_update),
        (wire.UPDATE_FROM_TENSOR, post, h.update_from_tensor),
        (wire.UPDATE_FROM_DISK, post, h.update_from_disk),
        (wire.END_UPDATE, post, h.end_update),
        (wire.UPDATE_VERSION, post, h.update_version),
        (wire.CHECKSUM, both, h.checksum),
    ):
        app.add_route(path, handler, methods=methods)
    app.add_exception_handler(ValueError, lambda _, e: _error(str(e)))
    app.add_exception_handler(RuntimeError, lambda _, e: _error(str(e), 500))
    return app


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="rollout.embedded.server", description="A CPU engine behind SGLang's HTTP surface."
    )
    p.add_argument("--model-path", required=True, help="Hugging Face directory, quantized or not")
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    p.add_argument("--weights", choices=("decoded", "codes"), default="decoded", help="what is kept of quantized ones")
    p.add_argument(
        "--activations", choices=("none", "fp8"), default="none", help="rounding of quantized linears' inputs"
    )
    p.add_argument("--max-total-tokens", type=int, default=65536, help="slots of the cache")
    p.add_argument("--max-running-requests", type=int, default=512)
    p.add_argument("--context-length", type=int, default=1024)
    p.add_argument("--weight-version", default="default")
    for flag, meaning in (
        ("--enable-return-routed-experts", "keep which experts each token was routed to, for requests that ask"),
        ("--enable-return-routed-weights", "keep the gate weights of routed experts, for requests that ask"),
        ("--disable-radix-cache", "feed every prompt whole, also where its beginning was fed before"),
    ):
        p.add_argument(flag, action="store_true", help=meaning)
    exact = "be exact with a deterministic trainer of so many tensor- and expert-tensor-parallel ranks"
    p.add_argument("--exact-parts", type=int, nargs=2, metavar=("TP", "ETP"), help=exact)
    return p.parse_args(argv)


def _listener(host: str, port: int) -> socket.socket:
    """Bound before the model is loaded, so that a port in use costs no wait."""
    # the protocol is named, or asyncio leaves Nagle's algorithm on: 40 ms for every small answer
    s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        s.bind((host, port))
    except OSError as e:
        s.close()
        raise ValueError(
            f"cannot listen on {host}:{port} ({e.strerror}): stop what uses it or give another port"
        ) from e
    return s


def serve(args: argparse.Namespace) -> None:
    """Blocks until the server is told to stop. Raises ValueError when it cannot start."""
    with _listener(args.host, args.port) as listener:
        _serve_on(listener, args)


def _serve_on(listener: socket.socket, args: argparse.Namespace) -> None:
    # One here: with a second OpenMP team in the process libgomp stops spinning, and the engine takes twice as long.
    torch.set_num_threads(1)
    limits = EngineLimits(
        max_running=args.max_running_requests,
        max_total_tokens=args.max_total_tokens,
        context_length=args.context_length,
        routes=args.enable_return_routed_experts,
        gates=args.enable_return_routed_weights,
        prefixes=not args.disable_radix_cache,
    )
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[args.dtype]
    service = Service(
        Path(args.model_path),
        limits,
        dtype=dtype,
        weights=args.weights,
        activations=args.activations,
        version=args.weight_version,
        ops=operations(args.exact_parts),
    )
    worker = EngineWorker(service, threads=args.threads)
    worker.start()
    config = uvicorn.Config(make_app(worker, args), log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    gc.freeze()  # modules and weights stay: a full collection of garbage need not look at them
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        worker.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """0 after an ordered stop; 1, with one sentence on stderr, when it cannot serve."""
    try:
        serve(parse(argv))
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
