"""The HTTP server of the embedded engine: `python -m rollout.embedded.server --model-path DIR --port P`.

`handlers.py` implements the endpoints, `limits.py` the bounds on requests.
"""

from __future__ import annotations

import argparse
import errno
import functools
import gc
import logging
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException

from miles_like import spans
from quant.hf_config import spec_from_hf
from rollout.config import PublishConfig
from rollout.embedded.device.cuda import check_flags, check_sizes, memory_is_enough, use_cuda
from rollout.embedded.engine.engine import EngineLimits
from rollout.embedded.model.exact_ops import operations
from rollout.embedded.ranks.crew import LIMIT_S, Crew
from rollout.embedded.ranks.gloo import RankLost
from rollout.embedded.ranks.part import opened
from rollout.embedded.server.access import Access, check_address
from rollout.embedded.server.handlers import Handlers, answered, http_error, served_name
from rollout.embedded.server.limits import (
    Arrivals,
    BodyLimits,
    BoundedProtocol,
    RequestLimits,
    affordable_connections,
    weights_bytes,
)
from rollout.embedded.server.log_limit import LogLimit
from rollout.embedded.server.openai_handlers import openai_answered
from rollout.embedded.server.openapi import HEALTH_GENERATE, OPENAPI
from rollout.embedded.server.routes_page import DOCS, ROOT
from rollout.embedded.server.service import Service, slices_of
from rollout.embedded.server.worker import EngineWorker
from rollout.server_key import ServerKey, given_key
from rollout.wire import endpoints
from rollout.wire.bodies import request_bytes
from rollout.wire.layer_states import FLAG
from rollout.wire.log_marks import LOADED, LOADS

DEVICES = ("cpu", "cuda")
READY = "ready"  # begins the line that a server prints once it answers
_BUCKET_BYTES = PublishConfig().bucket_bytes
SERVER_PROMPTS = 64  # prompts of the context length that fit in one request
_CANDIDATES = 128  # candidates per token that fit in a reply to so many prompts


def limits_of(args: argparse.Namespace, service: Service) -> RequestLimits:
    """Limits from the arguments; the defaults follow from the model and the context length."""
    given = vars(args)
    sizes = service.store.fp32_bytes()
    context = service.engine.limits.context_length
    weights = weights_bytes(
        bucket_bytes=given.get("bucket_bytes") or _BUCKET_BYTES, largest=max(sizes), total=sum(sizes)
    )
    return RequestLimits(
        request_bytes=given.get("max_request_bytes") or request_bytes(prompts=SERVER_PROMPTS, context_length=context),
        weights_bytes=weights,
        samples=given.get("max_samples_per_request") or RequestLimits.samples,
        entries=max(RequestLimits.entries, SERVER_PROMPTS * context * _CANDIDATES),
        connections=affordable_connections(given.get("max_connections") or RequestLimits.connections),
        arrival_s=given.get("arrival_timeout") or RequestLimits.arrival_s,
    )


