"""Rows that are decoded on the way are the rows of the whole tensor, and what cannot be decoded is named at once.

The oracle is the decoder of whole tensors, which has its own laws. Not covered: float8 formats other than e4m3.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_bridge.convert.source import Source
from miles_like.hf_checkpoint import HFCheckpoint, write_hf
from quant.hf_config import spec_to_hf
from quant.spec import QuantFormat, QuantSpec
from quant.stream import dequantize_stream, quantize_stream

SPEC = QuantSpec(format=QuantFormat.FP8, block=(16, 24))
CONFIG = {"quantization_config": spec_to_hf(SPEC)}
UP, DOWN, NORM = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"


def _stored() -> dict[str, Tensor]:
    """Partial blocks at both edges; scales after all weights, so that they come into another file."""
    g = torch.Generator().manual_seed(0)
    shapes = {UP: (100, 70), DOWN: (7, 100), NORM: (70,)}
    named = {name: torch.randn(shape, generator=g).to(torch.bfloat16) for name, shape in shapes.items()}
    stored = dict(quantize_stream(named.items(), SPEC))
    return dict(sorted(stored.items(), key=lambda item: item[0].endswith("_scale_inv")))


def _write(path: Path, stored: dict[str, Tensor], config: dict = CONFIG) -> Path:  # type: ignore[type-arg]
    write_hf(path, iter(stored.items()), config, shard_bytes=7100)
    return path


def test_any_rows_are_those_of_the_whole_tensor(tmp_path: Path) -> None:
    stored = _stored()
    source = Source.open(_write(tmp_path / "hf", stored))
    whole = dict(dequantize_stream(stored.items(), SPEC))
    assert len({info.file for info in source.stored(UP)}) == 2
    assert sorted(source.names()) == sorted(whole)
    assert [source.nbytes(n) for n in whole] == [t.nbytes for t in whole.values()]
    buffer, draw = memoryview(bytearray(20_000)), random.Random(0)
    for name, tensor in whole.items():
        n = len(tensor)
        cuts = [(0, n), (n - 1, n)] + [sorted(draw.sample(range(n), 2)) for _ in range(40)]
        for i, (a, b) in enumerate(cuts):
            rows = source.rows(name, a, b, buffer if i % 2 else None)
            assert torch.equal(rows.view(torch.int16), tensor[a:b].view(torch.int16)), (name, a, b)
            assert rows.dtype is source.dtype(name)
            assert rows.untyped_storage().nbytes() == rows.nbytes  # torch.save writes all of it


def test_scales_that_are_powers_of_two_are_read_as_they_are(tmp_path: Path) -> None:
    """DeepSeek-V3.1 says so in its config; the stored scales are fp32 as ever, and decoding multiplies by them."""
    stored = _stored()
    for name in (n for n in stored if n.endswith("_scale_inv")):
        stored[name] = stored[name].log2().ceil().exp2()
    config = {"quantization_config": spec_to_hf(SPEC) | {"scale_fmt": "ue8m0"}}
    source = Source.open(_write(tmp_path / "hf", stored, config))
    for name, tensor in dequantize_stream(stored.items(), SPEC):
        assert torch.equal(source.rows(name, 0, len(tensor)).view(torch.int16), tensor.view(torch.int16))


def _lose_scale(stored: dict[str, Tensor]) -> str:
    del stored[UP + "_scale_inv"]
    return rf"{UP}: codes without their scale"


def _lose_weight(stored: dict[str, Tensor]) -> str:
    del stored[DOWN]
    return rf"{DOWN}_scale_inv: a scale without its weight"


def _plain_weight(stored: dict[str, Tensor]) -> str:
    stored[DOWN] = stored[DOWN].to(torch.bfloat16)
    return rf"{DOWN}_scale_inv: a scale without its weight"


def _other_blocks(stored: dict[str, Tensor]) -> str:
    stored[UP + "_scale_inv"] = torch.ones(4, 3)
    return r"up_proj.*\(4, 3\).*blocks of \(16, 24\) has float32 \(7, 3\)"


def _not_a_matrix(stored: dict[str, Tensor]) -> str:
    stored[UP] = stored[UP].flatten()
    return r"up_proj.weight: fp8 codes \(weight\) are 2-D"


def _half_scales(stored: dict[str, Tensor]) -> str:
    stored[UP + "_scale_inv"] = stored[UP + "_scale_inv"].half()
    return r"up_proj.*float16"


@pytest.mark.parametrize(
    "damage", [_lose_scale, _lose_weight, _plain_weight, _other_blocks, _not_a_matrix, _half_scales]
)
def test_what_cannot_be_decoded_is_named_before_anything_is_read(
    damage: Callable[[dict[str, Tensor]], str], tmp_path: Path
) -> None:
    stored = _stored()
    said = damage(stored)
    with pytest.raises(ValueError, match=said):
        Source.open(_write(tmp_path / "hf", stored))


def test_codes_need_a_config_that_knows_them(tmp_path: Path) -> None:
    path = _write(tmp_path / "hf", _stored(), {})
    with pytest.raises(ValueError, match=r"a part of a quantized weight.*has no quantization_config"):
        Source.open(path)


def test_damage_in_the_data_is_named_when_it_is_read(tmp_path: Path) -> None:
    stored = _stored()
    stored[UP + "_scale_inv"][6, 0] = float("inf")
    stored[DOWN].view(torch.uint8)[3, 3] = 0x7F  # a NaN
    source = Source.open(_write(tmp_path / "hf", stored))
    assert source.rows(UP, 0, 96).shape == (96, 70)
    with pytest.raises(ValueError, match=r"up_proj.*scales must be finite"):
        source.rows(UP, 90, 100)
    with pytest.raises(ValueError, match=r"down_proj.*NaN"):
        source.rows(DOWN, 0, 1)
    info = HFCheckpoint(source.hf.path).info(NORM)
    with info.file.open("r+b") as f:
        f.truncate(info.offset + 10)
    with pytest.raises(ValueError, match="cut while it was read"):
        source.rows(NORM, 0, 70)
