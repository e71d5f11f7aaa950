"""A directory quantized in every format and convention: what is stored, what is decoded from it, what is refused, what
is held in memory, and what the report says.

The codecs have their own laws. Not covered: how other people's loaders read the directories.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.cli import app
from miles_like.hf.checkpoint import HFCheckpoint, write_hf
from miles_like.pipeline.dequantize import dequantize_checkpoint, dequantized_bytes, is_unquantized
from miles_like.pipeline.quant_report import QuantReport
from miles_like.pipeline.quantize import quantize_checkpoint, quantized_bytes, spec_of
from miles_like.run.assemble import checkpoint_bytes
from quant.hf_config import spec_from_hf
from quant.registry import CODECS, make_codec
from quant.spec import CONVENTIONS, QuantFormat, QuantSpec
from quant.stream import stored_name
from tests.support.cli_runner import CliRunner
from tests.support.converted import differing
from tests.support.refusals import Facts, check_refusal, refuses
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

ALL = [(f, c) for f in CODECS for c in CONVENTIONS[f]]
each_format = pytest.mark.parametrize(("fmt", "convention"), ALL, ids=[f"{f}-{c}" for f, c in ALL])
CONFIG = {"model_type": "any", "hidden_size": 96}
AT = "model.layers"
Q, GATE, UP = f"{AT}.0.self_attn.q_proj.weight", "gate_proj.weight", "up_proj.weight"


def model() -> dict[str, Tensor]:
    """Gates first and ups last, so that they lie in different files."""
    g = torch.Generator().manual_seed(0)
    names = [f"{AT}.1.mlp.experts.{e}." for e in range(3)]
    shapes: dict[str, tuple[int, ...]] = {name + GATE: (64, 96) for name in names}
    shapes |= {Q: (160, 96), f"{AT}.0.mlp.down_proj.weight": (96, 192), "model.norm.weight": (96,)}
    shapes |= {name + "down_proj.weight": (96, 64) for name in names}
    shapes |= {f"{AT}.1.mlp.shared_experts.{p}_proj.weight": (64, 96) for p in ("gate", "up")}
    shapes |= {f"{AT}.1.mlp.gate.weight": (3, 96), "lm_head.weight": (40, 96)}
    shapes |= {name + UP: (64, 96) for name in names}
    made = {name: (0.05 * torch.randn(shape, generator=g)).to(torch.bfloat16) for name, shape in shapes.items()}
    made[f"{AT}.1.mlp.experts.1.{UP}"][:8] = 0
    made[f"{AT}.1.mlp.experts.2.{UP}"] *= 30  # what it shares with its gate is its own
    return made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "bf16"
    config = CONFIG | {"quantization_config": None}  # as some tools write of what is not quantized
    write_hf(path, model().items(), config, shard_bytes=60_000)
    (path / "tokenizer.json").write_text("{}")
    return path


@each_format
def test_what_is_stored_and_what_comes_back(fmt: QuantFormat, convention: str, plain: Path, tmp_path: Path) -> None:
    """Against the codec on whole weights, over several files both ways; names, sizes and config.json besides."""
    spec = QuantSpec(format=fmt, convention=convention, ignore=("self_attn",))
    report = QuantReport(spec) if convention == "modelopt" else None  # it changes nothing
    written = quantize_checkpoint(plain, tmp_path / "out", spec, shard_bytes=20_000, report=report)
    out, tensors, codec = HFCheckpoint(tmp_path / "out"), model(), make_codec(spec)
    assert len({out.info(n).file for n in out.names()}) > 3
    assert written == out.nbytes == quantized_bytes(HFCheckpoint(plain), spec)
    covered = {n: t for n, t in tensors.items() if spec.covers(n, t.shape)}
    assert Q not in covered and len(covered) == 12
    want, decoded = dict(tensors), dict(tensors)
    for name, q in codec.encode(covered).items():
        del want[name]
        want |= {stored_name(name, leaf): part for leaf, part in q.stored.items()}
        decoded[name] = codec.decode(q)
    assert differing(dict(out.stream()), want) == []
    read = spec_from_hf(out.config)
    assert read is not None and (read.format, read.block, read.convention) == (fmt, spec.block, convention)
    assert {n for n, t in tensors.items() if read.covers(n, t.shape)} == covered.keys()
    assert {k: v for k, v in out.config.items() if k != "quantization_config"} == CONFIG
    assert (tmp_path / "out" / "hf_quant_config.json").exists() == (convention == "modelopt")
    assert not is_unquantized(out) and is_unquantized(HFCheckpoint(plain))

    back = dequantize_checkpoint(tmp_path / "out", tmp_path / "back", shard_bytes=30_000)
    assert back == dequantized_bytes(out) == HFCheckpoint(plain).nbytes
    assert differing(dict(HFCheckpoint(tmp_path / "back").stream()), decoded) == []
    beside = {p.name for p in (tmp_path / "back").iterdir() if "safetensors" not in p.name}
    assert beside == {"config.json", "tokenizer.json"}  # nothing that tells of the codes
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CONFIG


def test_what_the_commands_write_is_checked(plain: Path, tmp_path: Path) -> None:
    """Every tensor and file of both, the report's included; a changed byte of a tensor or another file is found."""
    run = CliRunner()
    coded, back = tmp_path / "coded", tmp_path / "back"
    assert run.invoke(app, ["quantize", str(plain), str(coded), "--report"]).exit_code == 0
    assert run.invoke(app, ["dequantize", str(coded), str(back)]).exit_code == 0
    for directory in (coded, back):
        checkpoint = HFCheckpoint(directory)
        files = [path for path in directory.rglob("*") if path.is_file() and path.name != "manifest.json"]
        done = run.invoke(app, ["convert", "check", str(directory)])
        assert done.exit_code == 0, done.output
        assert f"{len(checkpoint.names())} tensors, {len(files)} files" in done.stdout
        info = checkpoint.info(name := checkpoint.names()[3])
        with info.file.open("r+b") as file:
            file.seek(info.offset)
            file.write(b"\xa5\x5a")
        refused = run.invoke(app, ["convert", "check", str(directory)])
        assert refused.exit_code == 2
        check_refusal(refused.stderr, info.file, name)
    quantize_checkpoint(plain, again := tmp_path / "again", spec_of("fp8"))
    (again / "tokenizer.json").write_text("[]")
    check_refusal(run.invoke(app, ["convert", "check", str(again)]).stderr, again / "tokenizer.json")


