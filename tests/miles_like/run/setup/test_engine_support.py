"""The rollout's checkpoint: which format it gets, that nothing is lost on the way, and what no engine could divide."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bridge.config import PrecisionConfig
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.precision import served_spec
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.pipeline.rollout_checkpoint import store_served
from miles_like.run.assemble import checkpoint_bytes
from miles_like.run.setup.engine_support import check_attention, check_engine, check_engine_shards
from quant.hf_config import spec_from_hf, spec_to_hf
from quant.registry import codec_or_none
from quant.spec import EXPERTS_ONLY, QuantFormat, QuantSpec
from quant.stream import dequantize_stream, quantize_stream
from rollout.config import EmbeddedFlags, RolloutConfig, SGLangFlags
from tests.support.refusals import refuses
from tests.support.tiny_models import random_tensors, tiny, tiny_qwen, write_checkpoint

CONFIGS = Path(__file__).parents[4] / "configs"
FP8 = QuantSpec(format=QuantFormat.FP8, block=(64, 64))


def _precision(**keys: Any) -> PrecisionConfig:
    return PrecisionConfig(**keys, allow_without_qat=True)


def test_a_checkpoint_in_the_runs_format_is_served_as_it_is_and_any_other_stored_anew() -> None:
    """Its own blocks: what a user fetched quantized is what others trained and measured."""
    hf = tiny_qwen(quantization_config=spec_to_hf(FP8))
    assert served_spec(_precision(format="fp8"), hf) == FP8
    assert served_spec(_precision(format="int4"), hf) == QuantSpec.of(QuantFormat.INT4)
    assert served_spec(_precision(format="bf16"), hf) is None
    with refuses(ValueError, "precision.block", "[128, 128]", "[64, 64]"):
        served_spec(_precision(format="fp8", block=(128, 128)), hf)


@pytest.mark.parametrize("fmt", ["bf16", "int4", "nvfp4", "fp8-ue8m0"])
def test_what_is_stored_anew_is_the_fetched_weights_decoded_and_encoded(fmt: str, tmp_path: Path) -> None:
    """From FP8, tensor by tensor: the oracle is the whole model decoded, then encoded, in memory."""
    hf = tiny_qwen()
    tensors = random_tensors(hf)
    coded = dict(quantize_stream(tensors.items(), FP8))
    write_checkpoint(tmp_path / "fp8", hf | {"quantization_config": spec_to_hf(FP8)}, coded)
    spec = _precision(format=fmt).spec()
    store_served(tmp_path / "fp8", tmp_path / "out", spec)
    out = HFCheckpoint(tmp_path / "out")
    want = dict(quantize_stream(dequantize_stream(coded.items(), FP8), spec))
    assert set(out.names()) == set(want)
    for name, tensor in want.items():
        assert torch.equal(out.read(name).view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
    stored = spec_from_hf(out.config)
    for name, tensor in tensors.items():
        covered = spec is not None and spec.covers(name, tensor.shape)
        assert covered == (stored is not None and stored.covers(name, tensor.shape))


def test_weights_that_share_a_scale_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All gates before all ups: the stream reads each gate's up by its name, and never holds more than one pair."""
    hf = tiny_qwen()
    tensors = dict(sorted(random_tensors(hf).items(), key=lambda item: ".up_proj" in item[0]))
    write_checkpoint(tmp_path / "bf16", hf, tensors, shard_bytes=1 << 16)
    order: list[str] = []
    stock = HFCheckpoint.read
    monkeypatch.setattr(HFCheckpoint, "read", lambda self, name: order.append(name) or stock(self, name))
    store_served(tmp_path / "bf16", tmp_path / "out", QuantSpec.of(QuantFormat.NVFP4))
    gates = [i for i, name in enumerate(order) if ".experts." in name and "gate_proj" in name]
    assert gates and all(order[i + 1] == order[i].replace("gate_proj", "up_proj") for i in gates)


def test_blocks_that_a_servers_ranks_would_cut_are_refused_with_both_numbers() -> None:
    """Qwen3-235B's experts of 1536 rows over 8 ranks are 192 each: vLLM and SGLang die of it while they load."""
    hf = tiny_qwen(moe_intermediate_size=1536, hidden_size=2048)
    spec = QuantSpec.of(QuantFormat.FP8, "experts")
    with refuses(ValueError, 8, 192, 128, "rollout.sglang.ep_size"):
        check_engine_shards(SGLangFlags(tp_size=8), hf, spec)
    check_engine_shards(SGLangFlags(tp_size=8, ep_size=8), hf, spec)
    with refuses(ValueError, "model.layers.1.mlp.experts.0.gate_proj.weight", 192):  # layer 0 is left out
        check_engine_shards(SGLangFlags(tp_size=8), hf, replace(spec, ignore=(*spec.ignore, "layers.0")))
    check_engine_shards(SGLangFlags(tp_size=4), hf, spec)
    with refuses(ValueError, "rollout.sglang.tp_size", 1, "ep_size", 4611686018427387904):
        check_engine_shards(SGLangFlags(ep_size=2**62), hf, spec)
    with refuses(ValueError, "rollout.sglang.tp_size", 4, "dp_size", 8):
        check_engine_shards(SGLangFlags(tp_size=4, dp_size=8, enable_dp_attention=True), hf, spec)


