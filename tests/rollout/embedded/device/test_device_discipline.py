"""On a GPU a step of the engine waits for the device once, for its sampled tokens, copies nothing but through pinned
memory, mixes no host tensor into an operation of the device, and computes what the engine on CPU computes.

Why it must hold: a wait that is not seen costs a launch queue in every layer, and a host tensor that was left behind is
an error only on a machine with a device. The device is pretended (tests/support/pretended_cuda.py). Not covered: the
kernels of a device, and bfloat16 there (tests/gpu/test_embedded_cuda.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.embedded.engine.engine import Engine, EngineLimits
from rollout.embedded.engine.requests import Completed
from rollout.embedded.model import plain_ops
from rollout.embedded.server.service import Service
from tests.support.embedded_fixtures import run, spec, submit
from tests.support.pretended_cuda import DeviceError, Pretended, pretended
from tests.support.tiny_models import felt_tensors, tiny, tiny_qwen, write_checkpoint

TRANSFERS = "rollout.embedded.device.transfers"
SENDS, FETCHES = {(TRANSFERS, "send")}, {(TRANSFERS, "fetch")}
MODELS = {"deepseek": tiny(), "qwen": tiny_qwen()}
A, B, C = [5, 9, 33, 2, 71], list(range(10, 47)), [8] * 16
SPECS = [
    spec(A, n=3, sampling_seed=1, max_new_tokens=6),
    spec(B, sampling_seed=2, temperature=0.7, top_k=5, max_new_tokens=9),
    spec(C, sampling_seed=3, top_p=0.6, max_new_tokens=3, logprob_start=3),
    spec(A, temperature=0.0, max_new_tokens=3),
    spec(B, max_new_tokens=0, logprob_start=0, top=3),
]


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    hf = MODELS[request.param]
    return write_checkpoint(tmp_path_factory.mktemp(request.param), hf, felt_tensors(hf))


def engine_of(path: Path, device: Any, **how: Any) -> Engine:
    limits = EngineLimits(max_total_tokens=2048, context_length=256, gates=True)
    return Service(path, limits, device=device, **how).engine


@contextmanager
def on_device(path: Path, **how: Any) -> Iterator[tuple[Engine, Pretended]]:
    with pretended(SENDS, FETCHES) as mode:
        with mode.unchecked():
            engine = engine_of(path, "cuda", **how)
        yield engine, mode


def alike(got: list[list[Completed]], want: list[list[Completed]]) -> None:
    for a, b in zip([c for group in got for c in group], [c for group in want for c in group], strict=True):
        assert a.reply.output_ids.tolist() == b.reply.output_ids.tolist()
        assert a.reply.routed_experts == b.reply.routed_experts
        assert a.reply.logprobs is not None and b.reply.logprobs is not None
        np.testing.assert_allclose(a.reply.logprobs, b.reply.logprobs, atol=2e-5)
        np.testing.assert_allclose(a.prompt_logprobs, b.prompt_logprobs, atol=2e-5)


def test_an_engine_on_a_device_computes_what_one_on_cpu_does(path: Path) -> None:
    """Several prompts, shared prefills, samples that end in different steps, all kinds of draws, scores."""
    want = run(engine_of(path, "cpu"), *SPECS)
    with on_device(path) as (engine, _):
        got = run(engine, *SPECS)
    alike(got, want)


def test_a_step_waits_once(path: Path) -> None:
    """A decode step in which no sample ends has one fetch."""
    with on_device(path) as (engine, mode):
        submit(engine, *SPECS[:2])
        engine.step()
        for _ in range(4):
            mode.waits.clear()
            engine.step()
            assert mode.waits == {"fetch": 1}


@pytest.mark.parametrize("kind", ["fp8", "int4", "nvfp4"])
def test_codes_are_decoded_without_a_wait(kind: str, tmp_path: Path) -> None:
    """Of experts and of linears, at each use."""
    hf, form = tiny(), QuantSpec.of(QuantFormat(kind))
    path = write_checkpoint(tmp_path, quantized_config(hf, form), dict(quantize_stream(felt_tensors(hf).items(), form)))
    with patch("rollout.embedded.model.projections.SMALL", 0):
        want = run(engine_of(path, "cpu", weights="codes"), few := spec(A, max_new_tokens=2))
        with on_device(path, weights="codes") as (engine, _):
            alike(run(engine, few), want)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda x: x * torch.ones(x.shape[-1]), "host tensor"),
        (lambda x: x + x.sum().item(), "waits for the device"),
        (lambda x: x[x[:, 0] > -torch.inf], "with a mask"),
        (lambda x: x.cpu().to(x.device), "to the host"),
    ],
    ids=["a host tensor", "a number", "a mask", "a copy"],
)
def test_what_hides_in_a_layer_is_found(path: Path, fault: Any, why: str) -> None:
    """Planted in a layer: a host tensor, a number that is read, a mask, a copy there and back."""
    stock = plain_ops.swiglu
    with on_device(path) as (engine, _):
        submit(engine, *SPECS)
        with (
            patch.object(plain_ops, "swiglu", lambda *x: fault(stock(*x))),
            pytest.raises(DeviceError, match=why),
        ):
            engine.step()
