"""Conversion is the longest stage for a large model: it must survive a kill without redoing what is whole, and it must
refuse a damaged checkpoint rather than hand Megatron something that loads (Megatron's loader checks neither dtypes nor
finiteness, nor that a vocabulary has the right size).

The values and layouts are the weight round trip's law. Not covered: a kill between the last rename and the removal of
the index files, checkpoints larger than memory (memory is bounded by reading in chunks).
"""

from __future__ import annotations

import errno
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_bridge import stream_convert
from megatron_bridge.families.registry import family_of
from megatron_bridge.stream_convert import convert_checkpoint, convert_to_megatron
from miles_like.hf_checkpoint import HFCheckpoint
from tests.megatron_bridge.tiny_models import CONFIGS, random_tensors, tiny, tiny_qwen, write_checkpoint
from tests.spawn import run_ranks

HF = tiny()
UNIT = 300_000  # bytes: about ten units


def _convert(hf_dir: Path, out: Path) -> stream_convert.ConvertReport:
    source = HFCheckpoint(hf_dir)
    return convert_to_megatron(source, out, family_of(HF), source.config, chunk_bytes=3000, unit_bytes=UNIT)


@pytest.fixture
def hf_dir(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "hf", HF, random_tensors(HF), shard_bytes=700_000)


def _files(path: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted(path.iterdir())}


def _tensors(path: Path) -> dict[str, Tensor]:
    """Checkpoint tensors put together chunk by chunk from the files, without megatron."""
    metadata = FileSystemReader(path).read_metadata()
    whole: dict[str, Tensor] = {}
    for index, where in metadata.storage_data.items():
        described = metadata.state_dict_metadata[index.fqn]
        if isinstance(described, BytesStorageMetadata):
            continue
        with (path / where.relative_path).open("rb") as f:
            f.seek(where.offset)
            chunk = torch.load(io.BytesIO(f.read(where.length)))
        target = whole.setdefault(index.fqn, torch.empty(described.size, dtype=described.properties.dtype))
        target[tuple(slice(o, o + n) for o, n in zip(index.offset, chunk.shape, strict=True))] = chunk
    return whole


def test_every_tensor_is_where_its_key_says(hf_dir: Path, tmp_path: Path) -> None:
    report = _convert(hf_dir, tmp_path / "out")
    source = HFCheckpoint(hf_dir)
    got = _tensors(tmp_path / "out")
    assert report.tensors == len(source.names())
    assert report.bytes == sum(f.stat().st_size for f in (tmp_path / "out").iterdir())
    assert report.units > 3
    assert report.units_kept == 0
    gate, up = (source.read(f"model.layers.1.mlp.experts.5.{h}_proj.weight") for h in ("gate", "up"))
    assert torch.equal(got["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"][5], torch.cat([gate, up]))
    down = source.read("model.layers.2.mlp.experts.15.down_proj.weight")
    assert torch.equal(got["decoder.layers.2.mlp.experts.experts.linear_fc2.weight"][15], down)
    bias = source.read("model.layers.2.mlp.gate.e_score_correction_bias")
    assert bias.dtype is torch.float32
    assert torch.equal(got["decoder.layers.2.mlp.router.expert_bias"], bias)
    assert not list(tmp_path.glob("*.partial"))
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_bf16_routing_bias_widens_exactly(tmp_path: Path) -> None:
    tensors = {
        name: value.to(torch.bfloat16) if name.endswith("bias") else value for name, value in random_tensors(HF).items()
    }
    convert_checkpoint(write_checkpoint(tmp_path / "hf", HF, tensors), tmp_path / "out")
    got = _tensors(tmp_path / "out")["decoder.layers.1.mlp.router.expert_bias"]
    assert got.dtype is torch.float32
    assert torch.equal(got, tensors["model.layers.1.mlp.gate.e_score_correction_bias"].float())


def test_draft_layers_are_converted_where_the_checkpoint_has_them(tmp_path: Path) -> None:
    """config.json announces two. What they repeat of the model is skipped, and said so; half of them is refused."""
    hf = tiny(num_nextn_predict_layers=2)
    whole = random_tensors(hf, mtp=True)
    report = convert_checkpoint(write_checkpoint(tmp_path / "whole", hf, whole), tmp_path / "out")
    copies = {f"model.layers.{i}.{name}.weight" for i in (3, 4) for name in ("embed_tokens", "shared_head.head")}
    assert set(report.skipped) == copies
    assert report.tensors == len(whole) - len(copies)
    got = _tensors(tmp_path / "out")
    assert torch.equal(got["mtp.layers.1.eh_proj.weight"], whole["model.layers.4.eh_proj.weight"])
    experts = got["mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc2.weight"]
    assert torch.equal(experts[15], whole["model.layers.3.mlp.experts.15.down_proj.weight"])

    without = convert_checkpoint(write_checkpoint(tmp_path / "none", hf, random_tensors(hf)), tmp_path / "none-out")
    assert without.tensors == len(random_tensors(hf))
    assert not any(key.startswith("mtp.") for key in _tensors(tmp_path / "none-out"))

    del whole["model.layers.4.hnorm.weight"]
    with pytest.raises(ValueError, match=r"model\.layers\.4\.hnorm"):
        convert_checkpoint(write_checkpoint(tmp_path / "half", hf, whole), tmp_path / "half-out")


