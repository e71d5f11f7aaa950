"""Conversion is the longest stage for a large model: it must survive a kill without redoing what is whole, and it must
refuse a damaged checkpoint rather than hand Megatron something that loads (Megatron's loader checks neither dtypes nor
finiteness, nor that a vocabulary has the right size).

The values and layouts are tested by the law of the weight round trip; kills at any moment and the memory limit by
`tests/laws/test_convert_survives.py`. Not covered: the speed.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_bridge.convert import to_megatron as converter
from megatron_bridge.convert import units
from megatron_bridge.convert.directory.boxes import Grid
from megatron_bridge.convert.directory.manifest import Manifest, checksum
from megatron_bridge.convert.memory_limit import MIB, plan_memory
from megatron_bridge.convert.source import Source
from megatron_bridge.convert.to_megatron import Conversion, convert_source, to_megatron
from megatron_bridge.convert.units import ConvertReport, HashedFile
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.pipeline.dequantize import dequantize_checkpoint
from quant.hf_config import spec_to_hf
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from tests.support.refusals import refuses
from tests.support.spawn import run_ranks
from tests.support.tiny_models import CONFIGS, random_tensors, tiny, tiny_glm, tiny_qwen, write_checkpoint

HF = tiny()
UNIT = 300_000  # bytes: about ten units
LONG = pytest.mark.long(beside="tests/megatron_bridge/convert/test_to_megatron.py")


def _convert(hf_dir: Path, out: Path, **how: Any) -> ConvertReport:
    return convert_source(Source.open(hf_dir), out, **({"chunk_bytes": 3000, "unit_bytes": UNIT} | how))


@pytest.fixture
def hf_dir(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "hf", HF, random_tensors(HF), shard_bytes=700_000)


def _files(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


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
    assert report.bytes == sum(map(len, _files(tmp_path / "out").values()))
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


def _facts_hold(out: Path) -> None:
    """Everything in the directory is in its manifest, and the sums are those of the bytes; the oracles are hashlib, and
    torch's own metadata for where archives lie."""
    manifest, files = Manifest.read(out), _files(out)
    assert manifest.files.keys() == files.keys() - {"manifest.json"}
    for name, fact in manifest.files.items():
        assert (fact.size, fact.sha256) == (len(files[name]), hashlib.sha256(files[name]).hexdigest()), name
    metadata = FileSystemReader(out).read_metadata()
    where = {
        (i.fqn, tuple(i.offset)): (s.relative_path, s.offset, s.length)
        for i, s in metadata.storage_data.items()
        if i.offset is not None
    }
    listed = {(key, p.offset): (p.file, p.start, p.size) for key, fact in manifest.tensors.items() for p in fact.pieces}
    assert listed == where
    for key, fact in manifest.tensors.items():
        described = metadata.state_dict_metadata[key]
        assert (fact.dtype, fact.shape) == (str(described.properties.dtype)[6:], tuple(described.size))
        for p in fact.pieces:
            data = files[p.file][p.start : p.start + p.size]
            assert p.sum == checksum(data)
            assert torch.load(io.BytesIO(data)).shape == p.sizes


def test_the_manifest_knows_every_byte_and_the_companions_come_along(hf_dir: Path, tmp_path: Path) -> None:
    (hf_dir / "tokenizer.json").write_text("{}")
    (hf_dir / "chat_template.jinja").write_text("{{ x }}")
    (hf_dir / "manifest.json").write_text("of another conversion")
    crc = torch.serialization.get_crc32_options()
    _convert(hf_dir, tmp_path / "out")
    assert torch.serialization.get_crc32_options() is crc
    _facts_hold(tmp_path / "out")
    companions = {"config.json", "tokenizer.json", "chat_template.jinja"}
    assert {p.name for p in (tmp_path / "out" / "hf").iterdir()} == companions
    assert all((tmp_path / "out" / "hf" / n).read_bytes() == (hf_dir / n).read_bytes() for n in companions)


def _quantize(tensors: dict[str, Tensor], path: Path, hf: dict[str, Any]) -> Path:
    """FP8 with partial blocks at both edges; scales after all weights, so in other files."""
    spec = QuantSpec(format=QuantFormat.FP8, block=(40, 48))
    stored = sorted(quantize_stream(tensors.items(), spec), key=lambda item: item[0].endswith("_scale_inv"))
    return write_checkpoint(path, hf | {"quantization_config": spec_to_hf(spec)}, dict(stored), shard_bytes=200_000)


