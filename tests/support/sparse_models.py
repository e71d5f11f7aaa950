"""Checkpoints of published models on disk with true names, shapes, dtypes and file sizes, and no data: the files are
holes, except for their headers and for tensors that a test fills. A file system without holes would need terabytes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.families.base import TensorMap
from megatron_bridge.families.registry import family_of
from miles_like.hf.checkpoint import DTYPE_NAMES, TensorInfo
from quant.hf_config import spec_from_hf
from quant.registry import codec_or_none
from quant.stream import stored_name

CONFIGS = Path(__file__).parents[2] / "configs"
FILE_BYTES = 5 << 30
Stored = tuple[str, torch.dtype, tuple[int, ...]]


def published_config(name: str) -> dict[str, Any]:
    hf: dict[str, Any] = json.loads((CONFIGS / name / "config.json").read_text())
    return hf


def stored_tensors(hf: dict[str, Any]) -> Iterator[Stored]:
    """Every stored tensor of the checkpoint, layer by layer, with draft layers, their copies and scales."""
    tensors, spec = family_of(hf).bind(hf, mtp=True), spec_from_hf(hf)
    codec = codec_or_none(spec)
    for _, name, shape, dtype in sorted(_named(tensors), key=lambda x: x[:1]):
        if codec is not None and spec is not None and spec.covers(name, shape):
            for leaf, (stored_dtype, stored_shape) in codec.layout(shape, name).items():
                yield stored_name(name, leaf), stored_dtype, tuple(stored_shape)
        else:
            yield name, dtype, shape


def _named(tensors: TensorMap) -> Iterator[tuple[int, str, tuple[int, ...], torch.dtype]]:
    """(layer; before and after all for those outside, name, shape, dtype)."""
    last = tensors.dims["layers"] + len(tensors.draft_layers)
    for place in tensors.places():
        outside = -1 if place.entry.megatron.startswith("embedding.") else last
        at = outside if place.layer is None else place.layer
        yield at, place.hf_name, place.shape, tensors.dtype(place.entry)
        for copy in tensors.copies_of(place.entry) if place.index == 0 else ():
            yield last - 1, copy, place.shape, tensors.dtype(place.entry)


def write_sparse(directory: Path, hf: dict[str, Any]) -> Path:
    """The directory, with config.json, a tokenizer's file, an index and files of about `FILE_BYTES`."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(hf))
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    files: list[dict[str, Any]] = [{}]
    size = total = 0
    for name, dtype, shape in stored_tensors(hf):
        nbytes = math.prod(shape) * dtype.itemsize
        if size + nbytes > FILE_BYTES and files[-1]:
            files.append({})
            size = 0
        files[-1][name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [size, size + nbytes]}
        size, total = size + nbytes, total + nbytes
    weight_map = {}
    for i, header in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):06d}.safetensors"
        raw = json.dumps(header, separators=(",", ":")).encode()
        with (directory / file).open("wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            out.truncate(8 + len(raw) + max(entry["data_offsets"][1] for entry in header.values()))
        weight_map.update(dict.fromkeys(header, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def fill(info: TensorInfo, seed: int) -> None:
    """Write random finite values into a tensor's hole, block by block."""
    g = torch.Generator().manual_seed(seed)
    block = 16 << 20
    with info.file.open("r+b") as out:
        out.seek(info.offset)
        for at in range(0, info.nbytes, block):
            n = min(block, info.nbytes - at) // info.dtype.itemsize
            out.write(_random(info.dtype, n, g).view(torch.uint8).numpy().data)


def _random(dtype: torch.dtype, n: int, g: torch.Generator) -> Tensor:
    if dtype is torch.float8_e4m3fn:
        codes = torch.randint(0, 254, (n,), generator=g, dtype=torch.uint8)  # 127 and 255 are NaN
        return (codes + (codes >= 127).to(torch.uint8)).view(dtype)
    if dtype is torch.float32:
        return torch.rand(n, generator=g) * 1e-3 + 1e-5
    return (torch.randn(n, generator=g) * 0.02).to(dtype)
