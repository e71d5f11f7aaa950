"""`to_hf` writes, in every format, the directory that `quantize` makes of the BF16 one; and shards converted from a
quantized directory are those of the decoded one.

The encoder of whole weights is the oracle of the encoder of bands; the codecs have their own laws. Not covered:
FP8's way through the command line and the pipeline, which `test_to_hf.py` and `tests/e2e` have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_bridge.convert.directory.manifest import Manifest
from megatron_bridge.convert.memory_limit import Memory
from megatron_bridge.convert.source import Source
from megatron_bridge.convert.to_hf import to_hf
from megatron_bridge.convert.to_megatron import convert_source, to_megatron
from miles_like.hf.checkpoint import HFCheckpoint, write_hf
from miles_like.pipeline.dequantize import dequantize_checkpoint
from miles_like.pipeline.quantize import quantize_checkpoint
from quant.hf_config import quantized_config
from quant.registry import CODECS, make_codec
from quant.spec import CONVENTIONS, QuantFormat, QuantSpec
from tests.support.chosen import checked
from tests.support.converted import converted, differing
from tests.support.refusals import Facts, refuses
from tests.support.tiny_models import random_tensors, tiny

HF = tiny(num_hidden_layers=2, num_nextn_predict_layers=1, n_routed_experts=4)
EACH = [QuantSpec.of(f, convention=c) for f in CODECS for c in CONVENTIONS[f]]
FIRST = [s for s in EACH if s.format in (QuantFormat.FP8, QuantFormat.NVFP4)]
each_format = pytest.mark.parametrize("spec", checked(EACH, FIRST), ids=[f"{s.format}-{s.convention}" for s in EACH])


def _tensors() -> dict[str, Tensor]:
    """Gates and ups of very different size: what they share is not either's own."""
    tensors = random_tensors(HF, mtp=True)
    for name, tensor in tensors.items():
        if name.endswith("up_proj.weight"):
            tensor *= 10
    return tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds hf/ and megatron/."""
    return converted(tmp_path_factory.mktemp("source"), HF, _tensors()).parent


def _read(path: Path) -> dict[str, Tensor]:
    return dict(HFCheckpoint(path).stream())


@pytest.fixture
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_bridge.convert.to_hf.plan_memory", lambda *a, **k: Memory(1, 5000))


@pytest.mark.parametrize("fmt", checked(CODECS, (QuantFormat.FP8, QuantFormat.INT4)))
def test_what_is_written_is_what_quantize_makes(
    fmt: QuantFormat, source: Path, tmp_path: Path, small_bands: None
) -> None:
    """Tensors and config.json, though gate and up of an expert may lie in two files, each written for itself."""
    quantize_checkpoint(source / "hf", tmp_path / "quantized", QuantSpec.of(fmt))
    to_hf(source / "megatron", tmp_path / "out", format=fmt, shard_bytes=20_000)
    got, want = _read(tmp_path / "out"), _read(tmp_path / "quantized")
    assert differing(got, want) == []
    coded = [t for n, t in got.items() if n.endswith("down_proj." + make_codec(QuantSpec.of(fmt)).leaves[0])]
    assert sum(t.dtype is not torch.bfloat16 for t in coded) >= 4
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "quantized" / "config.json").read_bytes()
    assert Manifest.read(tmp_path / "out").tensors.keys() == got.keys()
    if fmt is QuantFormat.NVFP4:
        files = HFCheckpoint(tmp_path / "out")
        pairs = [(n, n.replace("gate_proj", "up_proj")) for n in files.names() if n.endswith("gate_proj.weight_packed")]
        assert any(files.info(gate).file != files.info(up).file for gate, up in pairs)


@each_format
def test_shards_of_codes_are_those_of_the_decoded_directory(spec: QuantSpec, source: Path, tmp_path: Path) -> None:
    """Byte for byte of every piece, in chunks of a few rows; codes and what belongs to them in different files."""
    quantize_checkpoint(source / "hf", tmp_path / "near", spec)
    near, codes = HFCheckpoint(tmp_path / "near"), make_codec(spec).leaves[0]
    apart = sorted(near.names(), key=lambda n: not n.endswith(codes))
    write_hf(tmp_path / "coded", ((n, near.read(n)) for n in apart), near.config, shard_bytes=100_000)
    dequantize_checkpoint(tmp_path / "coded", tmp_path / "plain")
    facts = {}
    for which in ("coded", "plain"):
        opened = Source.open(tmp_path / which)
        convert_source(opened, tmp_path / f"{which}-out", chunk_bytes=6000, unit_bytes=300_000)
        pieces = Manifest.read(tmp_path / f"{which}-out").tensors
        facts[which] = {
            k: (f.dtype, f.shape, sorted((p.offset, p.sizes, p.sum) for p in f.pieces)) for k, f in pieces.items()
        }
    assert facts["coded"].keys() == facts["plain"].keys()
    for key, (dtype, shape, pieces) in facts["plain"].items():
        if spec.block[0] == 1:  # the same rows are together
            assert facts["coded"][key] == (dtype, shape, pieces), key
        else:
            assert facts["coded"][key][:2] == (dtype, shape), key
    to_hf(tmp_path / "coded-out", tmp_path / "back")
    assert differing(_read(tmp_path / "back"), _read(tmp_path / "plain")) == []


def test_a_source_s_own_convention_is_kept(source: Path, tmp_path: Path, small_bands: None) -> None:
    """ModelOpt's has a second file, which the manifest lists; BF16 has neither."""
    spec = QuantSpec(format=QuantFormat.NVFP4, convention="modelopt", ignore=("layers.0", "self_attn"))
    quantize_checkpoint(source / "hf", tmp_path / "coded", spec)
    to_megatron(tmp_path / "coded", tmp_path / "shards")
    assert not (tmp_path / "shards" / "hf" / "hf_quant_config.json").exists()
    to_hf(tmp_path / "shards", tmp_path / "out", format="nvfp4")
    dequantize_checkpoint(tmp_path / "coded", tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "want", spec)
    assert differing(_read(tmp_path / "out"), _read(tmp_path / "want")) == []
    for name in ("config.json", "hf_quant_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "want" / name).read_bytes()
    assert "hf_quant_config.json" in Manifest.read(tmp_path / "out").files
    to_hf(tmp_path / "shards", tmp_path / "bf16")
    assert not (tmp_path / "bf16" / "hf_quant_config.json").exists()
    assert json.loads((tmp_path / "bf16" / "config.json").read_text()) == HF
    to_hf(tmp_path / "shards", tmp_path / "int4", format="int4")  # of another format its own spec says nothing
    config = json.loads((tmp_path / "int4" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"


@pytest.mark.parametrize(
    ("change", "fmt", "facts"),
    [
        (
            {"moe_intermediate_size": 48},
            "int4",
            ("model.layers.1.mlp.experts.0.down_proj.weight", 48, 32),
        ),
        ({"moe_intermediate_size": 40}, "nvfp4", (40, 16)),
    ],
)
def test_a_model_that_the_format_cannot_hold_is_refused_at_once(
    change: dict[str, Any], fmt: str, facts: Facts, tmp_path: Path
) -> None:
    hf = tiny(num_hidden_layers=2, n_routed_experts=4) | change
    path = converted(tmp_path, hf, random_tensors(hf))
    with refuses(ValueError, *facts):
        to_hf(path, tmp_path / "out", format=fmt)
    assert not list(tmp_path.glob("out*"))


def test_half_of_what_shares_a_scale_is_refused(source: Path, tmp_path: Path) -> None:
    """Where the source's own config leaves only the gates out."""
    spec = QuantSpec(format=QuantFormat.NVFP4, ignore=("gate_proj", "self_attn"))
    quantize_checkpoint(source / "hf", tmp_path / "coded", QuantSpec.of(QuantFormat.NVFP4))
    to_megatron(tmp_path / "coded", tmp_path / "shards")
    config = json.loads((tmp_path / "shards" / "hf" / "config.json").read_text())
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(quantized_config(config, spec)))
    with refuses(ValueError, "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"):
        to_hf(tmp_path / "shards", tmp_path / "out", format="nvfp4", hf_config=tmp_path / "own")
