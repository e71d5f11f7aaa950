"""The directory of what the stages before training made, which runs share."""

from __future__ import annotations

from pathlib import Path

from miles_like.config.run import RunConfig
from miles_like.pipeline.fetch import source_inputs
from miles_like.storage.completion import MARKER, input_key, marker_root, read_marker

USUAL_CACHE = Path("runs/cache")  # the default cache of runs in runs/


def cache_of(config: RunConfig, run_dir: Path) -> Path:
    """The directory of the outputs of the stages before training: `cache_dir`, else beside the run directory."""
    return Path(config.cache_dir) if config.cache_dir is not None else run_dir.parent / "cache"


def fetch_directory(config: RunConfig, cache: Path) -> tuple[str, Path]:
    """Key and directory of the fetch stage."""
    key = input_key("fetch", source_inputs(config.model))
    return key, cache / f"fetch-{key}"


def fetched_model(config: RunConfig, run_dir: Path) -> Path:
    """The Hugging Face directory that a run began with, whose weights may have been deleted since. Raises ValueError
    where it is not in the cache."""
    key, directory = fetch_directory(config, cache_of(config, run_dir))
    marker = read_marker(directory)
    if marker is None or marker.get("key") != key or not (root := marker_root(directory, marker)).is_dir():
        raise ValueError(
            f"the initial model of {run_dir} is not in {directory}: pass its Hugging Face directory with --hf-config"
        )
    return root


def describe_cache(config: RunConfig, run_dir: Path) -> str:
    """One line: the cache in use, why, and the usual cache if that has outputs but is not used."""
    cache = cache_of(config, run_dir).resolve()
    if config.cache_dir is not None:
        return f"{cache} (cache_dir)"
    usual = USUAL_CACHE.resolve()
    line = f"{cache} (beside the run directory)"
    if cache == usual or not any(usual.glob(f"*/{MARKER}")):
        return line
    return f"{line}; to reuse the outputs in {usual}, pass --cache-dir {USUAL_CACHE}"
