"""The embedded engine on one CUDA device: it scores and answers as on CPU within BF16's rounding, repeats itself, waits
once a step, holds what was published, and gives its memory back. Prints rates of decoding.

Not covered: long contexts, a server beside a trainer (test_demo_cuda.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_like.types import NamedTensor
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.embedded.engine.engine import Engine, EngineLimits
from rollout.embedded.families.registry import architecture_of
from rollout.embedded.model import plain_ops
from rollout.embedded.model.model import Model
from rollout.embedded.model.prepared import Preparation
from rollout.embedded.model.weights import WeightStore
from rollout.embedded.server.service import Service
from rollout.wire.bodies import MemoryTag
from rollout.wire.checksum import tensor_checksum
from tests.gpu.test_converted_cuda import BILLION
from tests.support.embedded_fixtures import run, spec, submit
from tests.support.tiny_models import felt_tensors, tiny, tiny_qwen, write_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
CUDA = torch.device("cuda", 0)
SHAPES = {"deepseek": tiny(), "qwen": tiny_qwen()}
FP8 = QuantSpec(format=QuantFormat.FP8)
HF_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
TEXTS = [torch.randint(2, 128, (64,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(24)]


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    hf = SHAPES[request.param]
    return write_checkpoint(tmp_path_factory.mktemp(request.param), hf, felt_tensors(hf)), hf


def service(path: Path, device: Any, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Service:
    return Service(path, EngineLimits(max_total_tokens=16384, context_length=512), device=device, dtype=dtype, **how)


def scores(engine: Engine) -> np.ndarray:
    """Log-probs of all tokens of `TEXTS` but the first of each."""
    found = run(engine, *(spec(ids, max_new_tokens=0, logprob_start=0, routing_start=None) for ids in TEXTS))
    return np.array([c.prompt_logprobs for group in found for c in group])


def greedy(engine: Engine) -> np.ndarray:
    """[texts, 8] the likeliest continuations."""
    found = run(engine, *(spec(ids[:24], max_new_tokens=8, temperature=0.0) for ids in TEXTS))
    return np.array([c.reply.output_ids for group in found for c in group])


def test_log_probs_and_replies_are_the_cpus_within_bf16(model: tuple[Path, Any]) -> None:
    """The truth is the CPU in fp32; the measure of BF16's rounding is the CPU in BF16."""
    truth, rounded = service(model[0], "cpu", torch.float32).engine, service(model[0], "cpu").engine
    device = service(model[0], "cuda").engine
    want, near, got = scores(truth), scores(rounded), scores(device)
    usual, apart = np.abs(near - want), np.abs(got - want)
    print(f"\nmean, max abs log-prob difference from fp32: CPU BF16 {usual.mean():.4f}, {usual.max():.4f}; ", end="")
    print(f"CUDA BF16 {apart.mean():.4f}, {apart.max():.4f}; std of log-probs {want.std():.2f}")
    assert want.std() > 0.3, "the log-probs say nothing"
    assert apart.mean() <= 2 * usual.mean() + 1e-4
    words, near_words, own = greedy(truth), greedy(rounded), greedy(device)
    same, usual_same = (own == words).mean(), (near_words == words).mean()
    print(f"greedy tokens equal to fp32's: CPU BF16 {usual_same:.2f}, CUDA BF16 {same:.2f}")
    assert (own[:, 0] == words[:, 0]).mean() >= 0.8
    assert same >= usual_same - 0.2


def test_a_seed_repeats_its_replies(model: tuple[Path, Any]) -> None:
    """Two engines, and the routes and log-probs too."""
    specs = [spec(ids[:20], n=4, sampling_seed=i, top_p=0.9, max_new_tokens=24) for i, ids in enumerate(TEXTS[:8])]
    first, second = (run(service(model[0], "cuda").engine, *specs) for _ in range(2))
    for a, b in zip([c for g in first for c in g], [c for g in second for c in g], strict=True):
        assert a.reply.output_ids.tolist() == b.reply.output_ids.tolist()
        assert np.array_equal(np.array(a.reply.logprobs), np.array(b.reply.logprobs))
        assert a.reply.routed_experts == b.reply.routed_experts


