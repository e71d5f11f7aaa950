"""Reading a box must give the elements that are there, whatever the chunks are, and must not run what a file says.

Oracle: tensors that torch.distributed.checkpoint itself saved. What trainers save in several layouts is the round
trip's law.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megatron_bridge.convert.directory.manifest import Manifest
from megatron_bridge.convert.directory.torch_dist import TorchDist, spans
from tests.support.converted import write_manifest
from tests.support.refusals import Facts, refuses

ZIPFILE = "the reason is the words of zipfile, which differ between versions of Python"


def _saved(path: Path) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    tensors = {
        "matrix": torch.randn(37, 19, generator=g).to(torch.bfloat16),
        "stack": torch.randn(5, 7, 11, generator=g),
        "row": torch.randn(13, generator=g),
        "empty": torch.randn(0, 4, generator=g),
    }
    dcp.save(dict(tensors), checkpoint_id=path, no_dist=True)
    (path / "metadata.json").write_text("{}")
    return tensors


@pytest.mark.parametrize("kept", [None, 1 << 20, 100], ids=["without manifest", "chunks kept", "chunks too large"])
def test_any_box_is_the_tensors(kept: int | None, tmp_path: Path) -> None:
    tensors = _saved(tmp_path)
    if kept is not None:
        write_manifest(tmp_path)
    source, g = TorchDist(tmp_path, keep_bytes=kept or 0), torch.Generator().manual_seed(1)
    assert sorted(source.names()) == sorted(tensors)
    for key, value in tensors.items():
        assert torch.equal(source.read(key, [0] * value.ndim, value.shape), value)
        for _ in range(20 if value.numel() else 0):
            low = [int(torch.randint(0, n, (1,), generator=g)) for n in value.shape]
            high = [int(torch.randint(a + 1, n + 1, (1,), generator=g)) for a, n in zip(low, value.shape, strict=True)]
            box = value[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
            assert torch.equal(source.read(key, low, box.shape), box)


def test_only_the_bytes_of_a_box_are_read(tmp_path: Path) -> None:
    """Ten rows of a megabyte, and the archive's framing."""
    dcp.save({"w": torch.zeros(1024, 256)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text("{}")
    source = TorchDist(tmp_path)
    source.read("w", [500, 0], [10, 256])
    assert 10 * 1024 <= source.bytes_read < 10 * 1024 + 4096
    before = source.bytes_read
    source.read("w", [500, 7], [10, 2])  # two columns
    assert source.bytes_read - before < 10 * 8 + 4096


def test_no_flipped_byte_of_a_chunk_goes_unseen(tmp_path: Path) -> None:
    """Wherever it is: in the elements, or in the framing that says where they are."""
    tensors = _saved(tmp_path)
    write_manifest(tmp_path)
    (piece,) = Manifest.read(tmp_path).tensors["row"].pieces
    path, value = tmp_path / piece.file, tensors["row"]
    whole = path.read_bytes()
    for at in range(piece.start, piece.start + piece.size, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        for box in (value.shape, (5,)):
            with refuses(ValueError, "__0_0.distcp", "row at [0]", "copy or convert", unrecorded=ZIPFILE):
                TorchDist(tmp_path).read("row", [0], box)


def test_runs_of_a_box() -> None:
    assert list(spans((4, 5), (1, 0), (2, 5))) == [(5, 10)]
    assert list(spans((4, 5), (1, 2), (2, 3))) == [(7, 3), (12, 3)]
    assert list(spans((2, 3, 4), (1, 0, 0), (1, 3, 4))) == [(12, 12)]
    assert list(spans((), (), ())) == [(0, 1)]


def _edit(path: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _shorter_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata["matrix"].chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([36, 19]))]


def _outside(metadata: Any) -> None:
    metadata.state_dict_metadata["matrix"].size = torch.Size([19, 37])


def _twice(metadata: Any) -> None:
    """Two chunks over the same rows: as many elements as the tensor, and a gap."""
    halves = [ChunkStorageMetadata(torch.Size([o, 0, 0]), torch.Size([3, 7, 11])) for o in (0, 1)]
    metadata.state_dict_metadata["stack"].chunks = halves
    metadata.state_dict_metadata["stack"].size = torch.Size([6, 7, 11])
    stored = metadata.storage_data.pop(MetadataIndex("stack", [0, 0, 0]))
    for o in (0, 1):
        metadata.storage_data[MetadataIndex("stack", [o, 0, 0])] = stored


def _transformed(metadata: Any) -> None:
    index = MetadataIndex("row", [0])
    metadata.storage_data[index] = replace(metadata.storage_data[index], transform_descriptors=["zstd"])


def _elsewhere(metadata: Any) -> None:
    index = MetadataIndex("row", [0])
    metadata.storage_data[index] = replace(metadata.storage_data[index], relative_path="../secret")


def _nowhere(metadata: Any) -> None:
    del metadata.storage_data[MetadataIndex("row", [0])]


def _other_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["row"].properties.dtype = torch.bfloat16


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (_shorter_chunk, ("[37, 19]", 684, 703)),
        (_outside, ("[19, 37]",)),
        (_twice, ("[6, 7, 11]", 462, 462)),
        (_transformed, ("row", "relative_path", "transform_descriptors", "torch_dist")),
        (_elsewhere, ("relative_path", "transform_descriptors", "torch_dist")),
        (_nowhere, ("[0]",)),
        (_other_dtype, ("[0]", "torch.save")),
    ],
)
def test_metadata_that_cannot_be_is_refused(change: Callable[[Any], None], facts: Facts, tmp_path: Path) -> None:
    tensors = _saved(tmp_path)
    _edit(tmp_path, change)
    with refuses(ValueError, *facts):
        source = TorchDist(tmp_path)
        for key, value in tensors.items():
            source.read(key, [0] * value.ndim, value.shape)


class _Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_a_pickle_is_not_obeyed(tmp_path: Path) -> None:
    """Beside what is needed it is an object that does nothing; in its place, an error."""
    _saved(tmp_path / "saved")
    _edit(tmp_path / "saved", lambda metadata: setattr(metadata, "all_local_plans", _Hostile(tmp_path / "done")))
    assert len(TorchDist(tmp_path / "saved").names()) == 4
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(_Hostile(tmp_path / "done")))
    for raw in (pickle.dumps(_Hostile(tmp_path / "done")), b"no pickle", b""):
        (tmp_path / "saved" / ".metadata").write_bytes(raw)
        with refuses(ValueError, tmp_path / "saved" / ".metadata"):
            TorchDist(tmp_path / "saved")
    assert not (tmp_path / "done").exists()
