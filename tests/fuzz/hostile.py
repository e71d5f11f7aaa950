"""Hostile HTTP requests: those that once ended or hung the engine, each with a name, and random ones of many kinds."""

from __future__ import annotations

import base64
import json
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import safetensors.torch
import torch

from rollout.wire import endpoints
from tests.fuzz import mutate

_HTTP = httpx.Client(
    trust_env=False, verify=False, limits=httpx.Limits(max_keepalive_connections=8, keepalive_expiry=2)
)
ANSWER_S = 20.0  # a request without an answer after this hangs


@dataclass(frozen=True)
class Hostile:
    """One request. `raw`: bytes for a socket in place of an HTTP client. `leaves`: does not wait for its answer."""

    kind: str
    path: str = endpoints.GENERATE
    body: bytes = b""
    method: str = "POST"
    raw: bytes | None = None
    leaves: bool = False


@dataclass(frozen=True)
class Answer:
    """status 0: the connection was closed without one; -1: none came in `ANSWER_S`; -2: the client did not wait."""

    status: int
    text: str = ""

    @property
    def is_sentence(self) -> bool:
        try:
            body = json.loads(self.text)
        except ValueError:
            return self.text.startswith("Cache")
        if not isinstance(body, dict):
            return False
        error = body.get("error")
        return bool(error["message"] if isinstance(error, dict) else body.get("message"))


def send(url: str, hostile: Hostile) -> Answer:
    if hostile.raw is not None:
        return _send_raw(url, hostile)
    timeout = httpx.Timeout(0.05 if hostile.leaves else ANSWER_S, connect=ANSWER_S)
    try:
        reply = _HTTP.request(hostile.method, url + hostile.path, content=hostile.body, timeout=timeout)
    except httpx.TimeoutException:
        return Answer(-2 if hostile.leaves else -1)
    except (httpx.HTTPError, httpx.InvalidURL):
        return Answer(0)
    return Answer(reply.status_code, reply.text)


def _send_raw(url: str, hostile: Hostile) -> Answer:
    host, _, port = url.removeprefix("http://").rpartition(":")
    assert hostile.raw is not None
    try:
        with socket.create_connection((host, int(port)), ANSWER_S) as s:
            s.sendall(hostile.raw)
            if hostile.leaves:
                return Answer(-2)
            s.shutdown(socket.SHUT_WR)
            data = b""
            while part := s.recv(65536):
                data += part
    except TimeoutError:
        return Answer(-1)
    except OSError:
        return Answer(0)
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return Answer(status, body.decode("utf-8", "replace"))


def generate(kind: str, *, leaves: bool = False, **changes: Any) -> Hostile:
    """`changes` of a good request; `sampling_params` are merged."""
    params = {"max_new_tokens": 4} | changes.pop("sampling_params", {})
    body = {"input_ids": [5, 9, 33], "sampling_params": params} | changes
    return Hostile(kind, body=json.dumps({k: v for k, v in body.items() if v is not ...}).encode(), leaves=leaves)


def control(kind: str, path: str, **body: Any) -> Hostile:
    return Hostile(kind, path, json.dumps(body).encode())


# ---- directories for /update_weights_from_disk


def directory(served: Path, where: Path, change: Callable[[Path], object]) -> Path:
    """Links to the files of a served model, and what `change` makes of them."""
    where.mkdir(parents=True)
    for file in served.iterdir():
        (where / file.name).write_bytes(file.read_bytes())
    change(where)
    return where


def config_with(**changes: Any) -> Callable[[Path], object]:
    def change(at: Path) -> None:
        file = at / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def config_as(text: str) -> Callable[[Path], object]:
    return lambda at: (at / "config.json").write_text(text)


def _config_replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(at: Path) -> None:
        (at / "config.json").unlink()
        make(at / "config.json")

    return change


def _directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


DIRECTORIES: dict[str, Callable[[Path], object]] = {
    "config is a directory": _config_replaced(lambda p: p.mkdir()),
    "config is a FIFO": _config_replaced(os.mkfifo),
    "weights are a directory": lambda at: _directory(at / "model.safetensors"),
    "index is a directory": lambda at: _directory(at / "model.safetensors.index.json"),
    "layer_types 5": config_with(layer_types=5),
    "rope_scaling a list": config_with(rope_scaling=[1]),
    "rope_theta a list": config_with(rope_theta=[1], rope_parameters=None, rope_scaling=None),
    "architectures 5": config_with(architectures=5),
    "rms_norm_eps a list": config_with(rms_norm_eps=[1]),
    "n_group 0": config_with(n_group=0),
    "nested 50,000 deep": config_as("[" * 50_000),
    "negative sizes": config_with(vocab_size=-128, hidden_size=-64),
}