@pytest.mark.parametrize(
    "hf",
    [
        pytest.param(HF, id="tiny"),
        pytest.param(tiny_qwen(), id="qwen", marks=LONG),
        pytest.param(tiny(num_nextn_predict_layers=1), id="mtp", marks=LONG),
    ],
)
def test_fp8_in_one_pass_is_dequantized_then_converted(hf: dict[str, Any], tmp_path: Path) -> None:
    """Byte for byte of the tensors, though no BF16 directory is made; whatever the sizes of chunks."""
    fp8 = _quantize(random_tensors(hf, mtp="num_nextn_predict_layers" in hf), tmp_path / "fp8", hf)
    dequantize_checkpoint(fp8, tmp_path / "bf16")
    slow, fused = _convert(tmp_path / "bf16", tmp_path / "slow"), _convert(fp8, tmp_path / "fused")
    assert (fused.tensors, sorted(fused.skipped)) == (slow.tensors, sorted(slow.skipped))
    want, got = _tensors(tmp_path / "slow"), _tensors(tmp_path / "fused")
    assert want.keys() == got.keys()
    assert all(torch.equal(want[k].view(torch.uint8), got[k].view(torch.uint8)) for k in want)
    _facts_hold(tmp_path / "fused")
    assert "quantization_config" in json.loads((tmp_path / "fused" / "hf" / "config.json").read_text())


@pytest.mark.long(beside="tests/megatron_bridge/convert/test_units.py")
def test_one_process_or_two_write_the_same_bytes(hf_dir: Path, tmp_path: Path) -> None:
    """A third process is killed by the system on the way: one sentence, and the units that were whole are kept."""
    _convert(hf_dir, tmp_path / "one")
    with refuses(RuntimeError, "SIGKILL"):
        _convert(hf_dir, tmp_path / "two", workers=2, spread=_two_with_an_accident)
    assert not (tmp_path / "two").exists()
    assert _convert(hf_dir, tmp_path / "two", workers=2).units_kept > 0
    assert _files(tmp_path / "one") == _files(tmp_path / "two")


def _two_with_an_accident(work: Callable[[int], None], numbers: Sequence[int]) -> None:
    units._in_processes(functools.partial(_work_or_die, work, numbers[4]), numbers, 2)


def _work_or_die(work: Callable[[int], None], fatal: int, number: int) -> None:
    if number == fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    work(number)


def test_the_grid_is_the_layout_s(tmp_path: Path) -> None:
    """Its ranks' shares, worked out here by hand, are whole boxes; the tensors are the same as with any other grid."""
    hf = tiny_qwen()
    path = write_checkpoint(tmp_path / "hf", hf, random_tensors(hf))
    _convert(path, tmp_path / "plain")
    _convert(path, tmp_path / "grid", grid=Grid(tp=2, etp=4), chunk_bytes=MIB)
    want, got = _tensors(tmp_path / "plain"), _tensors(tmp_path / "grid")
    assert all(torch.equal(want[k], got[k]) for k in want)
    _facts_hold(tmp_path / "grid")
    facts, at = Manifest.read(tmp_path / "grid").tensors, "decoder.layers.1."
    boxes = {key: sorted((p.offset, p.sizes) for p in fact.pieces) for key, fact in facts.items()}
    # columns of the output projections, 4 heads of 48 over 2 ranks; experts' intermediate 64 over 4
    assert boxes[at + "self_attention.linear_proj.weight"] == [((0, 0), (128, 96)), ((0, 96), (128, 96))]
    fc2 = [((3, 0, 16 * i), (1, 128, 16)) for i in range(4)]
    assert [b for b in boxes[at + "mlp.experts.experts.linear_fc2.weight"] if b[0][0] == 3] == fc2
    fc1 = [((3, 16 * i, 0), (1, 16, 128)) for i in range(8)]  # 4 shares of gate, then of up
    assert [b for b in boxes[at + "mlp.experts.experts.linear_fc1.weight"] if b[0][0] == 3] == fc1
    assert boxes["output_layer.weight"] == [((0, 0), (64, 128)), ((64, 0), (64, 128))]
    assert boxes[at + "mlp.router.weight"] == [((0, 0), (16, 128))]  # every rank has it whole
    # 96 rows of query heads, 48 of key and value each: no box lies on both ranks
    assert boxes[at + "self_attention.linear_qkv.weight"] == [
        ((r, 0), (n, 128)) for r, n in ((0, 96), (96, 48), (144, 48), (192, 96), (288, 48), (336, 48))
    ]
    with refuses(ValueError, 64, "model.layers.0.mlp.experts.0.gate_proj.weight", 5):
        _convert(path, tmp_path / "five", grid=Grid(etp=5))
    with refuses(ValueError, 0, 1, 1):
        to_megatron(path, tmp_path / "none", tp=0)
    assert {p.name for p in tmp_path.iterdir()} == {"hf", "plain", "grid"}


