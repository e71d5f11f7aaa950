"""What leaves the trainer's format must be the model that went in: every tensor of every family, bit for bit, with its
config and tokenizer, or in FP8 exactly as the quantizer encodes whole tensors; what has the directory's name is whole.

Oracles: the Hugging Face tensors that were converted; `quant.stream` on whole tensors. The layouts of trainers that
save in between are the round trip's law. Not covered: checkpoints larger than memory.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import multiprocessing
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_bridge.convert import units
from megatron_bridge.convert.directory.manifest import MANIFEST, Manifest
from megatron_bridge.convert.directory.torch_dist import TorchDist
from megatron_bridge.convert.memory_limit import Memory
from megatron_bridge.convert.to_hf import to_hf
from megatron_bridge.convert.to_megatron import to_megatron
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.pipeline.dequantize import dequantize_checkpoint
from quant.hf_config import spec_to_hf
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from tests.support.chosen import later
from tests.support.converted import converted, cut, differing, edit_manifest, flip, write_manifest
from tests.support.refusals import Facts, refuses
from tests.support.tiny_models import CONFIGS, random_tensors, tiny, tiny_qwen, write_checkpoint

HERE = "tests/megatron_bridge/convert/test_to_hf.py"
MIB, V3 = 1 << 20, "deepseek_v3"
HF = tiny(num_hidden_layers=2, num_nextn_predict_layers=1)
# widths that no block divides
ODD = tiny_qwen(hidden_size=192, moe_intermediate_size=200, intermediate_size=264, num_hidden_layers=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model with a draft layer, not to be changed."""
    return converted(tmp_path_factory.mktemp("source"), HF, random_tensors(HF, mtp=True))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The same, to be changed."""
    return converted(tmp_path, HF, random_tensors(HF, mtp=True))


def _read(path: Path) -> dict[str, torch.Tensor]:
    return dict(HFCheckpoint(path).stream())


def _files(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


FAMILIES = ("tiny", "glm", "qwen_one_kv_head_tied", "qwen_dense_biases", "qwen_every_second_layer")


@pytest.mark.parametrize(
    "name", later([*CONFIGS, "draft layers in fp32"], [*FAMILIES, "draft layers in fp32"], beside=HERE)
)
def test_every_family_comes_back_bit_by_bit(name: str, tmp_path: Path) -> None:
    drafts = name not in CONFIGS
    hf = tiny(num_nextn_predict_layers=2, torch_dtype="float32") if drafts else CONFIGS[name]
    tensors = random_tensors(hf, mtp=drafts)
    report = to_hf(converted(tmp_path, hf, tensors), tmp_path / "out")
    assert report.tensors == len(tensors)
    assert differing(_read(tmp_path / "out"), tensors) == []
    for file in ("config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()


@pytest.mark.parametrize("hf", [HF, ODD], ids=["with draft layers", "odd sizes"])
def test_fp8_is_what_the_quantizer_makes_of_whole_tensors(hf: dict[str, Any], tmp_path: Path) -> None:
    """Through several files."""
    tensors = random_tensors(hf, mtp=hf is HF)
    path = converted(tmp_path, hf, tensors)
    to_hf(path, tmp_path / "out", format="fp8", shard_bytes=200_000)
    spec = QuantSpec(format=QuantFormat.FP8)
    assert differing(_read(tmp_path / "out"), dict(quantize_stream(tensors.items(), spec))) == []
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config") == spec_to_hf(spec)
    assert config == hf


def test_blocks_of_the_source_are_kept(tmp_path: Path) -> None:
    """A model that came in FP8 goes out in its own blocks, its own modules left alone; bf16 says nothing of it."""
    spec = QuantSpec(format=QuantFormat.FP8, block=(64, 32), ignore=("layers.0.self_attn",))
    tensors = random_tensors(HF)
    path = converted(tmp_path, HF, tensors)
    (path / "hf" / "config.json").write_text(json.dumps({**HF, "quantization_config": spec_to_hf(spec)}))
    write_manifest(path)
    to_hf(path, tmp_path / "fp8", format="fp8")
    to_hf(path, tmp_path / "bf16")
    assert differing(_read(tmp_path / "fp8"), dict(quantize_stream(tensors.items(), spec))) == []
    assert json.loads((tmp_path / "bf16" / "config.json").read_text()) == HF
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"] == spec_to_hf(spec)


def test_draft_layers_that_were_not_trained_are_not_announced(tmp_path: Path) -> None:
    """Neither by config.json nor by silence; of a converted directory config.json comes back as it was."""
    path = converted(tmp_path, HF, random_tensors(HF))
    assert to_hf(path, tmp_path / "back").skipped == ()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == HF
    (path / MANIFEST).unlink()  # as training saves
    companions = (path / "hf").rename(tmp_path / "companions")
    report = to_hf(path, tmp_path / "out", hf_config=companions)
    assert "model.layers.2.eh_proj.weight" in report.skipped
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**HF, "num_nextn_predict_layers": 0}


LOADED = ("tiny", "biases_tied", "kimi", "qwen", "qwen_dense_tied", "glm", "glm_tied")
FIRST = (("bf16", "tiny"), ("bf16", "qwen_dense_tied"), ("fp8", "glm"))


@pytest.mark.parametrize(
    "case",
    later(itertools.product(("bf16", "fp8"), LOADED), FIRST, beside=HERE),
    ids="-".join,
)
def test_transformers_loads_the_same_model(case: tuple[str, str], tmp_path: Path) -> None:
    """From several files as from one; of FP8, what the codes stand for."""
    stored, name = case
    hf = {**CONFIGS[name], "model_type": CONFIGS[name]["model_type"].replace("kimi_k2", V3)}
    tensors = random_tensors(hf)
    path = converted(tmp_path, hf, tensors)
    if stored == "fp8":
        spec = QuantSpec(format=QuantFormat.FP8)
        coded = dict(quantize_stream(tensors.items(), spec))
        write_checkpoint(tmp_path / "coded", hf | {"quantization_config": spec_to_hf(spec)}, coded)
        to_megatron(tmp_path / "coded", tmp_path / "decoded")
        dequantize_checkpoint(tmp_path / "coded", tmp_path / "plain")
        (tmp_path / "hf").rename(tmp_path / "not meant")
        (tmp_path / "plain").rename(tmp_path / "hf")
        path = tmp_path / "decoded"
    assert to_hf(path, tmp_path / "out", shard_bytes=300_000).units > 1
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / where, dtype=torch.float32).eval() for where in ("hf", "out")
    )
    assert differing(before.state_dict(), after.state_dict()) == []
    tokens = torch.arange(2, 34)[None]
    with torch.no_grad():
        assert torch.equal(before(tokens).logits, after(tokens).logits)


def test_a_trainers_value_that_is_not_finite_is_named(own: Path, tmp_path: Path) -> None:
    """A converted directory has none; what a trainer saves has no manifest, and may."""
    (own / MANIFEST).unlink()
    companions = (own / "hf").rename(tmp_path / "companions")
    where = TorchDist(own).stored("output_layer.weight").chunks[0]
    held = (own / where.file).read_bytes()[where.start : where.start + where.size]
    value = torch.load(io.BytesIO(held))
    value[5, 7] = float("nan")
    new = io.BytesIO()
    torch.save(value, new)
    assert len(new.getvalue()) == where.size
    with (own / where.file).open("r+b") as f:
        f.seek(where.start)
        f.write(new.getvalue())
    for format in ("bf16", "fp8"):
        with refuses(ValueError, "output_layer.weight", "lm_head.weight"):
            to_hf(own, tmp_path / "out", format=format, hf_config=companions)
    assert not (tmp_path / "out").exists()


def test_the_manifest_lists_every_tensor_and_file(source: Path, tmp_path: Path) -> None:
    to_hf(source, tmp_path / "out", format="fp8", shard_bytes=200_000)
    manifest, checkpoint = Manifest.read(tmp_path / "out"), HFCheckpoint(tmp_path / "out")
    assert manifest.kind == "hf"
    assert manifest.tensors.keys() == set(checkpoint.names())
    for name, fact in manifest.tensors.items():
        info, (piece,) = checkpoint.info(name), fact.pieces
        assert (piece.file, piece.start, piece.size, piece.sizes) == (
            info.file.name,
            info.offset,
            info.nbytes,
            info.shape,
        )
    assert manifest.files.keys() == set(_files(tmp_path / "out")) - {MANIFEST}


def test_bands_and_who_does_the_work_change_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bands of a few rows, files done elsewhere and backwards: the same bytes as one process and large bands."""

    def elsewhere(work: Callable[[int], None], numbers: Sequence[int]) -> None:
        for number in reversed(numbers):
            pickle.loads(pickle.dumps(work))(number)

    to_hf(source, tmp_path / "plain", format="fp8", shard_bytes=400_000)
    monkeypatch.setattr("megatron_bridge.convert.to_hf.plan_memory", lambda *a, **k: Memory(1, 5000))
    to_hf(source, tmp_path / "other", format="fp8", shard_bytes=400_000, spread=elsewhere)
    assert _files(tmp_path / "plain") == _files(tmp_path / "other")