@contextmanager
def no_hidden_waits() -> Iterator[None]:
    """torch raises RuntimeError where a call waits for the device; an event, which `Transfers.fetch` uses, may."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_in_a_step_waits_in_secret(model: tuple[Path, Any]) -> None:
    for weights in ("decoded", "codes"):
        engine = service(model[0], "cuda", weights=weights).engine
        specs = [spec(ids[:30], n=2, max_new_tokens=12, top_k=8, logprob_start=0) for ids in TEXTS[:4]]
        run(engine, *specs)  # libraries make their handles
        with no_hidden_waits():
            run(engine, *specs)
        with no_hidden_waits(), pytest.raises(RuntimeError, match="synchroniz"):
            engine.cache.values[0].sum().item()


@pytest.mark.parametrize("weights", ["decoded", "codes"])
def test_published_codes_are_held_and_multiplied(model: tuple[Path, Any], tmp_path: Path, weights: Any) -> None:
    """By tensors in two requests: the checksums are those of what was sent, and the scores those of an engine that
    loads the same from a directory, however codes are kept."""
    hf = model[1] | {"quantization_config": HF_FP8}
    old, new = (dict(quantize_stream(felt_tensors(model[1], seed).items(), FP8)) for seed in (0, 1))
    for name, tensors in (("old", old), ("new", new)):
        write_checkpoint(tmp_path / name, hf, tensors)
    served = service(tmp_path / "old", "cuda", weights=weights)
    before = scores(served.engine)
    sent = [NamedTensor(n, t) for n, t in new.items()]
    served.begin_update("1")
    for part in (sent[: len(sent) // 2], sent[len(sent) // 2 :]):
        served.update(part, flush_cache=True, version="1")
    served.end_update("1")
    assert served.checksums() == {n: tensor_checksum(n, t) for n, t in new.items()}
    assert all(t.is_cuda for t in served.store.tensors())
    after = scores(served.engine)
    assert np.abs(after - before).max() > 0.01
    np.testing.assert_array_equal(after, scores(service(tmp_path / "new", "cuda").engine))


def test_released_memory_is_given_back(model: tuple[Path, Any]) -> None:
    base = torch.cuda.memory_allocated()
    served = service(model[0], "cuda")
    before, held = scores(served.engine), served.held()
    tags = [MemoryTag.KV_CACHE, MemoryTag.WEIGHTS]
    assert sum(served.release(tags).values()) < sum(held.values()) / 50  # the epochs of the cache are on the host
    assert torch.cuda.memory_allocated() - base < sum(held.values()) / 10
    served.resume(tags)
    served.begin_update("1")
    served.update([NamedTensor(n, t) for n, t in felt_tensors(model[1]).items()], flush_cache=True, version="1")
    served.end_update("1")
    np.testing.assert_array_equal(scores(served.engine), before)


def random_engine(hf: dict[str, Any], **limits: Any) -> Engine:
    """An engine of random weights, made on the device."""
    arch, dtype = architecture_of(hf), torch.bfloat16
    store, g = WeightStore(arch, None, device=CUDA), torch.Generator(CUDA).manual_seed(0)
    values = {
        n: torch.ones(shape, dtype=dtype, device=CUDA)
        if len(shape) == 1
        else torch.randn(shape, generator=g, device=CUDA).mul_(0.02).to(dtype)
        for n, shape in store.whole_shapes.items()
    }
    weights = Preparation(dtype, device=CUDA).prepare(store.replaced(values))
    return Engine(Model(arch, weights, plain_ops, dtype), EngineLimits(**limits))


@pytest.mark.parametrize(("name", "samples"), [("tiny", 64), ("tiny", 512), ("1.13 B", 64), ("1.13 B", 512)])
def test_rates_of_decoding(name: str, samples: int) -> None:
    engine = random_engine(tiny() if name == "tiny" else BILLION, max_total_tokens=1 << 18, max_running=samples)
    prompts, tokens = TEXTS[:16], 96
    specs = [spec(ids, n=samples // 16, max_new_tokens=tokens, routing_start=None) for ids in prompts]
    submit(engine, *specs)
    for _ in range(8):
        engine.step()
    torch.cuda.synchronize()
    began, first = time.perf_counter(), engine.generated
    steps = 0
    while engine.running == samples and steps < 64:
        engine.step()
        steps += 1
    torch.cuda.synchronize()
    took, made = time.perf_counter() - began, engine.generated - first
    assert made >= samples * 32
    print(f"\n{name}, {samples} samples: {made / took:,.0f} tokens/s, {1e3 * took / steps:.2f} ms a step")
