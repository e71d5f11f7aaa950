"""Converted directories for tests, whole and damaged."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.convert.directory.manifest import MANIFEST, Fact, FileFact, Manifest, Piece, checksum
from megatron_bridge.convert.directory.torch_dist import TorchDist
from megatron_bridge.convert.to_megatron import to_megatron
from tests.support.tiny_models import write_checkpoint


def converted(where: Path, hf: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """`where`/hf, with a tokenizer's file, and `where`/megatron with its manifest; the latter."""
    write_checkpoint(where / "hf", hf, tensors)
    (where / "hf" / "tokenizer.json").write_text('{"version": "1.0"}')
    (where / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    (where / "hf" / "additional_chat_templates").mkdir()
    (where / "hf" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    to_megatron(where / "hf", where / "megatron")
    return where / "megatron"


def write_manifest(path: Path) -> None:
    """Of a torch_dist directory as it is now."""
    source = TorchDist(path)
    facts = {}
    for key in source.names():
        stored = source.stored(key)
        pieces = []
        for c in stored.chunks:
            raw = (path / c.file).read_bytes()[c.start : c.start + c.size]
            pieces.append(Piece(c.file, c.start, c.size, checksum(raw), c.offset, c.sizes))
        facts[key] = Fact(str(stored.dtype).removeprefix("torch."), stored.shape, tuple(pieces))
    files = {
        str(f.relative_to(path)): FileFact(f.stat().st_size, hashlib.sha256(f.read_bytes()).hexdigest())
        for f in sorted(path.rglob("*"))
        if f.is_file() and f.name != MANIFEST
    }
    Manifest("torch_dist", facts, files).write(path)


def edit_manifest(path: Path, **changes: Any) -> None:
    dataclasses.replace(Manifest.read(path), **changes).write(path)


def flip(path: Path, piece: Piece) -> None:
    """One bit in the middle of a piece's bytes."""
    with path.open("r+b") as f:
        f.seek(piece.start + piece.size // 2)
        byte = f.read(1)
        f.seek(-1, 1)
        f.write(bytes([byte[0] ^ 1]))


def cut(path: Path, size: int = 1) -> None:
    """The last bytes are gone."""
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size - size)


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Names that only one has, or whose tensors differ in dtype, shape or a bit."""

    def same(x: Tensor, y: Tensor) -> bool:
        alike = x.dtype is y.dtype and x.shape == y.shape
        return alike and torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8))

    return sorted(name for name in a.keys() | b.keys() if name not in a or name not in b or not same(a[name], b[name]))
