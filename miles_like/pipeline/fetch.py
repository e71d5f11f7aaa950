"""The fetch stage: make a checkpoint, check a local directory, or download one from the hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_like.config.run import ModelConfig
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.pipeline.first_layers import INDEX, needed_files, restrict_index, write_first_layers
from miles_like.storage.completion import cleared, file_sha256, files_under, write_atomically


def visible_files(root: Path) -> list[Path]:
    """A checkpoint's files without .git, .cache and the like, which are not to be hashed or copied to nodes."""
    return [p for p in files_under(root) if not any(part.startswith(".") for part in p.relative_to(root).parts)]


def source_inputs(model: ModelConfig) -> dict[str, Any]:
    """The inputs that determine a fetched checkpoint."""
    if model.make is not None:
        make = model.make.model_dump(mode="json")
        for name in ("config", "validation"):
            make[name] = content(Path(make[name]))
        read = [content(Path(name)) for name in model.make.corpora]
        make["corpus"] = read if len(read) > 1 else read[0]
        make["tokenizer"] = content(Path(make["tokenizer"]) / "tokenizer.json")
        return {"make": make}
    short = {} if model.first_layers is None else {"first_layers": model.first_layers}
    if Path(model.path).is_dir():
        files = {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(Path(model.path).glob("*"))}
        return {"directory": str(Path(model.path).resolve()), "files": files} | short
    return {"hub": model.path, "revision": model.revision} | short


def content(path: Path) -> str:
    """SHA-256 of a file named in the configuration. Raises ValueError when it cannot be read."""
    try:
        return file_sha256(path)
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}: create this file, or correct its path in the configuration") from None


def is_taken_as_it_is(model: ModelConfig) -> bool:
    """Whether the stage writes nothing."""
    return model.make is None and model.first_layers is None and Path(model.path).is_dir()


def describe(model: ModelConfig) -> str:
    """One line for the console."""
    if model.make is not None:
        made = f"random weights of {Path(model.make.config).name}, supervised warm-up"
        return f"Building {model.path}: {made}, {model.make.format.value.upper()}"
    first = None if model.first_layers is None else f"the first {model.first_layers} layers of "
    if Path(model.path).is_dir():
        return f"Checking the local checkpoint {model.path}" if first is None else f"Copying {first}{model.path}"
    return f"Downloading {first or ''}{model.path} at revision {model.revision or 'main'} from the hub (resumable)"


def fetch(model: ModelConfig, out: Path, make: Callable[[Path], None]) -> Path:
    """Make the checkpoint with `make`, take `model.path` itself, or download into `out`; return its directory.

    Raises ValueError when it is incomplete or cannot be downloaded.
    """
    if model.make is not None:
        data = cleared(out)
        make(data)
        return data
    if Path(model.path).is_dir():
        if model.first_layers is not None:
            return _short(Path(model.path), cleared(out), model.first_layers)
        HFCheckpoint(Path(model.path))  # raises for a missing or damaged file
        out.mkdir(parents=True, exist_ok=True)
        return Path(model.path)
    if model.first_layers is None:
        return _download(model, out / "data")
    whole = _download(model, out / "whole")
    data = _short(whole, out / "data", model.first_layers)
    shutil.rmtree(whole)
    return data


def _short(source: Path, out: Path, layers: int) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    write_first_layers(source, out, layers)
    return out


def _download(model: ModelConfig, target: Path) -> Path:
    """An interrupted download is kept, and continued at the commit it began with."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]  # re-exported

    pinned = target.parent / "revision"
    try:
        # requested on every start: without a hub, snapshot_download takes any files in `target` for the commit's
        revision = pinned.read_text() if pinned.exists() else model.revision
        commit = str(HfApi().model_info(model.path, revision=revision).sha)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(pinned, commit)
        _snapshot(model, commit, target)
    except HFValidationError:
        raise ValueError(
            f"model.path = {model.path!r} is neither a directory nor a hub name (owner/name): correct it"
        ) from None
    except (HTTPError, OSError) as e:
        lines = [line for line in str(e).splitlines() if line.strip()] or [type(e).__name__]
        raise ValueError(
            f"could not download {model.path} at {model.revision or 'main'}: {' '.join(lines[:2]).rstrip(' .:')}: "
            "check the name, the network and the disk, then run again; downloaded files are kept"
        ) from None
    try:
        HFCheckpoint(target)
    except ValueError as e:
        raise ValueError(
            f"{e}; the hub's files of {model.path} at commit {commit} have this error: set model.revision to "
            f"another revision, or remove {target.parent} to download {model.revision or 'main'} again"
        ) from None
    shutil.rmtree(target / ".cache" / "huggingface", ignore_errors=True)  # metadata and partial files of the client
    return target


def _snapshot(model: ModelConfig, commit: str, target: Path) -> None:
    """Download the files of a commit; with `first_layers`, of the weights only those that hold a kept tensor."""
    from huggingface_hub import snapshot_download

    if model.first_layers is None:
        snapshot_download(model.path, revision=commit, local_dir=target)
        return
    snapshot_download(model.path, revision=commit, local_dir=target, ignore_patterns=["*.safetensors"])
    weight_map = _weight_map(target / INDEX)
    if weight_map is None:
        snapshot_download(model.path, revision=commit, local_dir=target)
        return
    files = needed_files(weight_map, model.first_layers)
    snapshot_download(model.path, revision=commit, local_dir=target, allow_patterns=files)
    restrict_index(target, files)


def _weight_map(index: Path) -> dict[str, str] | None:
    """Tensor name -> file. None without an index, and for a damaged one: HFCheckpoint names the fault."""
    try:
        found = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    except (FileNotFoundError, ValueError, AttributeError):
        return None
    return found if isinstance(found, dict) else None
