"""Several model directories that hold disjoint tensors, joined into one by renaming their files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from miles_like.hf.checkpoint import INDEX, HFCheckpoint, sync_path


def join_parts(parts: Sequence[Path], path: Path) -> int:
    """Make `path` of `parts`, which are removed; return the bytes of tensor data.

    The files beside the weights are those of the first part. Everything must be on one file system: no data is copied.
    Raises ValueError for a tensor that two parts hold, and where `path` exists; nothing has been changed then.
    """
    if path.exists():
        raise ValueError(f"{path} exists: remove it or choose another output directory")
    opened = [HFCheckpoint(part) for part in parts]
    files: list[tuple[Path, list[str]]] = []
    held: dict[str, Path] = {}
    for checkpoint in opened:
        by_file: dict[Path, list[str]] = {}
        for name in checkpoint.names():
            if name in held:
                raise ValueError(f"{name} is in two directories, {held[name]} and {checkpoint.path}: remove one")
            held[name] = checkpoint.path
            by_file.setdefault(checkpoint.info(name).file, []).append(name)
        files += by_file.items()
    first, total = parts[0], sum(checkpoint.nbytes for checkpoint in opened)
    if len(parts) > 1:
        _gather(first, files, total)
    first.rename(path)
    sync_path(path.parent)
    for part in parts[1:]:
        shutil.rmtree(part)
    return total


def _gather(first: Path, files: Sequence[tuple[Path, list[str]]], total: int) -> None:
    """Move files of weights, each with the names of its tensors, to `first` and write its index."""
    (first / INDEX).unlink(missing_ok=True)
    for file in first.glob("*.safetensors"):
        file.rename(file.with_suffix(".joined"))
    weight_map = {}
    for i, (file, names) in enumerate(files):
        new = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (file.with_suffix(".joined") if file.parent == first else file).rename(first / new)
        weight_map.update(dict.fromkeys(names, new))
    for file in first.glob("*.joined"):  # without tensors
        file.unlink()
    (first / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    sync_path(first / INDEX)
    sync_path(first)
