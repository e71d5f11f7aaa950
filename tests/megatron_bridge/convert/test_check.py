"""A copy of a checkpoint that lost a bit loads and trains: only its checksums tell.

Not covered: the time that a large one takes.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_bridge.convert.check import check
from megatron_bridge.convert.directory.manifest import MANIFEST, Manifest
from megatron_bridge.convert.to_hf import to_hf
from tests.support.converted import converted, cut, edit_manifest, flip
from tests.support.refusals import Facts, refuses
from tests.support.tiny_models import random_tensors, tiny

HF = tiny(num_hidden_layers=2)
KEYS = {
    "torch_dist": "decoder.layers.1.mlp.experts.experts.linear_fc2.weight",
    "hf": "model.layers.1.mlp.experts.7.down_proj.weight",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("made")
    path = converted(where, HF, random_tensors(HF))
    to_hf(path, where / "out", format="fp8", shard_bytes=300_000)
    return {"torch_dist": path, "hf": where / "out"}


@pytest.fixture(params=["torch_dist", "hf"])
def own(request: pytest.FixtureRequest, made: dict[str, Path], tmp_path: Path) -> Path:
    """A directory of either kind, to be damaged."""
    return Path(shutil.copytree(made[request.param], tmp_path / request.param))


def test_a_whole_directory_passes(made: dict[str, Path]) -> None:
    for kind, path in made.items():
        report = check(path, workers=3)
        manifest = Manifest.read(path)
        assert report.kind == kind
        assert report.tensors == len(manifest.tensors)
        assert report.bytes == sum(f.stat().st_size for f in path.rglob("*") if f.is_file() and f.name != MANIFEST)
        (path / ".complete.json").write_text("{}")  # of the pipeline: no part of the conversion
        assert check(path) == report


def _flipped(path: Path) -> Facts:
    key = KEYS[path.name]
    piece = Manifest.read(path).tensors[key].pieces[0]
    flip(path / piece.file, piece)
    return piece.file, key, 1, 1


def _two(path: Path) -> Facts:
    for key in (KEYS[path.name], next(iter(Manifest.read(path).tensors))):
        piece = Manifest.read(path).tensors[key].pieces[0]
        flip(path / piece.file, piece)
    return (2,)


def _cut(path: Path) -> Facts:
    file = Manifest.read(path).tensors[KEYS[path.name]].pieces[0].file
    cut(path / file)
    return (path / file,)


def _missing(path: Path) -> Facts:
    file = Manifest.read(path).tensors[KEYS[path.name]].pieces[0].file
    (path / file).unlink()
    return (path / file,)


def _beside(path: Path) -> Facts:
    """A byte of a safetensors header, or of an archive of no tensor; the first file that has one."""
    name = next(f for f in sorted(Manifest.read(path).files) if f.endswith((".safetensors", ".json")))
    with (path / name).open("r+b") as f:
        f.seek(9)
        f.write(b"X")
    return name, 0, 1


def _companion(path: Path) -> Facts:
    file = next(f for f in sorted(Manifest.read(path).files) if f.endswith("tokenizer.json"))
    (path / file).unlink()
    return file, 0, 1


def _headers(path: Path) -> Facts:
    """A manifest of another directory, whose files are all there."""
    tensors = dict(Manifest.read(path).tensors)
    tensors["other"] = dataclasses.replace(tensors.pop(KEYS[path.name]))
    edit_manifest(path, tensors=tensors)
    return path, KEYS[path.name]


def _torn(path: Path) -> Facts:
    cut(path / MANIFEST, 100)
    return (path / MANIFEST,)


@pytest.mark.parametrize("damage", [_flipped, _two, _cut, _missing, _beside, _companion, _headers, _torn])
def test_the_first_difference_is_named(damage: Callable[[Path], Facts], own: Path) -> None:
    facts = damage(own)
    for workers in (1, 3):
        with refuses(ValueError, *facts) as refused:
            check(own, workers=workers)
        assert "\n" not in str(refused.value)


def test_a_directory_without_manifest_says_what_it_is(made: dict[str, Path], tmp_path: Path) -> None:
    saved = shutil.copytree(made["torch_dist"], tmp_path / "saved")
    (saved / MANIFEST).unlink()
    for path, facts in (
        (saved, (saved, "manifest.json", "to-hf")),
        (tmp_path, (tmp_path, "manifest.json")),
        (tmp_path / "none", (tmp_path / "none",)),
    ):
        with refuses(ValueError, *facts):
            check(path)
