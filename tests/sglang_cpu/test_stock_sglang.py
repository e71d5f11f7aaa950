"""Law: stock SGLang is a rollout like the embedded engine: it computes with what the trainer publishes over SGLang's
own wire, `verify` finds nothing wrong, and a fault on that side is named as what it is.

SGLang 0.5.23 as it is released, on CPU, in an environment of its own (`make test-sglang`); `adaptations` says what it
lacks there. Faults are planted where they happen: a tensor in the server, a gateway between the two.

Not covered: CUDA kernels; quantized weights, whose CPU kernels need AMX; several servers, or ranks of one;
deterministic inference, which SGLang has for GPU attention only.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console

from miles_like import assemble
from miles_like.config_io import load_config
from miles_like.hf_checkpoint import HFCheckpoint
from miles_like.types import NamedTensor
from rollout.client import SGLangClient
from rollout.config import PublishConfig
from rollout.publisher import TensorPublisher
from rollout.servers import free_port, start
from tests.sglang_cpu.gateway import Change, gateway

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
CONFIGS = {"deepseek": "tiny_bf16.toml", "qwen": "tiny_qwen.toml"}
MODELS = {"deepseek": "model.json", "qwen": "qwen_moe.json"}
START_S, VERIFY_S = 600.0, 600.0
SETTINGS = (
    *("model.make.max_steps=0", "model.make.format=bf16", "precision.format=bf16", "precision.qat=false"),
    *("parallel.dp=1", "parallel.ep=1", "rollout.engine=sglang", "rollout.max_new_tokens=24"),
    "rollout.request_timeout_s=600",
)


class Job(NamedTuple):
    config: Path
    settings: tuple[str, ...]
    home: Path
    served: Path
    url: str


@pytest.fixture(scope="module", params=CONFIGS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A checkpoint of random weights, and a stock server that serves it."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there: make test-sglang")
    home, config = tmp_path_factory.mktemp(request.param), ROOT / "configs" / CONFIGS[request.param]
    try:
        settings = (*SETTINGS, f"model.make.config={every_layer_routed(request.param, home)}")
        root = assemble.staged(load_config(config, list(settings)), home / "run", Console(), None)
    finally:
        assemble.shut_down()
    port = free_port()
    command = [str(PYTHON), str(ROOT / "tests" / "sglang_cpu" / "serve.py"), "--model-path", str(root / "hf")]
    with start([*command, "--port", str(port)], url=f"http://127.0.0.1:{port}", log=home / "sglang.log") as server:
        server.await_ready(START_S)
        yield Job(config, settings, home, root / "hf", server.url)


def every_layer_routed(shape: str, home: Path) -> Path:
    """The shape's config.json, without Qwen's dense layer, which SGLang 0.5.23 does not know."""
    model = json.loads((ROOT / "configs" / "tiny" / MODELS[shape]).read_text())
    path = home / "model.json"
    path.write_text(json.dumps(model | {"mlp_only_layers": []} if "mlp_only_layers" in model else model))
    return path


def verify(job: Job, url: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    out = job.home / "found.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "miles_like.cli", "verify", "--config", str(job.config), "--server", url]
    command += ["--run-dir", str(job.home / "run"), "--json", str(out)]
    done = subprocess.run(
        [*command, *(word for setting in job.settings for word in ("--set", setting))],
        capture_output=True,
        text=True,
        timeout=VERIFY_S,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200", "RAY_AUTH_MODE": "disabled"},
    )
    assert out.exists(), done.stderr[-3000:] + done.stdout[-3000:]
    return done, json.loads(out.read_text())


def test_a_healthy_server_has_nothing_wrong_with_it(job: Job) -> None:
    """Both sides in BF16 with the same weights: kernels differ, and a few near-ties of the router."""
    done, found = verify(job, job.url)
    assert done.returncode == 0 and found["verdicts"] == found["bounds_broken"] == [], done.stdout + done.stderr
    assert 0 < found["mismatch/kl"] < 1e-3 and found["routing/agreement"] > 0.97
    assert found["mismatch/tokens"] > 100
    for step in ("tokens", "sampling", "weights", "quantizer", "routing", "numerics"):
        assert step in done.stdout


def test_candidates_of_a_scored_text_come_in_the_form_that_is_read(job: Job) -> None:
    """What a teacher is asked for: from some token on, and its likeliest tokens at each place beside the text's own."""
    text = torch.arange(5, 25)

    async def ask() -> tuple[Any, Any]:
        client = SGLangClient(job.url, routing=None, request_timeout_s=600)
        found = (await client.score([text]))[0][0], (await client.score_after([text], 7, top=4))[0]
        await client.close()
        return found

    whole, after = asyncio.run(ask())
    np.testing.assert_allclose(after.logprobs, whole[7:], atol=1e-2)
    assert after.top.ids.shape == after.top.logprobs.shape == (12, 4)
    assert (np.diff(after.top.logprobs) <= 0).all() and (after.top.logprobs[:, 0] >= after.logprobs - 1e-2).all()
    found = after.top.ids == text[8:, None].numpy()
    np.testing.assert_allclose(after.top.logprobs[found], after.logprobs[found.any(1)], atol=1e-2)


def test_a_stale_tensor_is_named_and_replaced(job: Job) -> None:
    """One expert's weight of other values, sent over the real wire. Its fused tensor changes when the trainer
    publishes, and the gap goes with it."""
    name = next(n for n in HFCheckpoint(job.served).names() if ".experts.3.down_proj.weight" in n)
    stale = NamedTensor(name, HFCheckpoint(job.served).read(name) * 3)
    sender = TensorPublisher([job.url], kind="sglang", spec=None, config=PublishConfig(), send=True)
    sender.publish([stale], version=0)
    done, found = verify(job, job.url)
    assert done.returncode == 1
    (verdict,) = found["verdicts"]
    assert (verdict["step"], verdict["cause"]) == ("weights", "other weights"), found
    layer = name.partition(".mlp.")[0]
    assert f"{layer}.mlp.experts.w2_weight changed when the trainer published" in verdict["what"]
    assert found["verify/weights/kl_after"] < found["verify/weights/kl_before"] / 4
    assert found["verify/weights/kl_after"] < 1e-3


def sampled_at_another_temperature(request: Any) -> None:
    for params in request["sampling_params"]:
        params["temperature"] = 0.6


def log_probabilities_of_the_next_token(replies: Any) -> None:
    for reply in replies:
        told = reply["meta_info"]["output_token_logprobs"]
        moved = [*(p for p, *_ in told[1:]), told[0][0]]
        reply["meta_info"]["output_token_logprobs"] = [[p, *rest] for p, (_, *rest) in zip(moved, told, strict=True)]


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
def test_a_fault_in_between_is_named(
    job: Job, request_: Change | None, reply: Change | None, step: str, cause: str
) -> None:
    with gateway(job.url, request=request_, reply=reply) as url:
        done, found = verify(job, url)
    assert done.returncode == 1
    assert [(v["step"], v["cause"]) for v in found["verdicts"]] == [(step, cause)], found["verdicts"]
    assert found[f"verify/{step}/kl_after"] < found[f"verify/{step}/kl_before"] / 4
    assert found["verify/numerics/kl_after"] < 1e-3