@pytest.mark.long(beside="tests/megatron_bridge/convert/test_units.py")
def test_killed_at_any_moment_it_resumes_to_the_same_manifest(source: Path, tmp_path: Path) -> None:
    """SIGKILL at 20 random moments, each try over what the one before it left. Nothing has the name until it is whole;
    in the end every file is that of a run without a kill."""
    moments, straight = random.Random(4), tmp_path / "straight"
    began = time.monotonic()
    to_hf(source, straight, format="fp8", shard_bytes=60_000)
    whole_s = time.monotonic() - began
    outs, kills = [tmp_path / "out0"], 0
    for _ in range(200):
        process = multiprocessing.get_context("fork").Process(
            target=to_hf, args=(source, outs[-1]), kwargs={"format": "fp8", "shard_bytes": 60_000}
        )
        process.start()
        process.join(moments.uniform(0, whole_s / 2))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode != 0
        if kills == 20:
            break
        if outs[-1].exists():
            outs.append(tmp_path / f"out{len(outs)}")
    assert kills == 20
    for out in outs:
        if not out.exists():
            to_hf(source, out, format="fp8", shard_bytes=60_000)
        # a kill between the last rename and the removal of the indexes leaves those
        found = {name: data for name, data in _files(out).items() if not name.endswith(".safetensors.json")}
        assert found == _files(straight)