def make_app(worker: EngineWorker, args: argparse.Namespace, limits: RequestLimits | None = None) -> FastAPI:
    """limits: None for those of `limits_of`."""
    h = Handlers(worker, args, limits or limits_of(args, worker.service))
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    get, post, both = ["GET"], ["POST"], ["GET", "POST"]
    for path, methods, handler in (
        (endpoints.GENERATE, ["POST", "PUT"], h.generate),
        (endpoints.HEALTH, get, h.health),
        (HEALTH_GENERATE, get, h.health),
        (endpoints.MODEL_INFO, get, h.model_info),
        (endpoints.SERVER_INFO, get, h.server_info),
        (endpoints.FLUSH_CACHE, both, h.flush_cache),
        (endpoints.ABORT, post, h.abort),
        (endpoints.PAUSE, post, h.pause),
        (endpoints.CONTINUE, post, h.resume),
        (endpoints.BEGIN_UPDATE, post, h.begin_update),
        (endpoints.UPDATE_FROM_TENSOR, post, h.update_from_tensor),
        (endpoints.UPDATE_FROM_DISTRIBUTED, post, h.update_from_distributed),
        (endpoints.INIT_GROUP, post, h.init_group),
        (endpoints.DESTROY_GROUP, post, h.destroy_group),
        (endpoints.UPDATE_FROM_DISK, post, h.update_from_disk),
        (endpoints.WEIGHTS_LAYOUT, get, h.slices.layout),
        (endpoints.PLAN_SLICES, post, h.slices.plan),
        (endpoints.JOIN_SLICES, post, h.slices.join),
        (endpoints.UPDATE_FROM_SLICES, post, h.slices.receive),
        (endpoints.SLICE_HASHES, get, h.slices.hashes),
        (endpoints.END_UPDATE, post, h.end_update),
        (endpoints.UPDATE_VERSION, post, h.update_version),
        (endpoints.CHECKSUM, both, h.checksum),
        (endpoints.RELEASE_MEMORY, both, h.release_memory),
        (endpoints.RESUME_MEMORY, both, h.resume_memory),
        (OPENAPI, get, h.openapi),
        (ROOT, get, h.page),
        (DOCS, get, h.page),
    ):
        app.add_route(path, answered(handler), methods=methods)
    for path, methods, handler in (
        (endpoints.OPENAI_MODELS, get, h.openai.models),
        (endpoints.OPENAI_MODELS + "/{model:path}", get, h.openai.model),
        (endpoints.OPENAI_COMPLETIONS, post, h.openai.completions),
        (endpoints.OPENAI_CHAT, post, h.openai.chat),
    ):
        app.add_route(path, openai_answered(handler), methods=methods)
    app.add_exception_handler(HTTPException, http_error)
    return app


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="rollout.embedded.server", description="Serve a model on CPUs or one GPU with SGLang's HTTP API."
    )
    p.add_argument("--model-path", required=True, help="Hugging Face directory, BF16 or quantized")
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument(
        "--key-file", type=Path, help="file with the key that requests must send, instead of MILES_LIKE_SERVER_KEY"
    )
    p.add_argument("--threads", type=int, default=2, help="torch threads of each rank")
    p.add_argument("--tp-size", type=_positive, default=1, help="tensor-parallel ranks (processes)")
    p.add_argument("--ep-size", type=_positive, default=1, help="expert-parallel groups of the ranks")
    p.add_argument(
        "--rank-timeout",
        type=_positive,
        default=int(LIMIT_S),
        help="seconds after which a rank that does not answer ends the server",
    )
    p.add_argument("--device", choices=DEVICES, default="cpu", help="cuda: the first GPU that this process sees")
    p.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="dtype of activations; default: float32, bfloat16 on cuda"
    )
    p.add_argument("--weights", choices=("decoded", "codes"), default="decoded", help="how quantized weights are kept")
    p.add_argument(
        "--activations", choices=("none", "fp8"), default="none", help="rounding of quantized linears' inputs"
    )
    p.add_argument("--max-total-tokens", type=int, default=65536, help="token slots in the KV cache")
    p.add_argument("--max-running-requests", type=int, default=512)
    p.add_argument("--context-length", type=int, default=1024)
    p.add_argument("--served-model-name", help="model name in OpenAI's endpoints; default: the directory's name")
    p.add_argument("--weight-version", default="default")
    p.add_argument(
        "--traces", nargs=2, metavar=("DIRECTORY", "NAME"), help="record spans in this folder as the process NAME"
    )
    for flag, unit in (
        (
            "--max-request-bytes",
            (
                "limit of a request's bytes, except for weights; default: 64 prompts of the context length, at "
                "least 1 MiB"
            ),
        ),
        ("--max-samples-per-request", f"limit of samples in one request; default: {RequestLimits.samples}"),
        ("--bucket-bytes", f"limit of tensor bytes that a publisher sends in one request; default: {_BUCKET_BYTES}"),
        ("--max-connections", f"limit of open connections; default: {RequestLimits.connections}"),
        ("--arrival-timeout", f"seconds for a request to arrive; default: {RequestLimits.arrival_s:g}"),
    ):
        p.add_argument(flag, type=_positive, help=unit)
    for flag, meaning in (
        ("--enable-return-routed-experts", "keep the expert ids of each token, for requests that ask for them"),
        ("--enable-return-routed-weights", "keep the gate weights of routed experts, for requests that ask for them"),
        (FLAG, "return the residual stream of a scored prompt at every layer to requests that ask for it"),
        ("--disable-radix-cache", "disable the prefix cache: feed every prompt completely"),
    ):
        p.add_argument(flag, action="store_true", help=meaning)
    exact = "compute the same bits as a deterministic trainer with TP tensor- and ETP expert-tensor-parallel ranks"
    p.add_argument("--exact-parts", type=int, nargs=2, metavar=("TP", "ETP"), help=exact)
    return p.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _listener(host: str, port: int) -> socket.socket:
    """Binds the socket before the model is loaded, so that a port in use is reported at once. Raises ValueError."""
    if not 0 < port < 1 << 16:
        raise ValueError(f"port {port} is invalid: choose one from 1 to 65535")
    # with an explicit protocol asyncio disables Nagle's algorithm, which would delay every small answer by 40 ms
    s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        s.bind((host, port))
    except (OSError, TypeError, ValueError) as e:  # TypeError: NUL in the host; ValueError: a label of 64 letters
        s.close()
        raise ValueError(f"cannot listen on {host!r}:{port}: {_bind_error(e, port)}") from e
    return s


def _bind_error(e: Exception, port: int) -> str:
    if not isinstance(e, OSError):
        return f"{e}; choose an address of this machine"
    code = None if isinstance(e, socket.gaierror) else e.errno
    if code == errno.EADDRINUSE:
        return f"{e.strerror}; stop the process that uses the port, or choose another port"
    if code in (errno.EACCES, errno.EPERM):
        return f"{e.strerror}; port {port} requires permissions that this user lacks: choose one from 1024 on"
    return f"{e.strerror}; choose an address of this machine"


