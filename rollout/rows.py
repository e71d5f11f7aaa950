"""Rows of a prompt file: json, jsonl, parquet, or a hub name."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import datasets

Row: TypeAlias = Mapping[str, Any]

_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def read_rows(path: str) -> Sequence[Row]:
    """Rows of a file or of a hub name. Raises ValueError when there is no such file, it is damaged or has no rows."""
    file = Path(path)
    reader = _READERS.get(file.suffix)
    if reader is None and (file.exists() or file.suffix in {".csv", ".txt", ".gz"}):
        raise ValueError(f"{path}: prompts are read from {', '.join(_READERS)} files or a hub name, not from this")
    if reader is not None:
        if not file.is_file():
            raise ValueError(f"{path}: no such file: check data.train and data.eval")
        if file.stat().st_size == 0:
            raise ValueError(f"{path} is empty: it has no prompts")
        # The cache of a local file is of no use after this: nothing is left in the user's home.
        with tempfile.TemporaryDirectory(prefix="prompts_") as cache:
            rows = _load(path, reader, data_files=str(file), split="train", cache_dir=cache)
    else:
        name, _, split = path.partition(":")
        rows = _load(path, name, split=split or "train")
    if not rows:
        raise ValueError(f"{path} has no rows: it has no prompts")
    return rows


def _load(path: str, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    datasets.disable_progress_bars()
    try:
        return list(datasets.load_dataset(*args, **kwargs).to_list())
    except (datasets.exceptions.DatasetGenerationError, datasets.exceptions.DatasetsError, OSError, ValueError) as e:
        reason = e.__cause__ or e
        raise ValueError(f"{path} cannot be read as prompts: {str(reason).strip().splitlines()[0]}") from e


class NoColumn(ValueError):
    """A column that a row does not have."""


def column(row: Row, key: str, path: str) -> Any:
    """A column, or with dots what is in one: verl's files have their answer in "reward_model.ground_truth".

    Raises NoColumn naming those there are.
    """
    if key in row:
        return row[key]
    found: Any = row
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            have = ", ".join(sorted(found if isinstance(found, Mapping) else row))
            raise NoColumn(f"{path} has no column {key!r}; it has {have}: set data.prompt_key and data.answer_key")
        found = found[part]
    return found


def first_value(rows: Sequence[Row], key: str) -> Any:
    """Of a column as `column` reads it; None where no row has one."""
    within = key.split(".")
    for row in rows:
        found: Any = row
        for part in [key] if key in row else within:
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is not None:
            return found
    return None
