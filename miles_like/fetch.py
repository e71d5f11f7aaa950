"""The first stage: a checkpoint made, found in a directory, or downloaded from the hub."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_like.completion import cleared, file_sha256, files_under, write_atomically
from miles_like.config import ModelConfig
from miles_like.hf_checkpoint import HFCheckpoint


def not_hidden(root: Path) -> list[Path]:
    """A checkpoint's files without .git, .cache and the like: they would be hashed, and copied to every node."""
    return [p for p in files_under(root) if not any(part.startswith(".") for part in p.relative_to(root).parts)]


def source_inputs(model: ModelConfig) -> dict[str, Any]:
    """What a fetched checkpoint is a function of."""
    if model.make is not None:
        make = model.make.model_dump(mode="json")
        for name in ("config", "validation"):
            make[name] = content(Path(make[name]))
        read = [content(Path(name)) for name in model.make.corpora]
        make["corpus"] = read if len(read) > 1 else read[0]
        make["tokenizer"] = content(Path(make["tokenizer"]) / "tokenizer.json")
        return {"make": make}
    if Path(model.path).is_dir():
        files = {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(Path(model.path).glob("*"))}
        return {"directory": str(Path(model.path).resolve()), "files": files}
    return {"hub": model.path, "revision": model.revision}


def content(path: Path) -> str:
    """SHA-256 of a file that the configuration names. Raises ValueError when it cannot be read."""
    try:
        return file_sha256(path)
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}: it is named in the configuration") from None


def describe(model: ModelConfig) -> str:
    """One line for a reader."""
    if model.make is not None:
        made = f"random weights of {Path(model.make.config).name}, supervised warm-up"
        return f"make {model.path}: {made}, {model.make.format.value.upper()}"
    if Path(model.path).is_dir():
        return f"check the local checkpoint {model.path}"
    return f"download {model.path} at revision {model.revision or 'main'} from the hub, resumable"


def fetch(model: ModelConfig, out: Path, make: Callable[[Path], None]) -> Path:
    """The checkpoint, whole: made by `make`, or `model.path` itself, or downloaded into `out`; returns where it is.

    Raises ValueError when it is not whole, or cannot be downloaded.
    """
    if model.make is not None:
        data = cleared(out)
        make(data)
        return data
    if Path(model.path).is_dir():
        HFCheckpoint(Path(model.path))  # every file there and whole
        out.mkdir(parents=True, exist_ok=True)
        return Path(model.path)
    return _download(model, out / "data")


def _download(model: ModelConfig, target: Path) -> Path:
    """What was downloaded before a kill is kept: the hub client continues it, at the commit it began with."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError  # HTTPError: of whatever client the hub's uses

    pinned = target.parent / "revision"
    try:
        # asked each time: with no hub, snapshot_download would take whatever lies in `target` for the commit's files
        revision = pinned.read_text() if pinned.exists() else model.revision
        commit = str(HfApi().model_info(model.path, revision=revision).sha)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(pinned, commit)
        snapshot_download(model.path, revision=commit, local_dir=target)
    except HFValidationError:
        raise ValueError(f"model.path = {model.path!r} is neither a directory nor a hub name (owner/name)") from None
    except (HTTPError, OSError) as e:
        lines = [line for line in str(e).splitlines() if line.strip()] or [type(e).__name__]
        raise ValueError(
            f"could not download {model.path} at {model.revision or 'main'}: {' '.join(lines[:2]).rstrip(' .:')}: "
            "check the name, the network and the disk, then run again; what is downloaded is kept"
        ) from None
    try:
        HFCheckpoint(target)
    except ValueError as e:
        raise ValueError(
            f"{e}; the hub's {model.path} is so at commit {commit}: set model.revision to another, or remove "
            f"{target.parent} to begin anew at {model.revision or 'main'}"
        ) from None
    shutil.rmtree(target / ".cache" / "huggingface", ignore_errors=True)  # the client's records and half files
    return target