def test_modelopt_says_it_twice(plain: Path, tmp_path: Path) -> None:
    spec = QuantSpec.of(QuantFormat.NVFP4, convention="modelopt")
    quantize_checkpoint(plain, tmp_path / "out", spec)
    stored_config = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    config = HFCheckpoint(tmp_path / "out").config["quantization_config"]
    assert stored_config["exclude_modules"] == config["ignore"]
    assert {k: stored_config[k] for k in stored_config if k != "exclude_modules"} == {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
    }


# refusals


def _nan(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(t: dict[str, Tensor]) -> None:
        t[name][0] = float("nan")

    return change


def _cut(t: dict[str, Tensor]) -> None:
    t[f"{AT}.1.mlp.experts.1.{UP}"] = torch.ones(64, 72, dtype=torch.bfloat16)


def _lonely(t: dict[str, Tensor]) -> None:
    del t[f"{AT}.1.mlp.experts.1.{UP}"]


def _as_it_is(_: dict[str, Tensor]) -> None:
    pass


def _codes(t: dict[str, Tensor]) -> None:
    t[Q] = t[Q].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "words", "facts"),
    [
        (_nan(f"{AT}.1.mlp.experts.1.{UP}"), "int4", (f"{AT}.1.mlp.experts.1.{UP}", "NaN")),
        (_nan("model.norm.weight"), "int4", ("model.norm.weight", "NaN")),
        (_cut, "mxfp4", (f"{AT}.1.mlp.experts.1.{UP}", 72, 32)),
        (_cut, "nvfp4", (72, 16)),
        (_lonely, "nvfp4", (f"{AT}.1.mlp.experts.1.{GATE}", f"{AT}.1.mlp.experts.1.{UP}")),
        (_as_it_is, "nvfp4 all", (Q, "nvfp4", "gate_proj", "up_proj", "self_attn")),
        (
            _codes,
            "fp8",
            (Q, "float8_e4m3fn", "quantization_config"),
        ),
    ],
)
def test_a_source_that_cannot_be_quantized_leaves_nothing(
    change: Callable[[dict[str, Tensor]], None], words: str, facts: Facts, tmp_path: Path
) -> None:
    tensors = model()
    change(tensors)
    fmt, scope = (*words.split(), None)[:2]
    write_hf(tmp_path / "in", tensors.items(), CONFIG)
    with refuses(ValueError, *facts):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out", spec_of(fmt, scope=scope))
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_quantized_source_and_ignoring_everything_are_refused(plain: Path, tmp_path: Path) -> None:
    spec = spec_of("int4")
    quantize_checkpoint(plain, tmp_path / "int4", spec)
    with refuses(ValueError, "int4", "BF16"):
        quantize_checkpoint(tmp_path / "int4", tmp_path / "out", spec_of("fp8"))
    with refuses(ValueError, "int4", "mlp.shared_experts", "--ignore"):
        quantize_checkpoint(plain, tmp_path / "out", spec_of("int4", ignore=["experts"]))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ({"format": "bf16"}, ("--format", "bf16", "fp8", "fp8-ue8m0", "int4", "mxfp8", "mxfp4", "nvfp4")),
        ({"format": "int3"}, ("--format", "int3")),
        ({"format": "fp8", "scope": "some"}, ("--scope", "some")),
        ({"format": "fp8", "block": "128x"}, ("--block", "128x")),
        ({"format": "fp8", "block": "0x0"}, ("--block", "0x0")),  # no sizes, not the default ones
        ({"format": "fp8", "ignore": ["re:["]}, ("re:[",)),
        ({"format": "int4", "block": "128"}, ("--group",)),
        ({"format": "fp8", "group": 128}, ("--group", 128, "fp8")),
        ({"format": "int4", "group": 20}, (8, "INT4", "(1, 20)")),
        ({"format": "mxfp8", "group": 64}, (32, "mxfp8", "(1, 64)")),
        ({"format": "nvfp4", "convention": "sglang"}, ("nvfp4", "sglang")),
    ],
)
def test_words_that_do_not_fit_are_named(words: dict[str, Any], facts: Facts) -> None:
    with refuses(ValueError, *facts):
        spec_of(**words)


