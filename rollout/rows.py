"""Rows of a prompt file (json, jsonl, parquet) or of a dataset on the hub."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, overload

from rollout.row_files import json_rows, jsonl_rows, parquet_rows
from rollout.written import text_of

Row: TypeAlias = Mapping[str, Any]

_READERS: dict[str, Callable[[Path], Iterator[tuple[str, dict[str, Any]]]]] = {
    ".json": json_rows,
    ".jsonl": jsonl_rows,
    ".parquet": parquet_rows,
}


@dataclass(frozen=True, slots=True)
class Rows(Sequence[Row]):
    """All rows of one file, in its order."""

    path: str
    rows: Sequence[Row]
    places: Sequence[str]  # "line 3" of a jsonl file, else "row 3", counted from 1

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, i: int) -> Row: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Row]: ...
    def __getitem__(self, i: int | slice) -> Row | Sequence[Row]:
        return self.rows[i]

    def where(self, i: int) -> str:
        """For messages: the file and the place of row i in it."""
        return f"{self.path}, {self.places[i]}"


def is_hub_name(path: str) -> bool:
    """Whether `read_rows` would ask the hub for it."""
    file = Path(path)
    return file.suffix not in {*_READERS, ".csv", ".txt", ".gz"} and not file.exists()


def read_rows(path: str, limit: int | None = None) -> Rows:
    """Rows of a file, values as written there, or of a hub name, typed by the library `datasets`; the first `limit`.

    Raises ValueError when the file does not exist, is damaged or has no rows.
    """
    file = Path(path)
    reader = _READERS.get(file.suffix)
    if reader is None and (file.exists() or file.suffix in {".csv", ".txt", ".gz"}):
        raise ValueError(f"{path}: prompts are read from {', '.join(_READERS)} files or a hub name, not from this")
    if reader is None:
        rows = _of_hub(path)[:limit]
        places = [f"row {i}" for i in range(1, len(rows) + 1)]
    else:
        rows, places = _of_file(file, reader, path, limit)
    if not rows:
        raise ValueError(f"{path} has no rows: it has no prompts")
    return Rows(path, rows, places)


def _of_file(
    file: Path, reader: Callable[[Path], Iterator[tuple[str, dict[str, Any]]]], path: str, limit: int | None
) -> tuple[list[dict[str, Any]], list[str]]:
    try:
        if not file.is_file():  # of a FIFO or a device nothing is opened: reading one may never end
            found = "is not a regular file" if file.exists() else "no such file: check data.train and data.eval"
            raise ValueError(found)
        if file.stat().st_size == 0:
            raise ValueError("is empty: it has no prompts")
        rows, places = [], []
        for place, row in itertools.islice(reader(file), limit):
            rows.append(row)
            places.append(place)
    except OSError as e:
        raise ValueError(f"{path} cannot be read as prompts: {e.strerror or str(e).splitlines()[0]}") from e
    except ValueError as e:
        said = str(e)
        raise ValueError(f"{path} {said}" if said.startswith("is ") else f"{path}, {said}") from e
    return rows, places


def _of_hub(path: str) -> list[dict[str, Any]]:
    import datasets

    name, _, split = path.partition(":")
    datasets.disable_progress_bars()
    try:
        return list(datasets.load_dataset(name, split=split or "train").to_list())
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
            raise NoColumn(
                f"{path} has no column {key!r}; it has {have or 'none'}: set data.prompt_key and data.answer_key"
            )
        found = found[part]
    return found


def text_column(value: object, key: str, where: str) -> str:
    """A column's value as text. Raises ValueError naming the column for an object, a list, bytes or NaN."""
    try:
        return text_of(value)
    except ValueError as e:
        raise ValueError(f"{where}: column {key!r} {e}") from None


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
