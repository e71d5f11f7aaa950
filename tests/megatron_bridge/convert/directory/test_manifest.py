"""A manifest is what `check`, the trainer's load and the next conversion believe: what does not fit must not be read.

Not covered: that the pieces of a tensor cover it (the converters' laws).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import xxhash

from megatron_bridge.convert.directory.manifest import MANIFEST, Fact, FileFact, Manifest, Piece, checksum
from tests.support.refusals import refuses

SAMPLE = Manifest(
    kind="torch_dist",
    tensors={
        "b.weight": Fact(
            "bfloat16",
            (2, 3),
            (
                Piece("__0_0.distcp", 0, 1200, "ab" * 16, (0, 0), (1, 3)),
                Piece("__1_0.distcp", 7, 1200, "cd" * 16, (1, 0), (1, 3)),
            ),
        ),
        "a.bias": Fact("float32", (), (Piece("__1_0.distcp", 1207, 1100, "ef" * 16, (), ()),)),
    },
    files={"hf/config.json": FileFact(10, hashlib.sha256(b"x").hexdigest())},
    skipped=("model.layers.3.embed_tokens.weight",),
)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    """And the order in which tensors became known leaves no trace in the file."""
    assert not Manifest.there(tmp_path)
    SAMPLE.write(tmp_path)
    assert Manifest.there(tmp_path)
    assert Manifest.read(tmp_path) == SAMPLE
    (tmp_path / "again").mkdir()
    backwards = dict(reversed(SAMPLE.tensors.items()))
    Manifest("torch_dist", backwards, SAMPLE.files, SAMPLE.skipped).write(tmp_path / "again")
    assert (tmp_path / "again" / MANIFEST).read_bytes() == (tmp_path / MANIFEST).read_bytes()
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [MANIFEST]


def test_one_that_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    with refuses(ValueError, "manifest.json"):
        Manifest.read(tmp_path)
    SAMPLE.write(tmp_path)
    text = path.read_text()
    for damaged, facts in (
        (text[:-40], ("manifest.json",)),
        (text.replace("1200", "1201", 1), ("manifest.json",)),
        (text.replace('"format":1', '"format":2'), (2, 1)),
        ("[1]", ("manifest.json",)),
        (json.dumps({"format": 1, "a": 2}), ("manifest.json",)),
        (json.dumps({"format": 1, "sum": "0" * 64}), ("manifest.json",)),
    ):
        assert damaged != text
        path.write_text(damaged)
        with refuses(ValueError, *facts):
            Manifest.read(tmp_path)


def test_checksums_are_xxh3_of_any_buffer() -> None:
    data = bytes(range(256)) * 40
    assert checksum(data) == checksum(memoryview(data)) == xxhash.xxh3_128(data).hexdigest()
