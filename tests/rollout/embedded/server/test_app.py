"""What the server process has beside the contract of rollout engines (test_embedded_contract.py): text, exact
repetition, its own encoding and hashes of weights, sentences.

Why it must hold: one client speaks to this server and to a stock one; a silent default would be trained on. Not
covered: streaming and the endpoints that are refused, and load over hours.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from miles_like.types import NamedTensor
from rollout.embedded.server.app import main
from rollout.sglang import client
from rollout.sglang.client import SGLangClient
from rollout.wire.checksum import engine_checksum, tensor_checksum
from rollout.wire.control import encode_safetensors
from tests.support.embedded_fixtures import oracle, save
from tests.support.spawn import free_port

A = [5, 9, 33, 2, 71]
LONG = {"max_new_tokens": 240, "ignore_eos": True, "sampling_seed": 3}


def start(path: Path, port: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rollout.embedded.server", "--model-path", str(path), "--port", str(port)]
    return subprocess.Popen(
        [*command, "--threads", "1", "--context-length", "256", "--enable-return-routed-experts", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = save(oracle(), tmp_path_factory.mktemp("hf"))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(where / "tokenizer.json"))
    return where


@pytest.fixture(scope="module")
def http(path: Path) -> Iterator[httpx.Client]:
    port = free_port()
    process = start(path, port, "--weight-version", "0", "--max-running-requests", "16")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
        try:
            _await_health(client, process)
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]  # two about the weights, and what users wait for
            assert lines[2] == f"ready: http://127.0.0.1:{port} {path.name} FP32, context 256\n", lines
            yield client
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) in (0, -signal.SIGTERM), process.stderr and process.stderr.read()


def _await_health(client: httpx.Client, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        assert process.poll() is None, process.stderr and process.stderr.read()
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the server did not come up in a minute")


def generate(http: httpx.Client, ids: list[Any], params: dict[str, Any], **more: Any) -> Any:
    reply = http.post("/generate", json={"input_ids": ids, "sampling_params": params} | more)
    assert reply.status_code == 200, reply.text
    return reply.json()


class Background(threading.Thread):
    """A request under way while the test does something else."""

    def __init__(self, http: httpx.Client, **more: Any) -> None:
        super().__init__()
        self.http, self.more = http, more
        before = running(http)
        self.start()
        until = time.monotonic() + 20
        while running(http) == before and time.monotonic() < until:
            time.sleep(0.005)

    def run(self) -> None:
        self.reply = generate(self.http, A, LONG, **self.more)

    def result(self) -> Any:
        self.join(30)
        assert not self.is_alive()
        return self.reply


def running(http: httpx.Client) -> int:
    return int(http.get("/server_info").json()["internal_states"][0]["running"])


def test_text_goes_in_and_comes_out(http: httpx.Client) -> None:
    """Without the token that ends it."""
    params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    free = generate(http, A, params)
    assert free["text"].split() == [f"w{i}" for i in free["output_ids"]]
    by_text = http.post("/generate", json={"text": "w5 w9 w33 w2 w71", "sampling_params": params}).json()
    assert by_text["output_ids"] == free["output_ids"]
    stopped = generate(http, A, params | {"stop_token_ids": [free["output_ids"][1]], "ignore_eos": False})
    assert len(stopped["text"].split()) == len(stopped["output_ids"]) - 1


def test_rows_of_routes_from_a_start(http: httpx.Client) -> None:
    params = {"max_new_tokens": 6, "sampling_seed": 1, "ignore_eos": True, "temperature": 1.0}
    whole, tail = (
        np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), "<i4").reshape(-1, 3, 4)
        for start in (0, 4)
        for reply in [generate(http, A, params, return_routed_experts=True, routed_experts_start_len=start)]
    )
    assert len(whole) == 5 + 6 - 1
    np.testing.assert_array_equal(tail, whole[4:])


def test_a_sample_of_several_is_the_one_that_its_seed_gives(http: httpx.Client) -> None:
    params = [{"max_new_tokens": 4, "n": 3, "sampling_seed": s, "ignore_eos": True} for s in (1, 2)]
    many = generate(http, [A, [7, 8]], params)
    assert generate(http, [[7, 8]], [params[1]])[2]["output_ids"] == many[5]["output_ids"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": A, "sampling_params": {"temprature": 1}}, "temprature"),
        ({"input_ids": A, "sampling_params": {"stop": "x"}}, "stop"),
        ({"input_ids": A, "stream": True}, "stream"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": A, "sampling_params": {"max_new_tokens": 252}}, "257.*256"),
        ({"input_ids": A, "return_logprob": True, "logprob_start_len": 6}, "6"),
        ({"input_ids": A, "return_routed_experts": True, "routed_experts_start_len": 6}, "6"),
        ({"input_ids": [96]}, "96"),
        ({"input_ids": A, "return_logprob": True, "top_logprobs_num": 2}, "prompts that are scored"),
        (
            {"input_ids": A * 40, "sampling_params": {"max_new_tokens": 0, "n": 4096}}
            | {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 90},
            "fewer prompts, samples or candidates",
        ),
        ([], "expected an object"),
    ],
)
def test_bad_requests_are_400_with_a_message(http: httpx.Client, body: Any, message: str) -> None:
    reply = http.post("/generate", json=body)
    assert reply.status_code == 400
    assert re.search(message, reply.json()["error"]["message"])


def test_cached_tokens_until_the_cache_is_flushed(http: httpx.Client) -> None:
    ids, params = list(range(20, 56)), {"max_new_tokens": 14, "ignore_eos": True, "sampling_seed": 2}
    assert http.get("/flush_cache").status_code == 200
    one = generate(http, ids, params)
    asked = {"return_routed_experts": True, "routed_experts_start_len": 40}
    two = generate(http, [*ids, *one["output_ids"], 7], params, **asked)
    assert [r["meta_info"]["cached_tokens"] for r in (one, two)] == [0, 48]
    assert http.get("/flush_cache").status_code == 200
    after_flush = generate(http, [*ids, *one["output_ids"], 7], params, **asked)
    assert after_flush["meta_info"]["cached_tokens"] == 0 and after_flush["output_ids"] == two["output_ids"]
    assert after_flush["meta_info"]["routed_experts"] == two["meta_info"]["routed_experts"]


def test_health_and_info(http: httpx.Client) -> None:
    for route in ("/health", "/health_generate"):
        reply = http.get(route)
        assert (reply.status_code, reply.content) == (200, b"")
    server = http.get("/server_info").json()
    assert server["max_total_num_tokens"] == 65536 and server["context_length"] == 256
    assert http.post("/continue_generation", json={}).json()["triton"] is server["triton"] is False


def test_a_client_waits_for_a_server_to_be_idle_before_it_flushes(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a stock server's last answer. The limit is raised: a busy machine takes seconds for 240 tokens."""
    monkeypatch.setattr(client, "_FLUSH_S", 60.0)

    async def flush() -> None:
        engine = SGLangClient(str(http.base_url), routing=None)
        try:
            await engine.flush_cache()
        finally:
            await engine.close()

    under_way = Background(http)
    assert http.get("/flush_cache").status_code == 400
    asyncio.run(flush())
    assert len(under_way.result()["output_ids"]) == 240


