"""A decode step against published servers and kernels, brute-force counts, and laws.

Not covered: kernels for few requests, whose launches take longer than their work.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from miles_like.device_table import device
from miles_like.timing.engine import Drafts, EngineSetup, cache_tokens, decode_step, prefill, touched
from miles_like.timing.rates.calibration import ENGINE_REQUEST, ENGINE_STEP, MEMORY
from miles_like.timing.shape import model_shape

ROOT = Path(__file__).parents[3]
V3 = model_shape(json.loads((ROOT / "configs/deepseek_v3/config.json").read_text()))
SMALL = model_shape(json.loads((ROOT / "configs/qwen3_30b_a3b/config.json").read_text()))
DENSE = model_shape(json.loads((ROOT / "configs/qwen3_32b/config.json").read_text()))
H100 = device("H100")


def wide(ranks: int) -> EngineSetup:
    """DeepSeek-V3 in FP8 with data-parallel attention and DeepEP over all ranks of one server."""
    return EngineSetup(
        device=H100,
        servers=1,
        tp=ranks,
        ep=ranks,
        dp=ranks,
        deepep=True,
        replicated_dense=True,
        weight_bytes=1.0,
        expert_bytes=1.0,
        fp8=True,
    )


@pytest.mark.parametrize(
    ("ranks", "running", "context", "seen"),
    [
        (72, 256, 2100, 22282),  # SGLang on 9 nodes for decoding, 2,000 tokens of input: lmsys.org, 2025-05-05
        (144, 92, 4989, 14800),  # DeepSeek's own, 18 nodes, 20 to 22 tokens/s a request: open-infra-index, day 6
    ],
)
def test_a_published_server_of_deepseek_v3_decodes_as_fast(ranks: int, running: int, context: int, seen: int) -> None:
    """Tokens/s of a node of 8."""
    step = decode_step(V3, wide(ranks), running * ranks, context)
    assert 8 * running / sum(step.values()) == pytest.approx(seen, rel=0.2)


@pytest.mark.parametrize(
    ("ep", "dispatch_us", "combine_us"), [(16, 118, 195), (32, 155, 273), (64, 173, 314), (128, 192, 369)]
)
def test_low_latency_kernels_take_what_deepep_measured(ep: int, dispatch_us: int, combine_us: int) -> None:
    """DeepEP, docs/legacy.md: 128 tokens a rank, 7,168 channels, 8 experts."""
    found = decode_step(V3, wide(ep), 128 * ep, 1000)["communication"] / V3.layers
    assert found == pytest.approx((dispatch_us + combine_us) * 1e-6, rel=0.1)


def test_chosen_experts_are_those_of_drawn_tokens() -> None:
    draw = random.Random(0)
    for rows in (1, 16, 64, 300):
        counts = [
            len({e for _ in range(rows) for e in draw.sample(range(SMALL.experts), SMALL.top_k)}) for _ in range(60)
        ]
        assert touched(SMALL, rows) == pytest.approx(sum(counts) / len(counts), rel=0.03)
    assert touched(SMALL, 1) == pytest.approx(SMALL.top_k) and touched(DENSE, 5) == 0.0


def test_a_step_reads_at_least_its_weights_and_its_cache() -> None:
    """The bytes on one device: active weights once, keys and values of every request."""
    for running in (1, 64):
        engine = EngineSetup(device=H100, servers=1, tp=4)
        step = decode_step(SMALL, engine, running, 3000)
        experts = SMALL.sparse * touched(SMALL, running) * SMALL.expert
        others = SMALL.others - SMALL.hidden * SMALL.vocab
        seconds = 2 * (experts + others) / 4 / (MEMORY * H100.hbm)
        read = step["weights"] + step["experts"] + step["head"]
        assert seconds < read < 1.1 * seconds
        cache = running * 3000 * 2 * SMALL.cached * SMALL.layers / 4
        assert step["KV cache"] == pytest.approx(cache / (MEMORY * H100.hbm))
        assert step["engine's host"] == pytest.approx(ENGINE_STEP + running * ENGINE_REQUEST)


def test_a_step_takes_longer_with_more_requests_context_and_bytes() -> None:
    for shape in (V3, SMALL, DENSE):
        engine = EngineSetup(device=H100, servers=1, tp=8)
        times = [sum(decode_step(shape, engine, b, 2000).values()) for b in (1, 8, 64, 512, 4096)]
        assert times == sorted(times) and times[-1] / 4096 < times[0]
        longer = [sum(decode_step(shape, engine, 64, c).values()) for c in (100, 1000, 10_000)]
        assert longer == sorted(longer)
        lighter = replace(engine, weight_bytes=1.0, expert_bytes=0.5, fp8=True)
        assert sum(decode_step(shape, lighter, 64, 2000).values()) < times[2]


def test_key_value_heads_limit_the_division_of_the_cache() -> None:
    """Qwen3's 4 heads over 8 ranks: each is on two of them. MLA's latent is on every rank, unless attention has
    replicas."""
    four, eight = (EngineSetup(device=H100, servers=1, tp=n) for n in (4, 8))
    assert cache_tokens(SMALL, four, 1e9) == cache_tokens(SMALL, eight, 1e9)
    assert decode_step(SMALL, eight, 64, 5000)["KV cache"] == decode_step(SMALL, four, 64, 5000)["KV cache"]
    one, replicas = EngineSetup(device=H100, servers=1, tp=8), EngineSetup(device=H100, servers=1, tp=8, dp=8)
    assert cache_tokens(V3, replicas, 1e9) == 8 * cache_tokens(V3, one, 1e9)
    assert cache_tokens(V3, one, 70_272.0) == pytest.approx(1.0)
    assert cache_tokens(V3, one, -5.0) == 0.0


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
def test_accepted_drafts_are_those_of_a_simulation(acceptance: float) -> None:
    draw, tokens = random.Random(2), 3

    def step() -> int:
        accepted = 0
        while accepted < tokens and draw.random() < acceptance:
            accepted += 1
        return accepted + 1

    mean = sum(step() for _ in range(40_000)) / 40_000
    assert Drafts(tokens=tokens, acceptance=acceptance).tokens_per_step == pytest.approx(mean, rel=0.02)


def test_drafts_help_few_requests_and_hinder_many() -> None:
    plain = EngineSetup(device=H100, servers=1, tp=8)
    drafted = replace(plain, drafts=Drafts(tokens=1, acceptance=0.8))

    def per_token(engine: EngineSetup, running: int) -> float:
        per_step = engine.drafts.tokens_per_step if engine.drafts else 1.0
        return sum(decode_step(DENSE, engine, running, 2000).values()) / per_step / running

    assert per_token(drafted, 4) < 0.7 * per_token(plain, 4)
    assert per_token(drafted, 4) / per_token(plain, 4) < per_token(drafted, 2048) / per_token(plain, 2048)
    assert decode_step(DENSE, drafted, 4, 2000)["drafts"] > 0


def test_a_prefill_takes_its_flops() -> None:
    engine = EngineSetup(device=H100, servers=1, tp=1)
    found = prefill(SMALL, engine, 100_000, 100_000.0 * 1000)["prefill"]
    active = SMALL.active - SMALL.hidden * SMALL.vocab
    floor = 2 * active * 100_000 / (0.7 * H100.bf16)
    assert floor < found < 1.5 * floor
    assert prefill(SMALL, replace(engine, tp=8), 100_000, 100_000.0 * 1000)["prefill"] < found
