"""Law: stock SGLang is a rollout like the embedded engine: it computes with what the trainer publishes over SGLang's
own wire, `verify` finds nothing wrong, and a fault on that side is named as what it is.

SGLang 0.5.23 as it is released, on CPU, in a separate environment (`make test-sglang`); `adaptations` lists what it
lacks there, and forks its processes, which test_server_keys.py spawns as the release does. Faults are planted where
they happen: a tensor in the server, a gateway between the two.

Not covered: CUDA kernels; quantized weights, whose CPU kernels need AMX; several servers, or ranks of one;
deterministic inference, which SGLang has for GPU attention only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megatron_bridge.families.registry import family_of
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.types import NamedTensor
from rollout.config import PublishConfig
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.publish.servers import ServerSet
from rollout.sglang.phases import STOCK, FollowedLog
from tests.sglang_cpu.conftest import Run
from tests.sglang_cpu.gateway import Change, gateway
from tests.sglang_cpu.served import CONFIGS, ROOT, SETTINGS, START_S, every_layer_routed, given, serve
from tests.sglang_cpu.weight_paths import Stock, check_paths, check_sources

LATENT, GROUPED = CONFIGS


class Job(NamedTuple):
    miles_like: Run
    words: list[Any]  # its configuration, on a command line
    home: Path
    served: Path
    url: str


@pytest.fixture(scope="module", params=CONFIGS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, miles_like: Run) -> Iterator[Job]:
    """A checkpoint of random weights, and a stock server that serves it."""
    home, config = tmp_path_factory.mktemp(request.param), ROOT / "configs" / CONFIGS[request.param]
    words = given((*SETTINGS, f"model.make.config={every_layer_routed(request.param, home)}"))
    made = miles_like("train", config, "--run-dir", home / "run", "--stages", "fetch,dequantize,convert,stage", *words)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-3000:]
    (served,) = home.glob("cache/stage-*/data/hf")
    with serve(served, home / "sglang.log", states=home / "states") as server:
        server.await_ready(START_S)
        yield Job(miles_like, ["--config", config, *words], home, served, server.url)


def verify(job: Job, url: str, *more: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    out = job.home / "found.json"
    out.unlink(missing_ok=True)
    words = ["verify", *job.words, "--server", url, "--run-dir", job.home / "run", "--json", out]
    done = job.miles_like(*words, *more)
    assert out.exists(), done.stderr[-3000:] + done.stdout[-3000:]
    return done, json.loads(out.read_text())


def checksums(url: str) -> Mapping[str, str]:
    servers = ServerSet([url], 60)
    try:
        return servers.checksums()[0].ranks[0].checksums
    finally:
        servers.close()


def test_a_healthy_server_has_nothing_wrong_with_it(job: Job) -> None:
    """Both sides in BF16 with the same weights: kernels differ, and a few near-ties of the router. The residual streams
    of all layers agree as far as bf16 explains."""
    done, found = verify(job, job.url, "--layers")
    assert done.returncode == 0 and found["verdicts"] == found["bounds_broken"] == [], done.stdout + done.stderr
    assert 0 < found["mismatch/kl"] < 1e-3 and found["routing/agreement"] > 0.95
    assert found["mismatch/tokens"] > 100
    assert found["verify/weights/verdict"] == "agrees" and not found["differing_tensors"]
    assert found["verify/weights/compared"] == f"hashes of {len(checksums(job.url))} tensors", "all of them"
    for step in ("tokens", "sampling", "weights", "quantizer", "routing", "numerics", "layers"):
        assert step in done.stdout
    assert found[f"verify/layers/first/{job.url}"] is None
    shares = [share for key, share in found.items() if key.startswith("verify/layers/the ")]
    layers = HFCheckpoint(job.served).config["num_hidden_layers"]
    assert len(shares) == 2 * layers + 1 and 0 < max(shares) < 0.5, shares
    assert (job.home / "run" / "verify" / "verify_states.png").stat().st_size > 5000


def test_its_log_tells_the_phases_of_its_start(job: Job, tmp_path: Path) -> None:
    """Line by line. On CPU it compiles no kernels and captures no graphs."""
    followed, seen = FollowedLog(tmp_path / "log", STOCK), ["starting"]
    for line in (job.home / "sglang.log").read_text().splitlines(keepends=True):
        with (tmp_path / "log").open("a") as f:
            f.write(line)
        if (words := followed.phase().words) != seen[-1]:
            seen.append(words)
    assert seen == ["starting", "connecting its ranks", "loading weights", "allocating its cache", "warming up"]


def test_a_stale_tensor_is_named_and_replaced(job: Job) -> None:
    """One expert's weight of other values, sent over the real wire: the tensor in which SGLang stacks it is named
    before anything is sent, and the layer as the first that differs. Without --overwrite the server keeps it; with it,
    it is replaced, and the gap goes."""
    name = next(n for n in HFCheckpoint(job.served).names() if ".experts.3.down_proj.weight" in n)
    stale = NamedTensor(name, HFCheckpoint(job.served).read(name) * 3)
    sender = TensorPublisher(
        PublishTarget(urls=(job.url,), kind="sglang", spec=None, config=PublishConfig()), send=True
    )
    sender.publish([stale], version=0)
    before = checksums(job.url)
    done, found = verify(job, job.url, "--layers")
    assert found[f"verify/layers/first/{job.url}"] == f"the MLP of layer {name.split('.')[2]}"
    stacked = f"{name.partition('.mlp.')[0]}.mlp.experts.w2_weight"
    assert done.returncode == 1 and found["differing_tensors"] == [stacked] and checksums(job.url) == before
    assert "verify/weights/kl_after" not in found and found["conclusion"] in done.stderr
    done, found = verify(job, job.url, "--overwrite")
    assert done.returncode == 1
    (verdict,) = found["verdicts"]
    assert (verdict["step"], verdict["cause"]) == ("weights", "other weights"), found
    assert verdict["what"] == f"{stacked} has different values" and found["differing_tensors"] == [stacked]
    assert checksums(job.url) != before
    assert found["verify/weights/kl_after"] < found["verify/weights/kl_before"] / 4
    assert found["verify/weights/kl_after"] < 1e-3


def test_requests_of_one_module_serve_all_that_was_published(job: Job) -> None:
    """Every weight times 1.5, in as many requests as there can be. Each served tensor is the one that a single request
    gives, and those that SGLang concatenates within one request hash as the published halves do together."""
    checkpoint = HFCheckpoint(job.served)
    fused = family_of(checkpoint.config).bind(checkpoint.config).fused()
    halves = [names for names in fused if ".self_attn." in names[0]]
    assert len(halves) == (checkpoint.config["num_hidden_layers"] if checkpoint.config.get("q_lora_rank") else 0)

    def published(factor: float, bucket_bytes: int) -> Mapping[str, str]:
        weights = [NamedTensor(n, (checkpoint.read(n).float() * factor).to(checkpoint.read(n).dtype)) for n in names]
        config = PublishConfig(bucket_bytes=bucket_bytes)
        sender = TensorPublisher(
            PublishTarget(urls=(job.url,), kind="sglang", spec=None, config=config, fused=fused), send=True
        )
        sender.publish(weights, version=1)
        return checksums(job.url)

    names = list(checkpoint.names())
    before = checksums(job.url)
    parted = published(1.5, 1)
    whole = published(1.5, 1 << 30)
    assert parted == whole, [n for n in whole if parted[n] != whole[n]]
    assert sum(parted[n] != before[n] for n in before) > 0.9 * len(before)  # a few are constants, as k_scale
    for q_a, kv_a in halves:
        both = torch.cat([(checkpoint.read(n).float() * 1.5).to(checkpoint.read(n).dtype) for n in (q_a, kv_a)])
        digest = hashlib.sha256(both.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        assert parted[q_a.replace("q_a_proj", "fused_qkv_a_proj_with_mqa")] == digest
    assert published(1.0, 1) == before


def test_each_path_serves_what_a_publication_on_disk_does(job: Job, tmp_path: Path) -> None:
    """As test_weight_paths.py with two ranks."""
    stock = Stock(job.url, 1, job.served)
    check_paths(stock, tmp_path)
    check_sources(stock, job.served)


def sampled_at_another_temperature(request: Any) -> None:
    for params in request["sampling_params"]:
        params["temperature"] = 0.6


def log_probabilities_of_the_next_token(replies: Any) -> None:
    for reply in replies:
        entries = reply["meta_info"]["output_token_logprobs"]
        moved = [*(p for p, *_ in entries[1:]), entries[0][0]]
        reply["meta_info"]["output_token_logprobs"] = [[p, *rest] for p, (_, *rest) in zip(moved, entries, strict=True)]


def routes_of_the_row_before(replies: Any) -> None:
    for reply in replies:
        meta = reply["meta_info"]
        rows = meta["prompt_tokens"] + meta["completion_tokens"] - 1
        ids = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(rows, -1)
        meta["routed_experts"] = base64.b64encode(np.roll(ids, 1, 0).tobytes()).decode()


@pytest.mark.parametrize(
    ("request_", "reply", "step", "cause"),
    [
        pytest.param(sampled_at_another_temperature, None, "sampling", "wrong temperature", id="temperature"),
        pytest.param(None, log_probabilities_of_the_next_token, "tokens", "shifted tokens", id="tokens"),
        pytest.param(None, routes_of_the_row_before, "routing", "routes shifted", id="routes"),
    ],
)
@pytest.mark.parametrize("job", [LATENT, pytest.param(GROUPED, marks=pytest.mark.sglang_all)], indirect=True)
def test_a_fault_in_between_is_named(
    job: Job, request_: Change | None, reply: Change | None, step: str, cause: str
) -> None:
    with gateway(job.url, request=request_, reply=reply) as url:
        done, found = verify(job, url)
    assert done.returncode == 1
    assert [(v["step"], v["cause"]) for v in found["verdicts"]] == [(step, cause)], found["verdicts"]
    assert found[f"verify/{step}/kl_after"] < found[f"verify/{step}/kl_before"] / 4
    assert found["verify/numerics/kl_after"] < 1e-3