def test_a_pause_changes_no_token(http: httpx.Client) -> None:
    want = generate(http, A, LONG)["output_ids"]
    for mode, retractions in (("retract", 1), ("in_place", 0)):
        under_way = Background(http)
        assert http.post("/pause_generation", json={"mode": mode}).json()["status"] == "ok"
        assert http.get("/health").status_code == 200
        assert http.post("/continue_generation", json={}).json()["status"] == "ok"
        reply = under_way.result()
        assert reply["output_ids"] == want
        assert reply["meta_info"]["num_retractions"] == retractions
    under_way = Background(http)
    http.post("/pause_generation", json={})
    reply = under_way.result()
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert reply["output_ids"] == want[: len(reply["output_ids"])]
    http.post("/continue_generation", json={})


def test_a_client_that_leaves_stops_its_request(http: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        http.post("/pause_generation", json={"mode": "retract"})
        http.post("/generate", json={"input_ids": A, "sampling_params": LONG}, timeout=0.2)
    until = time.monotonic() + 10
    while http.get("/server_info").json()["internal_states"][0]["waiting"] and time.monotonic() < until:
        time.sleep(0.1)
    assert http.get("/server_info").json()["internal_states"][0]["waiting"] == 0
    http.post("/continue_generation", json={})


def update(http: httpx.Client, route: str, **body: Any) -> tuple[int, bool, str]:
    reply = http.post(route, json=body)
    obj = reply.json()
    return reply.status_code, obj["success"], obj["message"]


def test_weights_are_safetensors_and_hashes_are_of_what_was_sent(http: httpx.Client, path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    other = {n: t + 0.05 * torch.randn_like(t) for n, t in tensors.items()}
    payload = encode_safetensors([NamedTensor(n, t) for n, t in other.items()])
    before = generate(http, A, LONG)["output_ids"]
    assert update(http, "/begin_weight_update", selector="all")[:2] == (200, True)
    pickled = update(http, "/update_weights_from_tensor", serialized_named_tensors=["gASVAA=="], load_format=None)
    assert pickled[:2] == (400, False) and "safetensors" in pickled[2]
    parts = {"serialized_named_tensors": [payload], "load_format": "safetensors", "weight_version": "12"}
    assert update(http, "/update_weights_from_tensor", **parts)[:2] == (200, True)
    assert update(http, "/end_weight_update")[:2] == (200, True)
    assert http.get("/server_info").json()["weight_version"] == "12"
    assert generate(http, A, LONG)["output_ids"] != before
    sums = http.get("/weights_checker").json()
    assert sums["ranks"][0]["checksums"] == {n: tensor_checksum(n, t) for n, t in other.items()}
    assert sums["per_engine_checksum"] == engine_checksum(sums["ranks"][0]["checksums"])
    assert update(http, "/weights_checker", action="snapshot")[:2] == (400, False)
    assert update(http, "/update_weights_from_disk", model_path=str(path), weight_version="0")[:2] == (200, True)
    assert generate(http, A, LONG)["output_ids"] == before


def test_an_unpaused_update_waits_for_running_requests(http: httpx.Client, path: Path) -> None:
    under_way = Background(http)
    assert update(http, "/update_weights_from_disk", model_path=str(path), weight_version="1")[:2] == (200, True)
    meta = under_way.result()["meta_info"]
    assert [s["version"] for s in meta["weight_versions"]] == ["0"] and meta["completion_tokens"] == 240
    http.post("/update_weight_version", json={"new_version": "0"})


def test_a_port_in_use_and_a_bad_directory_are_one_sentence(
    http: httpx.Client, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for where, port, named in ((path, http.base_url.port, "port"), (tmp_path, free_port(), "config.json")):
        assert main(["--model-path", str(where), "--port", str(port)]) == 1
        stderr = capsys.readouterr().err
        assert stderr.startswith("error: ") and named in stderr and stderr.count("\n") == 1, stderr