def test_the_words_of_the_command_line() -> None:
    assert spec_of("fp8") == QuantSpec(format=QuantFormat.FP8)
    assert spec_of("fp8-ue8m0", block="64x32").block == (64, 32)
    assert spec_of("fp8", block="64").block == (64, 64)
    spec = spec_of("int4", group=64, ignore=["layers.0"])
    assert (spec.block, spec.ignore) == ((1, 64), (*QuantSpec.of(QuantFormat.INT4).ignore, "layers.0"))
    assert spec_of("int4", scope="all").ignore == ()


# memory


def test_few_tensors_are_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 weights of 1 MB, each gate far from its up: what was read is alive at no time beyond a batch and a bundle; so
    it is back again, scales far from their codes."""
    size, alive, most = 1 << 20, 0, 0
    read = HFCheckpoint.read

    def gone(nbytes: int) -> None:
        nonlocal alive
        alive -= nbytes

    def counted(self: HFCheckpoint, name: str) -> Tensor:
        nonlocal alive, most
        tensor = read(self, name)
        alive += tensor.nbytes
        most = max(most, alive)
        weakref.finalize(tensor, gone, tensor.nbytes)
        return tensor

    weight = torch.randn(512, 1024).to(torch.bfloat16)
    experts = [f"{AT}.0.mlp.experts.{e}." for e in range(20)]
    write_hf(tmp_path / "in", ((e + p, weight) for p in (GATE, UP) for e in experts), CONFIG)
    monkeypatch.setattr(HFCheckpoint, "read", counted)
    monkeypatch.setattr("miles_like.hf.checkpoint.sync_path", lambda _: None)
    spec = QuantSpec.of(QuantFormat.NVFP4)
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", spec, report=QuantReport(spec))
    assert (16 << 20) <= most <= (16 << 20) + 3 * size
    assert alive == 0
    out = HFCheckpoint(tmp_path / "out")
    apart = sorted(out.names(), key=lambda n: n.endswith("weight_packed"))
    write_hf(tmp_path / "apart", ((n, out.read(n)) for n in apart), out.config)
    most = 0
    dequantize_checkpoint(tmp_path / "apart", tmp_path / "back")
    scales = sum(out.info(n).nbytes for n in apart if not n.endswith("weight_packed"))
    assert most <= scales + 2 * size


# the command


@pytest.mark.parametrize(
    ("words", "fmt", "block"),
    [
        (["--format", "fp8", "--block", "64x32"], "fp8", (64, 32)),
        (["--format", "int4", "--group", "64", "--scope", "all", "--ignore", "self_attn"], "int4", (1, 64)),
        (["--format", "nvfp4", "--convention", "modelopt", "--report"], "nvfp4", (1, 16)),
    ],
)
def test_the_command_does_what_its_words_say(
    words: list[str], fmt: str, block: tuple[int, int], tmp_path: Path
) -> None:
    """And what a plan says of such a model's size is what it is."""
    hf = tiny(num_hidden_layers=2, n_routed_experts=4)
    write_checkpoint(tmp_path / "hf", hf, random_tensors(hf))
    done = CliRunner().invoke(app, ["quantize", str(tmp_path / "hf"), str(tmp_path / "out"), *words])
    assert done.exit_code == 0, done.output
    out, spec = HFCheckpoint(tmp_path / "out"), spec_from_hf(HFCheckpoint(tmp_path / "out").config)
    assert spec is not None and (spec.format, spec.block) == (fmt, block)
    attention = "model.layers.0.self_attn.o_proj."
    assert (f"{attention}weight" in out and out.info(f"{attention}weight").dtype is torch.bfloat16) == (fmt != "fp8")
    assert f"{out.nbytes:,} bytes -> " in done.output.replace("\n", "")
    assert ("SNR dB" in done.output) == ("--report" in words) == (tmp_path / "out" / "quant_report.json").exists()
    plain = HFCheckpoint(tmp_path / "hf").nbytes
    assert checkpoint_bytes(out.config, spec) == (out.nbytes, plain)
    assert checkpoint_bytes(hf, spec) == (out.nbytes, plain)


def test_a_wrong_word_is_one_sentence(plain: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["quantize", str(plain), str(tmp_path / "out"), "--format", "int3"])
    assert done.exit_code == 2
    check_refusal(done.stderr, "--format", "int3", "fp8")
    assert not list(tmp_path.iterdir())