def test_a_full_disk_is_named_and_what_is_whole_is_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = units.HashedFile.write, [60]

    def full_later(self: Any, data: Any) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    with monkeypatch.context() as patched:
        patched.setattr(units.HashedFile, "write", full_later)
        with refuses(OSError, 28, tmp_path / "out"):
            to_hf(source, tmp_path / "out", shard_bytes=60_000)
    assert not (tmp_path / "out").exists()
    assert to_hf(source, tmp_path / "out", shard_bytes=60_000).units_kept > 0
    to_hf(source, tmp_path / "straight", shard_bytes=60_000)
    assert _files(tmp_path / "out") == _files(tmp_path / "straight")


def _flipped(path: Path) -> Facts:
    piece = Manifest.read(path).tensors["decoder.layers.1.mlp.experts.experts.linear_fc2.weight"].pieces[3]
    flip(path / piece.file, piece)
    return piece.file, "decoder.layers.1.mlp.experts.experts.linear_fc2.weight", "[3, 0, 0]"


def _truncated(path: Path) -> Facts:
    cut(path / "__0_0.distcp", 5000)
    return ("__0_0.distcp",)


def _missing(path: Path) -> Facts:
    (path / "__0_0.distcp").unlink()
    return "__0_0.distcp", ".metadata"


def _other_metadata(path: Path) -> Facts:
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes() + b" ")
    return (path / ".metadata",)


def _lacks_a_tensor(path: Path) -> Facts:
    tensors = dict(Manifest.read(path).tensors)
    del tensors["output_layer.weight"]
    edit_manifest(path, tensors=tensors)
    return "output_layer.weight", ".metadata"