def test_fused_heads_lie_by_key_value_head(tmp_path: Path) -> None:
    """Whatever size chunks have; 4 query heads, 2 key/value heads of 48 rows each."""
    hf = tiny_qwen()
    path = write_checkpoint(tmp_path / "hf", hf, random_tensors(hf))
    source, at = HFCheckpoint(path), "model.layers.2.self_attn."
    convert_to_megatron(source, tmp_path / "out", family_of(hf), hf, chunk_bytes=5000, unit_bytes=UNIT)
    q, k, v = (source.read(f"{at}{x}_proj.weight") for x in "qkv")
    wanted = torch.cat([q[:96], k[:48], v[:48], q[96:], k[48:], v[48:]])
    got = _tensors(tmp_path / "out")
    assert torch.equal(got["decoder.layers.2.self_attention.linear_qkv.weight"], wanted)
    assert "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight" in got


def _killed_after(rank: int, world_size: int, port: int, hf_dir: str, out: str, units: int) -> None:
    """SIGKILLs itself in the middle of writing unit number `units`."""
    write = stream_convert._write_unit

    def write_or_die(source: Any, directory: Path, number: int, chunks: Any, proof: str) -> None:
        if number == units:
            (directory / f"__{number}_0.distcp.tmp").write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        write(source, directory, number, chunks, proof)

    stream_convert._write_unit = write_or_die
    _convert(Path(hf_dir), Path(out))


def test_killed_conversion_resumes(hf_dir: Path, tmp_path: Path) -> None:
    """Damage of each sort besides: a cut data file, a torn index, a missing index are redone, the rest is kept."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with pytest.raises(AssertionError, match="died with code -9"):
        run_ranks(_killed_after, 1, str(hf_dir), str(out), 6)
    assert not out.exists()
    assert len(list(partial.glob("*.json"))) == 6
    data = partial / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    (partial / "__3_0.json").write_text('{"proof"')
    (partial / "__4_0.json").unlink()
    report = _convert(hf_dir, out)
    assert report.units_kept == 3
    _convert(hf_dir, tmp_path / "straight")
    assert _files(out).keys() == _files(tmp_path / "straight").keys()
    resumed, straight = _tensors(out), _tensors(tmp_path / "straight")
    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[k], straight[k]) for k in straight)


def test_units_of_another_source_are_not_kept(hf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(*args: Any) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(stream_convert, "_finish", disk_full)
        with pytest.raises(OSError, match="disk full"):
            _convert(hf_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    other = write_checkpoint(tmp_path / "other", HF, random_tensors(HF, seed=1), shard_bytes=700_000)
    assert _convert(other, tmp_path / "out").units_kept == 0
    got = _tensors(tmp_path / "out")["output_layer.weight"]
    assert torch.equal(got, HFCheckpoint(other).read("lm_head.weight"))


def _drop(t: dict[str, Tensor]) -> str:
    del t["model.layers.1.self_attn.o_proj.weight"]
    return "o_proj"


def _add(t: dict[str, Tensor]) -> str:
    t["model.layers.1.mlp.experts.16.up_proj.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)
    return r"experts\.16"


def _reshape(t: dict[str, Tensor]) -> str:
    t["model.embed_tokens.weight"] = t["model.embed_tokens.weight"][:-1].clone()
    return r"embed_tokens.*127.*128"


def _quantized(t: dict[str, Tensor]) -> str:
    name = "model.layers.0.mlp.up_proj.weight"
    t[name] = t[name].to(torch.float8_e4m3fn)
    return r"layers\.0\.mlp\.up_proj.*dequantize"


def _wider(t: dict[str, Tensor]) -> str:
    t["model.norm.weight"] = t["model.norm.weight"].float()
    return r"model\.norm.*float32.*bfloat16"


def _nan(t: dict[str, Tensor]) -> str:
    t["lm_head.weight"][100, 3] = float("nan")
    return r"lm_head.*not finite"


def _inf(t: dict[str, Tensor]) -> str:
    t["model.layers.2.mlp.experts.3.down_proj.weight"][0, 0] = float("inf")
    return r"experts\.3\.down_proj.*not finite"


@pytest.mark.parametrize("damage", [_drop, _add, _reshape, _quantized, _wider, _nan, _inf])
def test_bad_checkpoint_is_refused_and_leaves_nothing(
    damage: Callable[[dict[str, Tensor]], str], tmp_path: Path
) -> None:
    tensors = random_tensors(HF)
    named = damage(tensors)
    path = write_checkpoint(tmp_path / "hf", HF, tensors)
    with pytest.raises(ValueError, match=named):
        convert_checkpoint(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_full_disk_is_named_and_what_is_whole_is_kept(
    hf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With free space again, the conversion goes on where the disk ended."""
    write, calls = stream_convert._write_unit, iter(range(99))

    def full_at_the_third(*args: Any) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*args)

    monkeypatch.setattr(stream_convert, "_write_unit", full_at_the_third)
    with pytest.raises(OSError, match=r"disk full: .*/out was not written; free some space .* run again"):
        _convert(hf_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert _convert(hf_dir, tmp_path / "out").units_kept == 2


def test_existing_output_is_refused(hf_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="exists"):
        convert_checkpoint(hf_dir, tmp_path / "out")


def test_every_config_converts(tmp_path: Path) -> None:
    for name, hf in CONFIGS.items():
        path = write_checkpoint(tmp_path / name, hf, random_tensors(hf))
        assert convert_checkpoint(path, tmp_path / f"{name}-out").tensors == len(HFCheckpoint(path).names())