def killers(served: Path, where: Path) -> dict[str, list[Hostile]]:
    """The 28 kinds that ended or hung the engine of a server without bounds. `served`: its model's directory; `where`:
    an empty folder for others."""
    far = 2**63
    found = {
        "rid a number, then an abort": [
            generate("rid", rid=[7], leaves=True, sampling_params={"max_new_tokens": 100}),
            control("abort", endpoints.ABORT, rid="x"),
        ],
        "rid a number, and its client leaves": [
            generate("rid", rid=[7], leaves=True, sampling_params={"max_new_tokens": 120, "n": 64}),
        ],
        "stop_token_ids 2**63": [generate("stop", sampling_params={"stop_token_ids": [far]})],
        "top_k 2**63": [generate("top_k", sampling_params={"top_k": far})],
        "sample_index 2**63": [generate("index", sample_index=far)],
        "3,000,000 stop tokens": [generate("stops", sampling_params={"stop_token_ids": [1] * 3_000_000})],
        "n 10**13": [generate("n", sampling_params={"n": 10**13})],
        "n 2**64 - 1": [generate("n", sampling_params={"n": 2**64 - 1})],
        "n 200,000": [generate("n", sampling_params={"n": 200_000})],
        "n 10**8": [generate("n", sampling_params={"n": 10**8})],
        "1,000 prompts of 1,000 samples": [generate("pn", input_ids=[[5]] * 1000, sampling_params={"n": 1000})],
        "a text of 20 MB": [generate("text", input_ids=..., text="word " * 4_000_000)],
        "100,000 texts": [generate("texts", input_ids=..., text=["word"] * 100_000)],
        "a path of 5,000 letters": [control("disk", endpoints.UPDATE_FROM_DISK, model_path="/" + "a" * 5000)],
        "/dev/zero": [control("disk", endpoints.UPDATE_FROM_DISK, model_path="/dev/zero")],
        "a file": [control("disk", endpoints.UPDATE_FROM_DISK, model_path=str(served / "config.json"))],
    }
    for name, change in DIRECTORIES.items():
        at = directory(served, where / name.replace(" ", "_").replace(",", ""), change)
        found[name] = [control("disk", endpoints.UPDATE_FROM_DISK, model_path=str(at))]
    return found


# ---- random ones

_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 7, 64, 65, 127, 128, 129, 4096, 4097, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30),
    *(0.0, 0.5, -0.5, 1e-7, 1e-40, 1e308, "", "x", "1", "a" * 300, "\0", None, True, False),
    *([], [[]], [1], [-1], [200_000], ["a"], [None], [[1], []], [[1], "a"], {}, {"a": 1}, [1] * 70),
)
_TOP = (
    *("input_ids", "text", "rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *(
        "return_routed_experts",
        "routed_experts_start_len",
        "return_routed_weights",
        "sample_index",
        "stream",
        "priority",
    ),
)
_SAMPLING = (
    *("max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "sampling_seed", "n", "ignore_eos", "stop"),
    *("min_p", "regex", "repetition_penalty", "min_new_tokens", "logit_bias", "no_stop_trim", "skip_special_tokens"),
    *("stream_interval", "beam_width", "nonsense"),
)
_HARMLESS = (  # control routes, with nothing that a legitimate client would notice
    (endpoints.ABORT, {"rid": "unknown"}),
    (endpoints.CONTINUE, {}),
    (endpoints.BEGIN_UPDATE, {"selector": "all"}),
    (endpoints.UPDATE_FROM_TENSOR, {"serialized_named_tensors": ["AAAA"], "load_format": "safetensors"}),
    (endpoints.UPDATE_FROM_DISK, {"model_path": "/nowhere"}),
    (endpoints.CHECKSUM, {"action": "checksum"}),
    (endpoints.FLUSH_CACHE, {}),
    (endpoints.RESUME_MEMORY, {"tags": ["kv_cache"]}),  # a release would be obeyed, as a pause would
)
_RAW: tuple[bytes, ...] = (
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,
    b"GARBAGE\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000000\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n{}",
    b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(9000)) + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%ff%00%0d HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50,
    b"POST /generate HTTP/9.9\r\n\r\n",
)