class _Server(uvicorn.Server):
    """Prints a line once it answers."""

    def __init__(self, config: uvicorn.Config, ready: str) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._ready, flush=True)


def _ready(listener: socket.socket, service: Service, name: str) -> str:
    """Where the server answers, with what: `ready: URL MODEL FORMAT, context N`."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return f"{READY}: {url} {name} {_format_of(service.config)}, context {service.engine.limits.context_length}"


def _format_of(config: Mapping[str, Any]) -> str:
    """Of the stored weights."""
    if (spec := spec_from_hf(config)) is not None:
        return spec.format.value.upper()
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return {"bfloat16": "BF16", "float32": "FP32", "float16": "FP16"}.get(dtype, dtype)


def check_address_free(host: str, port: int, key: ServerKey | None) -> None:
    """Raises ValueError, as `serve` does, where a server could not listen at this moment, or would need a key."""
    with _listener(host, port) as listener:
        check_address(listener.getsockname()[0], key)


def check_device(device: str) -> None:
    """Raises ValueError for "cuda" where this process sees no GPU."""
    if device == "cuda":
        use_cuda()


def serve(args: argparse.Namespace, key: ServerKey | None = None) -> None:
    """Blocks until the server is stopped. key: required of requests. Raises ValueError when the server cannot start,
    and for an address beyond loopback without a key, and RankLost when one of its ranks has ended."""
    if args.device == "cuda":
        _check_cuda(args)
    if args.tp_size > 1 or args.ep_size > 1:
        slices_of(opened(Path(args.model_path)), tp_size=args.tp_size, ep_size=args.ep_size)
    crew = Crew(args.tp_size, threads=args.threads, limit_s=args.rank_timeout)  # forks: before anything is opened
    if (traced := vars(args).get("traces")) is not None:
        spans.begin(Path(traced[0]), traced[1])
    try:
        with _listener(args.host, args.port) as listener:
            check_address(listener.getsockname()[0], key)
            _serve_on(listener, args, key, crew)
    finally:
        crew.stop()
        spans.flush()
    if crew.failure:
        raise RankLost(crew.failure)


def _check_cuda(args: argparse.Namespace) -> None:
    """Raises ValueError, before the weights are loaded, where the server cannot run on a GPU."""
    check_flags(
        dtype=args.dtype or "bfloat16",
        tp_size=args.tp_size,
        ep_size=args.ep_size,
        activations=args.activations,
        exact=args.exact_parts,
    )
    check_sizes(slices_of(opened(Path(args.model_path)), tp_size=1, ep_size=1).arch)
    check_device(args.device)


def _serve_on(listener: socket.socket, args: argparse.Namespace, key: ServerKey | None, crew: Crew) -> None:
    # One thread here: with a second OpenMP team in the process libgomp stops spinning, and the engine is half as fast.
    torch.set_num_threads(1)
    limits = EngineLimits(
        max_running=args.max_running_requests,
        max_total_tokens=args.max_total_tokens,
        context_length=args.context_length,
        routes=args.enable_return_routed_experts,
        gates=args.enable_return_routed_weights,
        prefixes=not args.disable_radix_cache,
        states=args.enable_layer_states,
    )
    by_default = "bfloat16" if args.device == "cuda" else "float32"
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[args.dtype or by_default]
    print(f"{LOADS}: {args.model_path}", flush=True)
    with memory_is_enough(args.max_total_tokens), spans.span("load"):
        service = Service(
            Path(args.model_path),
            limits,
            dtype=dtype,
            weights=args.weights,
            activations=args.activations,
            version=args.weight_version,
            ops=operations(args.exact_parts),
            crew=crew,
            ep_size=args.ep_size,
            device=args.device,
        )
    print(LOADED, flush=True)
    worker = EngineWorker(service, threads=args.threads)
    bounds = limits_of(args, service)
    app = BodyLimits(make_app(worker, args, bounds), bounds)
    config = uvicorn.Config(
        Access(app, host=args.host, address=listener.getsockname()[0], key=key),
        http=functools.partial(BoundedProtocol, arrivals=Arrivals(bounds)),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    log_limit = LogLimit()
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(log_limit)
    server = _Server(config, _ready(listener, service, served_name(args)))

    def lost(sentence: str) -> None:
        worker.end(RankLost(sentence))
        server.should_exit = True

    crew.on_failure = lost
    worker.start()
    gc.freeze()  # exclude modules and weights, which stay, from garbage collection
    try:
        if not crew.failure:  # else it was lost before it had this callback
            server.run(sockets=[listener])
    finally:
        worker.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 after an orderly stop; 1, with a message on stderr, when the server cannot start or lost a rank."""
    try:
        args = parse(argv)
        key = given_key(vars(args).pop("key_file"))
        serve(args, key)
    except (ValueError, RankLost) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0
