"""What other people's code makes of our bytes, and ours of theirs: compressed-tensors and transformers.

Not compared, because transformers 5.23 decodes them wrongly itself: experts in NVFP4 (it drops the global scale) and in
compressed-tensors' MXFP8 (it raises). For those the compressors are the oracle.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.hf.checkpoint import write_hf
from quant.formats.codec import Codec
from quant.hf_config import quantized_config, spec_to_hf
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream

F = QuantFormat
PACKED = [QuantSpec(format=f, convention="compressed-tensors") for f in (F.INT4, F.MXFP8, F.MXFP4, F.NVFP4)]
every_format = pytest.mark.parametrize("codec", [make_codec(s) for s in PACKED], ids=[s.format for s in PACKED])


def compressor(spec: QuantSpec) -> tuple[Any, Any]:
    """compressed-tensors' class for what our config.json says, and the scheme it reads there."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    scheme = QuantizationConfig.model_validate(spec_to_hf(spec)).config_groups["group_0"]
    return BaseCompressor.get_value_from_registry(scheme.format), scheme


def weight() -> Tensor:
    """bf16 [48, 256] of several magnitudes, with groups of zeros and of numbers too small for their scale."""
    g = torch.Generator().manual_seed(5)
    w = torch.randn(48, 256, generator=g) * torch.logspace(-4, 1, 48)[:, None]
    w[3], w[5, 64:128], w[7, :32] = 0, 0, 1e-9
    return w.to(torch.bfloat16)


@every_format
def test_compressed_tensors_decodes_our_parts(codec: Codec) -> None:
    """Every value, to the bit, as bf16."""
    theirs, scheme = compressor(codec.spec)
    q = codec.encode({"w": weight()})["w"]
    dense = theirs.decompress(dict(q.stored), scheme)["weight"]
    assert dense.dtype is torch.bfloat16
    assert torch.equal(dense, codec.decode(q))


@every_format
def test_we_decode_compressed_tensors_parts(codec: Codec) -> None:
    """It chooses other scales, so its codes use what ours do not: -8 in INT4, 0.125 for zeros in NVFP4."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    theirs, scheme = compressor(codec.spec)
    w, args = weight(), scheme.weights
    groups = w.unflatten(-1, (-1, args.group_size))
    whole = generate_gparam(w.min(), w.max()) if codec.spec.format is F.NVFP4 else None
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=whole)
    state = {"weight": w, "weight_scale": scale} | ({} if whole is None else {"weight_global_scale": whole})
    packed = theirs.compress(state, scheme)
    ours = codec.adopt("m.weight", packed)
    assert torch.equal(codec.decode(ours), theirs.decompress(packed, scheme)["weight"])


def test_packed_words_are_compressed_tensors() -> None:
    """Every integer, in both directions."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    codec = make_codec(QuantSpec(format=F.INT4))
    w = torch.randint(-7, 8, (16, 64), generator=torch.Generator().manual_seed(6)).float()
    w[:, ::32] = 7
    q = codec.encode({"w": w})["w"]
    assert torch.equal(q.stored["weight_packed"], pack_to_int32(w.to(torch.int8), 4))
    every = torch.arange(-8, 8).repeat(4)[None].to(torch.int8)
    words = pack_to_int32(every, 4)
    assert torch.equal(unpack_from_int32(words, 4, every.shape), every)
    parts = {
        "weight_packed": words,
        "weight_scale": torch.ones(1, 2).to(torch.bfloat16),
        "weight_shape": torch.tensor([1, 64]),
    }
    assert torch.equal(codec.decode(codec.adopt("m.weight", parts)), every.to(torch.bfloat16))
    vectors = torch.cat([torch.arange(-8, 0), torch.arange(0, 8)])[None].to(torch.int8)
    assert [int(x) & 0xFFFFFFFF for x in pack_to_int32(vectors, 4)[0]] == [0x76543210, 0xFEDCBA98]


def test_nvfp4_scales_are_compressed_tensors_own() -> None:
    """The same global scale and block scales, but for zeros; and so the same codes."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    codec = make_codec(PACKED[-1])
    theirs, scheme = compressor(codec.spec)
    w = (torch.randn(32, 128, generator=torch.Generator().manual_seed(8)) * 0.03).to(torch.bfloat16)
    groups = w.float().unflatten(-1, (-1, 16))
    whole = generate_gparam(w.float().min(), w.float().max())
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=whole)
    state = {"weight": w.float(), "weight_scale": scale, "weight_global_scale": whole}
    packed = theirs.compress(state, scheme)
    for leaf, part in codec.encode({"w": w})["w"].stored.items():
        assert torch.equal(part.view(torch.uint8), packed[leaf].view(torch.uint8)), leaf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A Qwen3-MoE of one layer whose sizes are multiples of 128: transformers infers FP8's blocks from the shapes."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, moe_intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=64, num_experts=2, num_experts_per_tok=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("bf16")
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.05)
    made.save_pretrained(path)
    named = load_file(path / "model.safetensors")
    return config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"}, named


DIRECTORIES = [
    QuantSpec.of(F.FP8),
    QuantSpec.of(F.FP8, "experts"),
    QuantSpec.of(F.FP8_UE8M0),
    QuantSpec.of(F.MXFP8),
    QuantSpec.of(F.INT4),
    QuantSpec.of(F.INT4, "all", block=(1, 64)),
    QuantSpec.of(F.MXFP4),
]


@pytest.mark.parametrize("spec", DIRECTORIES, ids=[f"{s.format}-{len(s.ignore)}" for s in DIRECTORIES])
def test_transformers_loads_our_directories(
    spec: QuantSpec, model: tuple[dict[str, Any], dict[str, Tensor]], tmp_path: Path
) -> None:
    """Every parameter is the value that our codec decodes, or the bf16 weight where the spec leaves it.

    Not covered: what a GPU kernel makes of the codes.
    """
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config, named = model
    write_hf(tmp_path / "out", quantize_stream(named.items(), spec), quantized_config(config, spec, list(named)))
    packed = spec.convention == "compressed-tensors"
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if packed else {}
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True, **how
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    have = dict(loaded.named_parameters())
    codec = make_codec(spec)
    covered = {n: w for n, w in named.items() if spec.covers(n, w.shape)}
    assert covered
    for name, w in (named | dict(codec.fake(covered))).items():
        assert torch.equal(_find(have, name), w), name


def _find(parameters: dict[str, Tensor], name: str) -> Tensor:
    """transformers stacks experts, gate above up."""
    parts = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if parts is None:
        return parameters[name]
    stack = parameters[f"{parts[1]}.{'down_proj' if parts[3] == 'down' else 'gate_up_proj'}"][int(parts[2])]
    return stack if parts[3] == "down" else stack.chunk(2)[parts[3] == "up"]
