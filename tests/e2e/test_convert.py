"""Conversion as a user runs it: the fused pipeline, there and back on the command line, damage found."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megatron_bridge.convert.to_megatron import to_megatron
from miles_like.cli import app
from miles_like.hf.checkpoint import HFCheckpoint
from tests.e2e.conftest import SMALL, Run
from tests.support.refusals import Facts, check_refusal
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

LAYOUT = ("--tp", "2", "--ep", "2", "--pp", "2")  # of three layers


def mistaken(*arguments: str) -> str:
    """What the command says on stderr, having ended with status 2; in this process, which has imported it all."""
    done = CliRunner().invoke(app, ["convert", *arguments])
    assert done.exit_code == 2, (done.exit_code, done.output, done.exception)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


def _outputs(run: Run, home: Path, stages: str, *how: str) -> dict[str, Path]:
    """Stage -> root of its output, which a run that finds all of them complete prints. Other files of this worker may
    have made theirs in the same cache."""
    for _ in range(2):
        done = run("--run-dir", str(home / "convert"), *SMALL, "--stages", stages, *how)
        assert done.returncode == 0, done.stderr[-3000:]
        found = dict(re.findall(r"^ *(\w+) +complete, skipped: (.+)$", done.stdout, re.M))
        if found.keys() == set(stages.split(",")):
            break
    return {stage: Path(root) for stage, root in found.items()}


def _tensors(converted: Path) -> Any:
    return json.loads((converted / "manifest.json").read_text())["tensors"]


@dataclass(frozen=True)
class Converted:
    """Roots of a cache: the FP8 checkpoint, the BF16 directory, its shards."""

    fetched: Path
    bf16: Path
    shards: Path


@pytest.fixture(scope="module")
def converted(run: Run, home: Path) -> Converted:
    plain = _outputs(run, home, "fetch,dequantize,convert")
    return Converted(plain["fetch"], plain["dequantize"], plain["convert"])


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small model, whose checkpoint is in `hf` beside them."""
    where, hf = tmp_path_factory.mktemp("small"), tiny()
    to_megatron(write_checkpoint(where / "hf", hf, random_tensors(hf)), where / "megatron")
    return where / "megatron"


@pytest.mark.long(beside="tests/megatron_bridge/convert/test_to_megatron.py")
def test_fused_shards_are_those_of_the_bf16_directory_and_there_is_none(
    run: Run, converted: Converted, home: Path
) -> None:
    before = set(home.glob("cache/dequantize-*"))
    fused = _outputs(run, home, "fetch,dequantize,convert", "--fuse")
    assert fused["fetch"] == converted.fetched and fused["convert"] != converted.shards
    assert _tensors(converted.shards) == _tensors(fused["convert"])
    added = set(home.glob("cache/dequantize-*")) - before
    assert not [path for one in added for path in one.glob("data/*.safetensors")]


@pytest.mark.long(beside="tests/megatron_bridge/convert/test_to_hf.py")
def test_there_and_back_on_the_command_line(miles_like: Run, converted: Converted, tmp_path: Path) -> None:
    """Bit for bit what was converted, companions too; and again as FP8, which is what was fetched."""
    source, shards = converted.bf16, converted.shards
    done = miles_like("convert", "to-hf", str(shards), str(tmp_path / "hf"), "--memory-limit", "2GiB")
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, ours = HFCheckpoint(source), HFCheckpoint(tmp_path / "hf")
    assert set(theirs.names()) == set(ours.names())
    assert all(torch.equal(theirs.read(name), ours.read(name)) for name in theirs.names())
    small = {p.name for p in source.iterdir() if p.suffix != ".safetensors"}
    assert {p.name for p in (tmp_path / "hf").iterdir()} >= small
    done = miles_like("convert", "to-megatron", str(tmp_path / "hf"), str(tmp_path / "again"), *LAYOUT)
    assert done.returncode == 0, done.stderr[-3000:]
    done = miles_like("convert", "to-hf", str(tmp_path / "again"), str(tmp_path / "fp8"), "--format", "fp8")
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, ours = HFCheckpoint(converted.fetched), HFCheckpoint(tmp_path / "fp8")
    assert set(theirs.names()) == set(ours.names())
    for name in theirs.names():
        a, b = theirs.read(name), ours.read(name)
        assert a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
    done = miles_like("convert", "check", str(tmp_path / "again"))
    assert done.returncode == 0 and "is complete" in done.stdout, done.stderr


def test_damage_is_named_and_nothing_is_written(shards: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    subprocess.run(["cp", "-r", str(shards), str(damaged)], check=True)
    victim = max(damaged.glob("*.distcp"), key=lambda p: p.stat().st_size)
    with victim.open("r+b") as f:
        f.seek(victim.stat().st_size // 2)
        byte = f.read(1)
        f.seek(-1, 1)
        f.write(bytes([byte[0] ^ 1]))
    for arguments in (["check", str(damaged)], ["to-hf", str(damaged), str(tmp_path / "out")]):
        check_refusal(mistaken(*arguments), victim.name)
    assert not (tmp_path / "out").exists()


def test_a_mistake_is_one_sentence(shards: Path, tmp_path: Path) -> None:
    source = shards.parent / "hf"
    mistakes: dict[Facts, list[str]] = {
        (16, 3): ["to-megatron", str(source), str(tmp_path / "o"), "--ep", "3"],
        (3, 4): ["to-megatron", str(source), str(tmp_path / "o"), "--pp", "4"],
        ("'lots'",): ["to-hf", str(shards), str(tmp_path / "o"), "--memory-limit", "lots"],
        ("int3", "bf16"): ["to-hf", str(shards), str(tmp_path / "o"), "--format", "int3"],
    }
    for facts, arguments in mistakes.items():
        check_refusal(mistaken(*arguments), *facts)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (None, ("config.json", "JSON")),
        ({"rope_scaling": "yarn"}, ("config.json", "deepseek")),
        ({"layer_types": 5}, ("config.json", "deepseek")),
        ({"rope_theta": "x"}, ("config.json", "rope_theta", "x")),
        ({"architectures": 5}, ("architectures", 5)),
        ({"quantization_config": 5}, ("quantization_config", 5)),
    ],
)
def test_a_config_that_cannot_be_read_is_one_sentence(
    change: dict[str, Any] | None, facts: Facts, tmp_path: Path
) -> None:
    """Whatever reads it first: the check of the layout, or the conversion."""
    hf = tiny()
    write_checkpoint(tmp_path / "hf", hf, random_tensors(hf))
    (tmp_path / "hf" / "config.json").write_text(json.dumps([] if change is None else hf | change))
    check_refusal(mistaken("to-megatron", str(tmp_path / "hf"), str(tmp_path / "o")), *facts)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
