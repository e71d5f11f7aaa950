"""The fetch stage: make a checkpoint, check a local directory, or download one from the hub."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_like.config.run import ModelConfig
from miles_like.hf.checkpoint import HFCheckpoint
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
    if Path(model.path).is_dir():
        files = {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(Path(model.path).glob("*"))}
        return {"directory": str(Path(model.path).resolve()), "files": files}
    return {"hub": model.path, "revision": model.revision}


def content(path: Path) -> str:
    """SHA-256 of a file named in the configuration. Raises ValueError when it cannot be read."""
    try:
        return file_sha256(path)
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}: the configuration names this file") from None


def describe(model: ModelConfig) -> str:
    """One line for the console."""
    if model.make is not None:
        made = f"random weights of {Path(model.make.config).name}, supervised warm-up"
        return f"make {model.path}: {made}, {model.make.format.value.upper()}"
    if Path(model.path).is_dir():
        return f"check the local checkpoint {model.path}"
    return f"download {model.path} at revision {model.revision or 'main'} from the hub, resumable"


def fetch(model: ModelConfig, out: Path, make: Callable[[Path], None]) -> Path:
    """Make the checkpoint with `make`, take `model.path` itself, or download into `out`; return its directory.

    Raises ValueError when it is incomplete or cannot be downloaded.
    """
    if model.make is not None:
        data = cleared(out)
        make(data)
        return data
    if Path(model.path).is_dir():
        HFCheckpoint(Path(model.path))  # raises for a missing or damaged file
        out.mkdir(parents=True, exist_ok=True)
        return Path(model.path)
    return _download(model, out / "data")


def _download(model: ModelConfig, target: Path) -> Path:
    """An interrupted download is kept, and continued at the commit it began with."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]  # re-exported

    pinned = target.parent / "revision"
    try:
        # requested on every start: without a hub, snapshot_download takes any files in `target` for the commit's
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
            f"{e}; the files on the hub for {model.path} at commit {commit} have this error: set model.revision to "
            f"another, or remove {target.parent} to download it again at {model.revision or 'main'}"
        ) from None
    shutil.rmtree(target / ".cache" / "huggingface", ignore_errors=True)  # metadata and partial files of the client
    return target
