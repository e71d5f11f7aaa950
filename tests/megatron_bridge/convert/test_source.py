"""Rows that are decoded on the way are the rows of the whole tensor, and what cannot be decoded is named at once.

The oracle is the decoder of whole tensors, which has its own laws. Not covered: formats without a codec.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_bridge.convert.source import Source
from miles_like.hf.checkpoint import HFCheckpoint, write_hf
from quant.hf_config import spec_to_hf
from quant.registry import CODECS, make_codec
from quant.spec import CONVENTIONS, QuantFormat, QuantSpec
from quant.stream import dequantize_stream, quantize_stream, stored_name
from tests.support.refusals import Facts, refuses

SPEC = QuantSpec(format=QuantFormat.FP8, block=(16, 24))
CONFIG = {"quantization_config": spec_to_hf(SPEC)}
UP, DOWN, NORM = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"
GATE = UP.replace("up", "gate")
BLOCKS = dict.fromkeys((QuantFormat.FP8, QuantFormat.FP8_UE8M0), (16, 24)) | {QuantFormat.INT4: (1, 32)}
EACH = [QuantSpec(format=f, block=BLOCKS.get(f, (0, 0)), convention=c) for f in CODECS for c in CONVENTIONS[f]]
each_format = pytest.mark.parametrize("spec", EACH, ids=[f"{s.format}-{s.convention}" for s in EACH])


def _stored(spec: QuantSpec = SPEC) -> dict[str, Tensor]:
    """Partial blocks at both edges, of formats that have such; scales after all weights, so that they come into another
    file."""
    g, k = torch.Generator().manual_seed(0), 70 if spec.block[0] > 1 else 96
    shapes = {UP: (100, k), GATE: (100, k), DOWN: (7, 100 if spec.block[0] > 1 else 128), NORM: (k,)}
    named = {name: torch.randn(shape, generator=g).to(torch.bfloat16) for name, shape in shapes.items()}
    stored, codes = dict(quantize_stream(named.items(), spec)), make_codec(spec).leaves[0]
    return dict(sorted(stored.items(), key=lambda item: not item[0].endswith((codes, "weight"))))


def _write(path: Path, stored: dict[str, Tensor], config: dict = CONFIG) -> Path:  # type: ignore[type-arg]
    write_hf(path, iter(stored.items()), config, shard_bytes=4900)
    return path


@each_format
def test_any_rows_are_those_of_the_whole_tensor(spec: QuantSpec, tmp_path: Path) -> None:
    stored = _stored(spec)
    source = Source.open(_write(tmp_path / "hf", stored, {"quantization_config": spec_to_hf(spec)}))
    whole = dict(dequantize_stream(stored.items(), spec))
    assert len({info.file for info in source.stored(UP)}) == 2
    assert sorted(source.names()) == sorted(whole)
    assert all(name in source for name in whole)
    assert not any(name in source for name in stored if name not in whole)
    assert [source.nbytes(n) for n in whole] == [t.nbytes for t in whole.values()]
    assert [source.shape(n) for n in whole] == [t.shape for t in whole.values()]
    buffer, draw = memoryview(bytearray(20_000)), random.Random(0)
    for name, tensor in whole.items():
        n = len(tensor)
        cuts = [(0, n), (n - 1, n)] + [sorted(draw.sample(range(n), 2)) for _ in range(20)]
        for i, (a, b) in enumerate(cuts):
            rows = source.rows(name, a, b, buffer if i % 2 else None)
            assert torch.equal(rows.view(torch.int16), tensor[a:b].view(torch.int16)), (name, a, b)
            assert rows.dtype is source.dtype(name)
            assert rows.untyped_storage().nbytes() == rows.nbytes  # torch.save writes all of it


@each_format
def test_every_part_must_be_there_and_fit(spec: QuantSpec, tmp_path: Path) -> None:
    """From the headers alone; leaves that another encoder writes and no reader needs may be missing."""
    codec, stored = make_codec(spec), _stored(spec)
    codes, *others = codec.leaves
    config = {"quantization_config": spec_to_hf(spec)}

    def refused(name: str, changed: Tensor | None, *facts: object) -> None:
        rest = {n: t for n, t in stored.items() if n != name} | ({} if changed is None else {name: changed})
        with refuses(ValueError, *facts):
            Source.open(_write(tmp_path / "hf", rest, config))
        shutil.rmtree(tmp_path / "hf")

    of_up = {leaf: stored_name(UP, leaf) for leaf in codec.leaves}
    refused(of_up[codes], None, of_up[codes])
    refused(of_up[codes], torch.ones(5, dtype=stored[of_up[codes]].dtype), "[5]")
    for leaf in others:
        name = of_up[leaf]
        if leaf in codec.dropped:
            rest = {n: t for n, t in stored.items() if n != name}
            Source.open(_write(tmp_path / "hf", rest, config))
            shutil.rmtree(tmp_path / "hf")
            continue
        refused(name, None, of_up[codes], name)
        refused(name, torch.ones(3, 3).to(stored[name].dtype), name, "(3, 3)")
        refused(name, stored[name].float().half(), name, "torch.float16")
    write_hf(tmp_path / "none", stored.items(), {})
    with refuses(ValueError, "quantization_config"):
        Source.open(tmp_path / "none")


def test_a_weight_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    spec = QuantSpec(format=QuantFormat.INT4)
    stored = _stored(spec) | {UP: torch.ones(100, 96, dtype=torch.bfloat16)}
    with refuses(ValueError, "model.layers.0.mlp.up_proj.weight"):
        Source.open(_write(tmp_path / "hf", stored, {"quantization_config": spec_to_hf(spec)}))


def test_what_a_file_says_of_the_whole_weight_is_compared_though_rows_are_read(tmp_path: Path) -> None:
    spec = QuantSpec(format=QuantFormat.INT4)
    stored = _stored(spec)
    stored[stored_name(UP, "weight_shape")] = torch.tensor([96, 100])
    source = Source.open(_write(tmp_path / "hf", stored, {"quantization_config": spec_to_hf(spec)}))
    with refuses(ValueError, "model.layers.0.mlp.up_proj.weight_shape", "[96, 100]", "[100, 96]"):
        source.rows(UP, 3, 5)


def test_scales_that_are_powers_of_two_are_read_as_they_are(tmp_path: Path) -> None:
    """DeepSeek-V3.1 says so in its config; the stored scales are fp32 as ever, and decoding multiplies by them."""
    stored = _stored()
    for name in (n for n in stored if n.endswith("_scale_inv")):
        stored[name] = stored[name].log2().ceil().exp2()
    config = {"quantization_config": spec_to_hf(SPEC) | {"scale_fmt": "ue8m0"}}
    source = Source.open(_write(tmp_path / "hf", stored, config))
    for name, tensor in dequantize_stream(stored.items(), SPEC):
        assert torch.equal(source.rows(name, 0, len(tensor)).view(torch.int16), tensor.view(torch.int16))


def _plain_weight(stored: dict[str, Tensor]) -> Facts:
    stored[DOWN] = stored[DOWN].to(torch.bfloat16)
    return DOWN, f"{DOWN}_scale_inv"


def _other_blocks(stored: dict[str, Tensor]) -> Facts:
    stored[UP + "_scale_inv"] = torch.ones(4, 3)
    return f"{UP}_scale_inv", "(4, 3)", "(16, 24)", "(7, 3)"


@pytest.mark.parametrize("damage", [_plain_weight, _other_blocks])
def test_what_cannot_be_decoded_is_named_before_anything_is_read(
    damage: Callable[[dict[str, Tensor]], Facts], tmp_path: Path
) -> None:
    stored = _stored()
    facts = damage(stored)
    with refuses(ValueError, *facts):
        Source.open(_write(tmp_path / "hf", stored))


def test_damage_in_the_data_is_named_when_it_is_read(tmp_path: Path) -> None:
    stored = _stored()
    stored[UP + "_scale_inv"][6, 0] = float("inf")
    stored[DOWN].view(torch.uint8)[3, 3] = 0x7F  # a NaN
    source = Source.open(_write(tmp_path / "hf", stored))
    assert source.rows(UP, 0, 96).shape == (96, 70)
    with refuses(ValueError, "model.layers.0.mlp.up_proj.weight_scale_inv"):
        source.rows(UP, 90, 100)
    with refuses(ValueError, "model.layers.0.mlp.down_proj.weight", "NaN"):
        source.rows(DOWN, 0, 1)
    info = HFCheckpoint(source.hf.path).info(NORM)
    with info.file.open("r+b") as f:
        f.truncate(info.offset + 10)
    with refuses(ValueError, "model-00003-of-00003.safetensors", 130):
        source.rows(NORM, 0, 70)