class Maker:
    """Random hostile requests, a function of the seed."""

    def __init__(self, served: Path, where: Path) -> None:
        self.killers = [h for found in killers(served, where).values() for h in found]
        self.kinds: tuple[Callable[[random.Random], Hostile], ...] = (
            *(self._field, self._field, self._field, self._option, self._option, self._option),
            *(self._control, self._bytes, self._raw, self._weights, self._leaving, self._killer),
        )

    def draw(self, rng: random.Random) -> Hostile:
        return rng.choice(self.kinds)(rng)

    def _value(self, rng: random.Random) -> Any:
        return rng.choice(_VALUES) if rng.random() < 0.7 else _json(mutate.value(rng))

    def _field(self, rng: random.Random) -> Hostile:
        key = rng.choice(_TOP)
        changes = {key: self._value(rng)}
        if key == "text":
            changes["input_ids"] = ...
        return generate(f"field {key}", **_merged(changes))

    def _option(self, rng: random.Random) -> Hostile:
        key = rng.choice(_SAMPLING)
        return generate(f"option {key}", sampling_params={key: self._value(rng)})

    def _control(self, rng: random.Random) -> Hostile:
        path, body = rng.choice(_HARMLESS)
        body = dict(body)
        if rng.random() < 0.6 and path not in (endpoints.ABORT,):
            body[rng.choice([*body, "flush_cache", "weight_version", "load_format", "unknown"])] = self._value(rng)
        if path == endpoints.FLUSH_CACHE:
            query = rng.choice(("", "?timeout=0", "?timeout=nan", "?timeout=1e999", "?timeout=x", "?timeout=-1"))
            return Hostile("flush", path + query, method=rng.choice(("GET", "POST")))
        if path == endpoints.UPDATE_FROM_DISK and body.get("abort_all_requests"):
            del body["abort_all_requests"]
        return Hostile(f"control {path}", path, json.dumps(body).encode())

    def _bytes(self, rng: random.Random) -> Hostile:
        body = bytearray(generate("bytes").body)
        for _ in range(rng.randrange(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        if rng.random() < 0.3:
            body = bytearray(rng.choice((b"", b"null", b"[]", b"5", b"[" * 100_000, b"\xff\xfe", b'{"a":' * 5000)))
        method = rng.choice(("POST", "POST", "PUT", "GET", "DELETE", "PATCH"))
        path = rng.choice((endpoints.GENERATE, endpoints.GENERATE, "/v1/models", "/", "/generate/", "/docs"))
        return Hostile("bytes", path, bytes(body), method)

    def _raw(self, rng: random.Random) -> Hostile:
        return Hostile("raw", raw=rng.choice(_RAW), leaves=rng.random() < 0.3)

    def _weights(self, rng: random.Random) -> Hostile:
        dtype = rng.choice(("F4", "F8_E8M0", "F64", "BF16", "X9", "F32"))
        shape = rng.choice(([2, 2], [-1, -4], [2**40, 2**40], [], [0]))
        header = json.dumps({"model.norm.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, 16]}}).encode()
        file = len(header).to_bytes(8, "little") + header + b"\0" * 16
        if rng.random() < 0.3:
            file = safetensors.torch.save({"model.norm.weight": torch.full((64,), float("nan"))})
        if rng.random() < 0.3:
            file = file[: rng.randrange(len(file))]
        body = {"serialized_named_tensors": [base64.b64encode(file).decode()], "load_format": "safetensors"}
        return control("weights", endpoints.UPDATE_FROM_TENSOR, **body, flush_cache=False)

    def _leaving(self, rng: random.Random) -> Hostile:
        """Its name is the beginning of legitimate ones: they must go on."""
        params = {"max_new_tokens": 100, "n": rng.randrange(1, 9), "ignore_eos": True}
        return generate("leaves", rid=rng.choice(("c", "client", "client-1")), sampling_params=params, leaves=True)

    def _killer(self, rng: random.Random) -> Hostile:
        return rng.choice(self.killers)


def _json(value: Any) -> Any:
    """`value` without what JSON has not."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)[:100]
    return value


def _merged(changes: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters that are no object cannot be merged with the good ones."""
    params = changes.get("sampling_params")
    if "sampling_params" in changes and not isinstance(params, dict):
        return {"sampling_params": {}, "priority": 1} | {"input_ids": [5], "sampling_params": {"stop": [params]}}
    return changes