def test_a_draft_layer_s_copy_that_differs_is_refused(tmp_path: Path) -> None:
    """Megatron shares embedding and head with the draft layers: a copy of other values would be lost silently."""
    hf = tiny(num_nextn_predict_layers=2)
    name = "model.layers.4.shared_head.head.weight"
    for case, change in (("value", _flip), ("zero", _minus_zero), ("shape", _shorter)):
        tensors = random_tensors(hf, mtp=True)
        tensors["lm_head.weight"][100] = tensors[name.replace("4", "3")][100] = 0
        tensors[name] = change(tensors["lm_head.weight"].clone())
        with refuses(ValueError, "model.layers.4.shared_head.head.weight", "lm_head.weight"):
            _convert(write_checkpoint(tmp_path / case, hf, tensors), tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"value", "zero", "shape"}


def _flip(t: Tensor) -> Tensor:
    t[127, 127] += 1
    return t


def _minus_zero(t: Tensor) -> Tensor:
    t[100, 3] = -0.0
    return t


def _shorter(t: Tensor) -> Tensor:
    return t[:-1].clone()


def test_bf16_routing_bias_widens_exactly(tmp_path: Path) -> None:
    tensors = {
        name: value.to(torch.bfloat16) if name.endswith("bias") else value for name, value in random_tensors(HF).items()
    }
    to_megatron(write_checkpoint(tmp_path / "hf", HF, tensors), tmp_path / "out")
    got = _tensors(tmp_path / "out")["decoder.layers.1.mlp.router.expert_bias"]
    assert got.dtype is torch.float32
    assert torch.equal(got, tensors["model.layers.1.mlp.gate.e_score_correction_bias"].float())


def test_draft_layers_are_converted_where_the_checkpoint_has_them(tmp_path: Path) -> None:
    """config.json announces two. Their copies of the model's tensors are skipped and reported; half is refused."""
    hf = tiny(num_nextn_predict_layers=2)
    whole = random_tensors(hf, mtp=True)
    report = to_megatron(write_checkpoint(tmp_path / "whole", hf, whole), tmp_path / "out")
    copies = {f"model.layers.{i}.{name}.weight" for i in (3, 4) for name in ("embed_tokens", "shared_head.head")}
    assert set(report.skipped) == copies
    assert report.tensors == len(whole) - len(copies)
    got = _tensors(tmp_path / "out")
    assert torch.equal(got["mtp.layers.1.eh_proj.weight"], whole["model.layers.4.eh_proj.weight"])
    experts = got["mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc2.weight"]
    assert torch.equal(experts[15], whole["model.layers.3.mlp.experts.15.down_proj.weight"])

    without = to_megatron(write_checkpoint(tmp_path / "none", hf, random_tensors(hf)), tmp_path / "none-out")
    assert without.tensors == len(random_tensors(hf))
    assert not any(key.startswith("mtp.") for key in _tensors(tmp_path / "none-out"))

    del whole["model.layers.4.hnorm.weight"]
    with refuses(ValueError, "model.layers.4.hnorm.weight"):
        to_megatron(write_checkpoint(tmp_path / "half", hf, whole), tmp_path / "half-out")


def test_fused_heads_lie_by_key_value_head(tmp_path: Path) -> None:
    """Whatever size chunks have; 4 query heads, 2 key/value heads of 48 rows each."""
    hf = tiny_qwen()
    path = write_checkpoint(tmp_path / "hf", hf, random_tensors(hf))
    source, at = HFCheckpoint(path), "model.layers.2.self_attn."
    _convert(path, tmp_path / "out", chunk_bytes=5000)
    q, k, v = (source.read(f"{at}{x}_proj.weight") for x in "qkv")
    wanted = torch.cat([q[:96], k[:48], v[:48], q[96:], k[48:], v[48:]])
    got = _tensors(tmp_path / "out")
    assert torch.equal(got["decoder.layers.2.self_attention.linear_qkv.weight"], wanted)
    assert "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight" in got


def _killed_after(rank: int, world_size: int, port: int, hf_dir: str, out: str, units: int) -> None:
    """SIGKILLs itself in the middle of writing unit number `units`."""
    write = Conversion.write

    def write_or_die(self: Conversion, number: int, file: HashedFile) -> Any:
        if number == units:
            file.write(b"half of it" * MIB)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, number, file)

    Conversion.write = write_or_die  # type: ignore[method-assign]
    _convert(Path(hf_dir), Path(out))


