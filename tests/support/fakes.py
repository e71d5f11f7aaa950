"""Hand-made stand-ins at the seams: an engine in this process, and a server that speaks SGLang's HTTP on loopback.

The server keeps SGLang 0.5.23's rules about sessions, pauses and flushes, and has switches to misbehave.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import pickle
import socket
import ssl
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams, VersionSpan
from rollout.embedded.updates.segments import read_segment
from rollout.sglang.samples import RoutingShape, empty_sample
from rollout.wire.checksum import engine_checksum, tensor_checksum
from rollout.wire.control import decode_safetensors
from rollout.wire.generate import GenerateReply, GenerateRequest, WireSpan, reply_id
from tests.support.stock_pickles import opened

ROUTING = RoutingShape(num_layers=3, moe_layers=(1, 2), top_k=2, num_experts=16)


def make_prompt(name: str, *, tokens: Sequence[int] = (5, 6, 7), answer: str = "1") -> Prompt:
    return Prompt(id=name, token_ids=tuple(tokens), answer=answer, text=name)


class FakeEngine:
    """A RolloutEngine whose response to a prompt is its own tokens; notes what it was asked for.

    aborts: how often each sample comes back aborted, the first time before its first token, then with a token more.
    A request that waits for `delay_s` when `abort_all` comes returns no new token.
    """

    def __init__(self, *, version: int = 0, delay_s: float = 0.0, aborts: int = 0) -> None:
        self.version = version
        self.delay_s = delay_s
        self.aborts = aborts
        self.asked: list[str] = []
        self.continued: list[tuple[str, int, SamplingParams]] = []  # sample, its tokens, how it was to go on
        self.error: Exception | None = None
        self.cancelled = False
        self.paused = False
        self.closed = False
        self.under_way = 0  # calls
        self._aborted: Counter[str] = Counter()
        self._all_aborted = asyncio.Event()

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> list[SampleGroup]:
        self.asked += [p.id for p in prompts]
        aborted = await self._take_time()
        return [
            SampleGroup(
                prompt=p,
                samples=tuple(empty_sample(p, i) if aborted else self._sample(p.id, i, p.token_ids) for i in range(n)),
            )
            for p in prompts
        ]

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        assert not environment, "an environment has no place in a response that repeats its prompt"
        self.continued.append((sample.name, len(sample.token_ids), params))
        if await self._take_time():
            return replace(sample, finish=Finish.ABORT)
        return self._sample(sample.prompt_id, sample.index, sample.token_ids[~sample.loss_mask].tolist())

    async def _take_time(self) -> bool:
        """Whether it was cut short."""
        if self.error is not None:
            raise self.error
        self.under_way += 1
        try:
            async with asyncio.timeout(self.delay_s or None):
                await (self._all_aborted.wait() if self.delay_s else asyncio.sleep(0))
            return bool(self.delay_s)
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            self.under_way -= 1

    async def abort_all(self) -> None:
        self._all_aborted.set()
        self._all_aborted = asyncio.Event()

    def _sample(self, prompt_id: str, i: int, prompt: Sequence[int]) -> Sample:
        name, k = f"{prompt_id}/{i}", len(prompt)
        over = self._aborted[name] == self.aborts
        r = k if over else min(self._aborted[name], k)
        self._aborted[name] += not over
        mask = torch.tensor([False] * k + [True] * r)
        return Sample(
            prompt_id=prompt_id,
            index=i,
            token_ids=torch.tensor([*prompt, *prompt[:r]]),
            loss_mask=mask,
            logprobs=torch.where(mask, -1.0, 0.0),
            routing=None,
            versions=(VersionSpan(self.version, 0, r),) if r else (),
            finish=Finish.STOP if over else Finish.ABORT,
            text=f"{prompt_id}:{i}",
        )

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def weight_version(self) -> int:
        return self.version

    async def close(self) -> None:
        self.closed = True


class FakeServer:
    """An SGLang server of made-up tokens on a loopback port, as a context manager.

    fault (endpoint -> kind, or a function of the body that tells it) makes an endpoint misbehave:
    "hang", "reset", "http_400", "http_500", "refuse", "html", "large" (128 MiB), "gzip" (128 MiB in 128 KiB).
    certificate: a PEM file of key and certificate, for https.
    forget: keys left out of a /generate reply's meta_info. calls: (endpoint, body) of every request, in order.
    """

    def __init__(
        self,
        *,
        version: str = "0",
        weights: dict[str, torch.Tensor] | None = None,
        busy: bool = False,
        certificate: Path | None = None,
    ) -> None:
        self.version = version
        self.weights = dict(weights or {})
        self.busy = busy  # requests are running: a cache paused in place cannot be flushed
        self.fault: dict[str, str | Callable[[Any], str]] = {}
        self.forget: set[str] = set()
        self.abort = False
        self.ignores_start = False  # routes of all rows come back, whichever were asked for
        self.corrupt = False  # store other bytes than were sent
        self.rank = 0  # whose entry of a request with several it loads
        self.paused = ""
        self.triton: bool | None = None  # an embedded server's way of decoding; None: a stock server's reply
        self.in_session = False
        self.calls: list[tuple[str, Any]] = []
        self.started_ts = time.time()
        self._released = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are two writes

            def do_GET(self) -> None:
                fake._serve(self, {})

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fake._serve(self, json.loads(raw) if raw else {})

            def log_message(self, *_: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        if certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certificate)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
            self.url = self.url.replace("http", "https")

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._http.shutdown()
        self._http.server_close()

    def endpoints(self) -> list[str]:
        return [endpoint for endpoint, _ in self.calls]

    def _serve(self, h: BaseHTTPRequestHandler, body: Any) -> None:
        endpoint = h.path.partition("?")[0]
        self.calls.append((endpoint, body))
        fault = self.fault.get(endpoint)
        if callable(fault):
            fault = fault(body)
        if fault == "reset":
            h.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            h.connection.close()
            h.close_connection = True
            return
        if fault == "hang":
            self._released.wait(20)
            h.close_connection = True
            return
        if fault in ("large", "gzip"):
            self._flood(h, fault)
            return
        out: Any
        if fault == "http_400":
            status, out = 400, {"error": {"message": "the request is wrong"}}
        elif fault == "http_500":
            status, out = 500, {"error": {"message": "the engine broke"}}
        elif fault == "refuse":
            status, out = 200, {"success": False, "message": "not now"}
        elif fault == "html":
            status, out = 200, b"<html>a proxy's page</html>"
        else:
            status, out = self._answer(endpoint, body)
        raw = out if isinstance(out, bytes) else json.dumps(out).encode()
        h.send_response(status)
        h.send_header("Content-Length", str(len(raw)))
        h.end_headers()
        h.wfile.write(raw)

    def _flood(self, h: BaseHTTPRequestHandler, how: str) -> None:
        h.close_connection = True
        h.send_response(200)
        h.send_header("Content-Type", "application/json")
        if how == "gzip":
            h.send_header("Content-Encoding", "gzip")
        h.end_headers()
        part = bytes(1 << 20)
        pack = zlib.compressobj(wbits=31)
        with contextlib.suppress(OSError):  # the client closes
            for _ in range(128):
                h.wfile.write(pack.compress(part) if how == "gzip" else part)
            h.wfile.write(pack.flush() if how == "gzip" else b"")

    def _answer(self, endpoint: str, body: Any) -> tuple[int, Any]:
        name = endpoint.strip("/")
        return getattr(self, f"_{name}", lambda _: (404, {"detail": "Not Found"}))(body)

    def _health(self, _: Any) -> tuple[int, Any]:
        return 200, b""

    def _model_info(self, _: Any) -> tuple[int, Any]:
        return 200, {"model_path": "tiny", "weight_version": self.version, "is_generation": True}

    def _server_info(self, _: Any) -> tuple[int, Any]:
        state = {"weight_version": self.version, "started_ts": self.started_ts}
        return 200, {"version": "0.5.23", "max_total_num_tokens": 4096} | state

    def _generate(self, body: Any) -> tuple[int, Any]:
        try:
            request = GenerateRequest.from_json(body)
        except ValueError as e:
            return 400, {"error": {"message": str(e)}}
        rids = request.rid or ("r",) * len(request.input_ids)
        out = [
            self._sample(request, reply_id(rid, i, request.n), ids, sampling, i)
            for rid, ids, sampling in zip(rids, request.input_ids, request.sampling, strict=True)
            for i in range(request.n)
        ]
        return 200, out[0] if request.single and request.n == 1 else out

    def _sample(
        self, request: GenerateRequest, rid: str, ids: tuple[int, ...], sampling: SamplingParams, i: int
    ) -> Any:
        """Tokens drawn from (seed, i) alone; later samples are longer, so that lengths differ."""
        draw = np.random.default_rng([sampling.sampling_seed or 0, i])
        r = min(2 + i, sampling.max_new_tokens)
        rows = len(ids) + r - 1 - (0 if self.ignores_start else request.routed_experts_start_len)
        experts = np.zeros((rows, ROUTING.num_layers, ROUTING.top_k), "<i4")
        experts[:, 1:] = np.array([3, 15])
        reply = GenerateReply(
            rid=rid,
            output_ids=draw.integers(0, 100, r),
            logprobs=-draw.random(r, dtype=np.float32),
            finish=Finish.ABORT if self.abort else Finish.LENGTH,
            prompt_tokens=len(ids),
            weight_version=self.version,
            weight_versions=(WireSpan(self.version, 0, r),),
            routed_experts=base64.b64encode(experts.tobytes()).decode() if request.return_routed_experts else None,
        ).to_json()
        for key in self.forget:
            reply["meta_info"].pop(key, None)
        return reply

    def _pause_generation(self, body: Any) -> tuple[int, Any]:
        self.paused = body.get("mode", "abort")
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _continue_generation(self, _: Any) -> tuple[int, Any]:
        self.paused = ""
        decodes = {} if self.triton is None else {"triton": self.triton}
        return 200, {"message": "Generation continued successfully.", "status": "ok"} | decodes

    def _abort_request(self, _: Any) -> tuple[int, Any]:
        return 200, b""

    def _flush_cache(self, _: Any) -> tuple[int, Any]:
        if self.busy and self.paused in ("", "in_place"):
            return 400, b"Flush cache failed."
        return 200, b"Cache flushed."

    def _begin_weight_update(self, body: Any) -> tuple[int, Any]:
        if self.in_session and body.get("weight_version") is None:  # which stock servers do not read
            return 400, {"success": False, "message": "a weight update is open"}
        self.in_session = True
        return 200, {"success": True, "message": ""}

    def _end_weight_update(self, _: Any) -> tuple[int, Any]:
        if not self.in_session:
            return 400, {"success": False, "message": "no weight update is open"}
        self.in_session = False
        return 200, {"success": True, "message": ""}

    def _update_weights_from_tensor(self, body: Any) -> tuple[int, Any]:
        if not self.in_session:
            return 400, {"success": False, "message": "no weight update is open"}
        payload = body["serialized_named_tensors"][0]
        if body["load_format"] == "safetensors":
            tensors: Any = decode_safetensors(payload)
        elif body["load_format"] == "segment":
            tensors = read_segment(payload, 1 << 40)
        elif body["load_format"] == "flattened_bucket":
            every = [opened(one) for one in body["serialized_named_tensors"]]  # each rank opens its own entry
            tensors = every[self.rank]
        else:
            tensors = pickle.loads(base64.b64decode(payload))
        self.weights |= {n: torch.zeros_like(t) if self.corrupt else t for n, t in tensors}
        self.version = body["weight_version"] or self.version
        if body["flush_cache"] and self._flush_cache({})[0] != 200:
            return 400, {"success": False, "message": "Flush cache failed."}
        return 200, {"success": True, "message": ""}

    def _update_weights_from_disk(self, body: Any) -> tuple[int, Any]:
        self.weights = {
            name: tensor
            for file in sorted(Path(body["model_path"]).glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        self.version = body["weight_version"] or self.version
        return 200, {"success": True, "message": "", "num_paused_requests": 0}

    def _update_weight_version(self, body: Any) -> tuple[int, Any]:
        self.version = body["new_version"]
        return 200, {"success": True, "message": "", "new_version": self.version}

    def _weights_checker(self, _: Any) -> tuple[int, Any]:
        sums = {n: tensor_checksum(n, t) for n, t in self.weights.items()}
        engine = engine_checksum(sums)
        rank = {"checksums": sums, "per_gpu_checksum": hashlib.sha256(engine.encode()).hexdigest()}
        return 200, {"success": True, "message": "", "ranks": [rank], "per_engine_checksum": engine}


def wait_until(condition: Any, timeout_s: float = 5.0) -> bool:
    """Whether `condition()` became true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