def test_attention_that_would_need_one_scale_is_refused_where_engines_fuse_it() -> None:
    """vLLM and SGLang take one number for q, k and v, and warn; the embedded engine multiplies each by itself."""
    spec = QuantSpec.of(QuantFormat.NVFP4, "all", convention="modelopt")
    with refuses(ValueError, "model.layers.0.self_attn.q_proj.weight", "experts"):
        check_engine_shards(SGLangFlags(gpu="blackwell"), tiny_qwen(), spec)
    check_engine_shards(SGLangFlags(gpu="blackwell"), tiny_qwen(), QuantSpec.of(QuantFormat.NVFP4))
    check_engine(RolloutConfig(engine="embedded"), _precision(format="nvfp4", scope="all"), tiny_qwen())


def test_dense_layers_that_stock_sglang_does_not_know_are_refused() -> None:
    """tests/sglang_cpu's server gave nan for such a model; the published ones have none."""
    sglang, hf = RolloutConfig(engine="sglang"), tiny_qwen(mlp_only_layers=[0])
    layers = hf["num_hidden_layers"]
    with refuses(ValueError, layers - 1, layers, "rollout.engine", "embedded"):
        check_engine(sglang, _precision(format="bf16"), hf)
    check_engine(RolloutConfig(), _precision(format="bf16"), hf)
    check_engine(sglang, _precision(format="bf16"), tiny_qwen(mlp_only_layers=[]))


def test_an_engine_that_would_scale_anew_is_refused() -> None:
    sglang = RolloutConfig(engine="sglang", sglang=SGLangFlags(gpu="blackwell"))
    with refuses(ValueError, "fp8-ue8m0"):
        check_engine(sglang, _precision(format="fp8"), tiny_qwen())
    check_engine(sglang, _precision(format="fp8-ue8m0"), tiny_qwen())


def test_flashinfer_is_not_deterministic_for_latent_attention() -> None:
    for backend, hf in (("flashinfer", tiny_qwen()), ("triton", tiny()), ("fa3", tiny())):
        check_attention(SGLangFlags(enable_deterministic_inference=True, attention_backend=backend), hf)
    check_attention(SGLangFlags(attention_backend="flashinfer"), tiny())
    with refuses(ValueError, "flashinfer", "fa3"):
        check_attention(SGLangFlags(enable_deterministic_inference=True, attention_backend="flashinfer"), tiny())


@pytest.mark.parametrize("name", ["kimi_k2", "qwen3_30b_a3b"])
@pytest.mark.parametrize(
    ("ignore", "splits"),
    [
        (EXPERTS_ONLY, False),
        (("layers.0.self_attn", "layers.1*.mlp.experts", "experts.*.down_proj", "lm_head"), False),
        (("experts.3.down_proj",), True),
        (("experts.[0-3].down_proj",), True),
        (("re:.*experts[.]1[0-9]?[.]up_proj",), True),
        (("glob:*.experts.?.up_proj",), True),
    ],
)
def test_bytes_of_one_expert_times_their_number_are_those_of_all(
    name: str, ignore: tuple[str, ...], splits: bool
) -> None:
    """A plan goes over kinds of tensors, not over the 70,000 of a large model; over all where a pattern may tell the
    experts of a layer apart."""
    hf = json.loads((CONFIGS / name / "config.json").read_text()) | {"num_hidden_layers": 3}
    hf |= {"n_routed_experts": 16} if name == "kimi_k2" else {"num_experts": 16}
    spec = QuantSpec(format=QuantFormat.FP8, ignore=ignore)
    assert spec.may_split_experts == splits
    tensors = family_of(hf).bind(hf)
    codec = codec_or_none(spec)
    assert codec is not None
    stored = 0
    for place in tensors.places():
        size = math.prod(place.shape)
        covered = spec.covers(place.hf_name, place.shape)
        parts = (
            [math.prod(s) * d.itemsize for d, s in codec.layout(place.shape, place.hf_name).values()] if covered else []
        )
        stored += sum(parts) if covered else size * tensors.dtype(place.entry).itemsize
    assert checkpoint_bytes(hf, spec)[0] == stored
    kinds = list(tensors.kinds())
    assert sum(n for _, n in kinds) == len(list(tensors.places())) and len(kinds) < len(list(tensors.places())) / 2


@pytest.mark.parametrize(
    ("sizes", "precision", "facts"),
    [
        ((3, 1), {}, ("num_attention_heads", 4, "tp_size", 3)),
        ((4, 1), {}, ("num_key_value_heads", 2, "tp_size", 4)),
        ((2, 4), {}, ("tp_size", 2, "ep_size", 4)),
        # of 192 rows of queries each rank's 96 would end or begin inside a block
        ((2, 1), {"format": "fp8"}, ("model.layers.0.self_attn.q_proj.weight", 192, 96, 128)),
    ],
)
def test_ranks_that_an_embedded_server_cannot_have_are_refused(
    sizes: tuple[int, int], precision: dict[str, Any], facts: tuple[object, ...]
) -> None:
    rollout = RolloutConfig(embedded=EmbeddedFlags(tp_size=sizes[0], ep_size=sizes[1]))
    with refuses(ValueError, "rollout.embedded.tp_size", *facts):
        check_engine(rollout, _precision(**precision), tiny_qwen())


def test_ranks_that_divide_the_model_are_accepted() -> None:
    check_engine(RolloutConfig(embedded=EmbeddedFlags(tp_size=2, ep_size=2)), _precision(format="int4"), tiny_qwen())