def test_killed_conversion_resumes(hf_dir: Path, tmp_path: Path) -> None:
    """Damage of each sort besides: a cut data file, a torn index, a missing index are redone, the rest is kept."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with refuses(AssertionError, -9, 0):
        run_ranks(_killed_after, 1, str(hf_dir), str(out), 6)
    assert not out.exists()
    assert len(list(partial.glob("*.json"))) == 6
    data = partial / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    (partial / "__3_0.distcp.json").write_text('{"proof"')
    (partial / "__4_0.distcp.json").unlink()
    report = _convert(hf_dir, out)
    assert report.units_kept == 3
    _convert(hf_dir, tmp_path / "straight")
    assert _files(out) == _files(tmp_path / "straight")


def test_units_of_another_source_are_not_kept(hf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(*args: Any) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(converter, "_finish", disk_full)
        with refuses(OSError, 28, tmp_path / "out"):
            _convert(hf_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    other = write_checkpoint(tmp_path / "other", HF, random_tensors(HF, seed=1), shard_bytes=700_000)
    assert _convert(other, tmp_path / "out").units_kept == 0
    got = _tensors(tmp_path / "out")["output_layer.weight"]
    assert torch.equal(got, HFCheckpoint(other).read("lm_head.weight"))


def test_memory_is_planned_for_the_pieces_that_there_will_be(
    hf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout's grid makes several pieces of a tensor, and each is known to every process."""
    planned: list[int] = []

    def plan(*args: Any, **how: Any) -> Any:
        planned.append(how["names"])
        return plan_memory(*args, **how)

    monkeypatch.setattr(converter, "plan_memory", plan)
    for etp in (1, 8):
        to_megatron(hf_dir, tmp_path / f"{etp}", etp=etp)
        facts = Manifest.read(tmp_path / f"{etp}").tensors.values()
        assert planned[-1] >= sum(len(fact.pieces) for fact in facts)
    assert planned[-1] > 2 * planned[0]


def test_a_head_stored_beside_a_tied_embedding_is_that_embedding(tmp_path: Path) -> None:
    hf = tiny_qwen(tie_word_embeddings=True)
    tensors = random_tensors(hf)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write_checkpoint(tmp_path / "same", hf, tensors)
    assert "lm_head.weight" in to_megatron(tmp_path / "same", tmp_path / "out").skipped
    tensors["lm_head.weight"][3, 4] += 1
    write_checkpoint(tmp_path / "other", hf, tensors)
    with refuses(ValueError, "lm_head.weight", "model.embed_tokens.weight"):
        to_megatron(tmp_path / "other", tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_a_draft_layer_s_head_beside_a_tied_embedding_is_that_embedding_too(tmp_path: Path) -> None:
    hf = tiny_glm(tie_word_embeddings=True, num_nextn_predict_layers=1)
    tensors, name = random_tensors(hf, mtp=True), "model.layers.3.shared_head.head.weight"
    tensors[name] = tensors["model.embed_tokens.weight"].clone()
    write_checkpoint(tmp_path / "same", hf, tensors)
    assert name in to_megatron(tmp_path / "same", tmp_path / "out").skipped
    tensors[name][3, 4] += 1
    write_checkpoint(tmp_path / "other", hf, tensors)
    with refuses(ValueError, "model.layers.3.shared_head.head.weight", "model.embed_tokens.weight"):
        to_megatron(tmp_path / "other", tmp_path / "bad")
    tensors["model.layers.0.shared_head.head.weight"] = tensors.pop(name)
    write_checkpoint(tmp_path / "elsewhere", hf, tensors)
    with refuses(ValueError, "model.layers.0.shared_head.head.weight"):
        to_megatron(tmp_path / "elsewhere", tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_a_limit_that_is_too_small_is_refused_with_the_least_that_works(hf_dir: Path, tmp_path: Path) -> None:
    with refuses(ValueError, "limit of 256 MiB is too small", unrecorded="its numbers are this process's memory"):
        to_megatron(hf_dir, tmp_path / "out", memory_limit=256 * MIB)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_full_disk_is_named_and_what_is_whole_is_kept(
    hf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With free space again, the conversion goes on where the disk ended."""
    write, calls = Conversion.write, iter(range(99))

    def full_at_the_third(*args: Any) -> Any:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args)

    monkeypatch.setattr(Conversion, "write", full_at_the_third)
    with refuses(OSError, 28, tmp_path / "out"):
        _convert(hf_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert _convert(hf_dir, tmp_path / "out").units_kept == 2


@pytest.mark.long(beside="tests/megatron_bridge/convert/test_to_hf.py")
def test_every_config_converts(tmp_path: Path) -> None:
    for name, hf in CONFIGS.items():
        path = write_checkpoint(tmp_path / name, hf, random_tensors(hf))
        assert to_megatron(path, tmp_path / f"{name}-out").tensors == len(HFCheckpoint(path).names())
