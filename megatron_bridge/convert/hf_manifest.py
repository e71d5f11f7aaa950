"""The manifest of a Hugging Face directory that is written as a stream of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge.convert.directory.manifest import MANIFEST, Fact, FileFact, Manifest, Piece, checksum
from miles_like.hf.checkpoint import HFCheckpoint


class Sums:
    """Checksums of a stream's tensors, of the bytes in memory: what the disk changes is found by a check."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def of(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `stream`, in order."""
        for name, tensor in stream:
            self._of[name] = checksum(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            yield name, tensor

    def write(self, directory: Path) -> None:
        """Write the manifest of the directory that the stream was written to, in which all other files are final."""
        checkpoint, tensors = HFCheckpoint(directory), {}
        for name in checkpoint.names():
            info = checkpoint.info(name)
            zeros = (0,) * len(info.shape)
            piece = Piece(info.file.name, info.offset, info.nbytes, self._of[name], zeros, tuple(info.shape))
            tensors[name] = Fact(str(info.dtype).removeprefix("torch."), tuple(info.shape), (piece,))
        files = {
            path.relative_to(directory).as_posix(): FileFact(path.stat().st_size, _sha256(path))
            for path in sorted(directory.rglob("*"))
            if path.is_file() and path.name != MANIFEST
        }
        Manifest("hf", tensors, files).write(directory)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