def _other_place(path: Path) -> Facts:
    tensors = dict(Manifest.read(path).tensors)
    fact = tensors["output_layer.weight"]
    tensors["output_layer.weight"] = replace(fact, pieces=(replace(fact.pieces[0], start=0),))
    edit_manifest(path, tensors=tensors)
    return "output_layer.weight", ".metadata"


def _edited(path: Path) -> Facts:
    (path / MANIFEST).write_text((path / MANIFEST).read_text().replace("bfloat16", "float16"))
    return (path / MANIFEST,)


def _other_tokenizer(path: Path) -> Facts:
    (path / "hf" / "tokenizer.json").write_text("{}")
    return (path / "hf" / "tokenizer.json",)


def _no_tokenizer(path: Path) -> Facts:
    (path / "hf" / "tokenizer.json").unlink()
    return (path / "hf" / "tokenizer.json",)


def _other_rope(path: Path) -> Facts:
    (path / "hf" / "config.json").write_text(json.dumps(HF | {"rope_theta": 7.0}))
    return (path / "hf" / "config.json",)


def _no_manifest(path: Path) -> Facts:
    (path / MANIFEST).unlink()
    return (path / MANIFEST,)


def _no_checkpoint(path: Path) -> Facts:
    (path / "metadata.json").unlink()
    return path, "torch_dist", "metadata.json"


def _no_config(path: Path) -> Facts:
    (path / "hf").rename(path / "away")
    return path, "hf/", "--hf-config"


def _empty_config_dir(path: Path) -> Facts:
    (path / "hf" / "config.json").unlink()
    return (path / "hf" / "config.json",)


def _more_layers(path: Path) -> Facts:
    (path / "hf" / "config.json").write_text(json.dumps({**HF, "num_hidden_layers": 3, "num_nextn_predict_layers": 0}))
    write_manifest(path)
    return "decoder.layers.2.input_layernorm.weight", "hf_config"


def _fewer_layers(path: Path) -> Facts:
    (path / "hf" / "config.json").write_text(json.dumps({**HF, "num_nextn_predict_layers": 0}))
    write_manifest(path)
    return 19, "config.json", "mtp.layers.0.eh_proj.weight"


def _wider(path: Path) -> Facts:
    (path / "hf" / "config.json").write_text(json.dumps({**HF, "moe_intermediate_size": 96}))
    write_manifest(path)
    return "[16, 128, 128]", "config.json", "[16, 192, 128]"


def _other_family(path: Path) -> Facts:
    (path / "hf" / "config.json").write_text(json.dumps(tiny_qwen()))
    write_manifest(path)
    return path, "hf_config"


@pytest.mark.parametrize(
    "damage",
    [
        _flipped,
        _truncated,
        _missing,
        _other_metadata,
        _lacks_a_tensor,
        _other_place,
        _edited,
        _other_tokenizer,
        _no_tokenizer,
        _other_rope,
        _no_manifest,
        _no_checkpoint,
        _no_config,
        _empty_config_dir,
        _more_layers,
        _fewer_layers,
        _wider,
        _other_family,
    ],
)
def test_a_bad_source_is_one_sentence_and_leaves_nothing(
    damage: Callable[[Path], Facts], own: Path, tmp_path: Path
) -> None:
    with refuses(ValueError, *damage(own)) as refused:
        to_hf(own, tmp_path / "out", shard_bytes=200_000)
    assert "\n" not in str(refused.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "megatron"]


def test_bad_arguments_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for more, facts in (
        ({}, (tmp_path / "out",)),
        ({"format": "int3"}, ("int3", "bf16", "fp8")),
        ({"lora_alpha": 4.0}, ("LoRA", "lora_alpha")),
        ({"lora_alpha": float("nan")}, ("lora_alpha", "lora.alpha")),
        ({"hf_config": tmp_path}, ("config.json",)),
        ({"memory_limit": 10 * MIB}, ("limit of 10 MiB is too small",)),
    ):
        drawn = "it names the memory that this process has" if "memory_limit" in more else ""
        with refuses(ValueError, *facts, unrecorded=drawn):
            to_hf(source, tmp_path / "out", **more)
    with refuses(ValueError, "torch_dist"):
        to_hf(source / "hf", tmp_path / "none")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
