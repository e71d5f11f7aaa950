"""Memory of a server: bytes of a token and of weights, against published figures and the engine's semantics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_bridge.plan.precision import served_spec
from miles_like.config.load import load_config
from miles_like.device_table import device
from miles_like.planning.memory.engine import EnginePlan, EngineWeights
from miles_like.planning.memory.parts import GIB, total
from rollout.config import SGLangFlags
from tests.support.plans import CONFIGS, path_of, planned


def _weights(name: str, **flags: object) -> EngineWeights:
    config = load_config(path_of(name))
    assert config.model.config is not None
    hf = json.loads(Path(config.model.config).read_text())
    return EngineWeights(hf, served_spec(config.precision, hf), SGLangFlags.model_validate(flags))


def _engine(name: str, *overrides: str) -> EnginePlan:
    engine = planned(name, *overrides).engine
    assert engine is not None
    return engine


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("deepseek_v3_fp8", 70_272),  # arXiv:2505.09343, table 1: 70.272 KB in BF16
        ("qwen3_30b_a3b", 98_304),  # 48 layers x 4 heads x 128 x 2 x 2 bytes
        ("glm45_air", 188_416),  # 46 x 8 x 128 x 2 x 2
    ],
)
def test_bytes_of_a_token(name: str, nbytes: int) -> None:
    assert _weights(name).cell() == nbytes


def test_heads_are_divided_until_each_rank_has_one() -> None:
    """And a latent is whole on every rank."""
    assert [_weights("qwen3_30b_a3b", tp_size=tp).cell() for tp in (1, 2, 4, 8)] == [98_304, 49_152, 24_576, 24_576]
    assert {_weights("deepseek_v3_fp8", tp_size=tp).cell() for tp in (1, 16)} == {70_272}


def test_a_narrower_cache() -> None:
    assert _weights("deepseek_v3_fp8", kv_cache_dtype="fp8_e4m3").cell() == 70_272 // 2


# bytes of the published checkpoints' tensors (model.safetensors.index.json, metadata.total_size)
@pytest.mark.parametrize(("name", "nbytes"), [("qwen3_30b_a3b", 61_064_245_248), ("qwen3_4b", 8_044_936_192)])
def test_the_weights_of_one_gpu_are_the_published_checkpoint(name: str, nbytes: int) -> None:
    assert _weights(name).nbytes() == pytest.approx(nbytes, rel=1e-3)


def test_a_server_of_several_gpus_holds_its_weights_once() -> None:
    """Replicated parts are small; with data-parallel attention, attention and embedding are on each rank."""
    one = _weights("qwen3_30b_a3b").nbytes()
    for tp in (2, 4):
        assert one < tp * _weights("qwen3_30b_a3b", tp_size=tp).nbytes() < 1.01 * one
    flags = {"tp_size": 16, "ep_size": 16, "dp_size": 16, "enable_dp_attention": True}
    dp, tp16 = _weights("deepseek_v3_fp8", **flags), _weights("deepseek_v3_fp8", tp_size=16)
    attention = 61 * (7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168)  # FP8
    assert dp.nbytes() - tp16.nbytes() > attention * 15 / 16


def test_formats_change_the_weights() -> None:
    """Qwen3-30B's experts are 0.95 of it: 8 and 4 bits of 16, with scales."""
    sizes = {f: _weights(f"qwen3_30b_a3b{f}").nbytes() for f in ("", "_fp8", "_int4_qat")}
    assert sizes["_fp8"] == pytest.approx(0.5 * sizes[""], rel=0.05)
    assert 0.25 * sizes[""] < sizes["_int4_qat"] < 0.36 * sizes[""]


def test_the_cache_is_what_the_weights_leave_of_the_fraction() -> None:
    """mem_fraction_static is of what was free before the weights were loaded."""
    half, more = (_engine("qwen3_4b", f"rollout.sglang.mem_fraction_static={f}") for f in (0.5, 0.6))
    assert half.weights == more.weights
    free = (more.cache - half.cache) / 0.1
    assert 0.98 < free / device("H100").memory < 1
    assert half.tokens == half.cache // half.cell
    assert half.least_fraction == pytest.approx(half.weights / free, rel=1e-3)
    assert total(half.generating()) < 0.55 * device("H100").memory + half.runtime


def test_a_released_server_keeps_its_context_and_buffers() -> None:
    engine = _engine("deepseek_v3_fp8")
    assert set(engine.asleep()) == {"CUDA context", "NCCL", "DeepEP"}
    assert engine.publishing(GIB)["engine weights"] == engine.weights and "KV cache" not in engine.publishing(GIB)


def test_a_server_whose_weights_do_not_fit_is_named() -> None:
    plan = planned("qwen3_30b_a3b", "rollout.sglang.mem_fraction_static=0.3")
    assert plan.engine is not None and plan.engine.cache <= 0 and not plan.fits
    [sentence] = plan.problems()
    assert "rollout.sglang.mem_fraction_static above 0.36" in sentence


def test_every_shipped_server_holds_eight_of_the_longest_samples() -> None:
    for path in sorted(CONFIGS.glob("*.toml")):
        config = load_config(path)
        if config.cluster.gpus_per_node:
            longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
            assert _engine(path.stem).tokens >= 8 * longest, path.stem
