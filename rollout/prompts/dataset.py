"""Read rows of a prompt file (json, jsonl, parquet) or of a dataset on the hub."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, overload

from rollout.prompts.row_files import json_rows, jsonl_rows, parquet_rows
from rollout.prompts.values import text_of

Row: TypeAlias = Mapping[str, Any]

_READERS: dict[str, Callable[[Path], Iterator[tuple[str, dict[str, Any]]]]] = {
    ".json": json_rows,
    ".jsonl": jsonl_rows,
    ".parquet": parquet_rows,
}


@dataclass(frozen=True, slots=True)
class Rows(Sequence[Row]):
    """All rows of one file, in order."""

    path: str
    rows: Sequence[Row]
    places: Sequence[str]  # "line 3" for a jsonl file, else "row 3"; counted from 1

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, i: int) -> Row: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Row]: ...
    def __getitem__(self, i: int | slice) -> Row | Sequence[Row]:
        return self.rows[i]

    def where(self, i: int) -> str:
        """The file and place of row i, for messages."""
        return f"{self.path}, {self.places[i]}"


def is_hub_name(path: str) -> bool:
    """Whether `read_rows` would load `path` from the hub."""
    file = Path(path)
    return file.suffix not in {*_READERS, ".csv", ".txt", ".gz"} and not file.exists()


def read_rows(path: str, limit: int | None = None) -> Rows:
    """The first `limit` rows: of a file with values as written there, or of a hub dataset as typed by `datasets`.

    Raises ValueError if the file does not exist, is damaged or has no rows.
    """
    file = Path(path)
    reader = _READERS.get(file.suffix)
    if reader is None and (file.exists() or file.suffix in {".csv", ".txt", ".gz"}):
        raise ValueError(f"{path}: this is not a supported format: use a {', '.join(_READERS)} file or a hub name")
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
        if not file.is_file():  # reading a FIFO or a device may never end
            raise ValueError(
                "is not a regular file" if file.exists() else "no such file: check data.train and data.eval"
            )
        if file.stat().st_size == 0:
            raise ValueError("is empty: it has no prompts")
        rows, places = [], []
        for place, row in itertools.islice(reader(file), limit):
            rows.append(row)
            places.append(place)
    except OSError as e:
        raise ValueError(f"{path} cannot be read as prompts: {e.strerror or str(e).splitlines()[0]}") from e
    except ValueError as e:
        reason = str(e)
        raise ValueError(f"{path} {reason}" if reason.startswith("is ") else f"{path}, {reason}") from e
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


class MissingColumn(ValueError):
    """A row lacks a column."""


def column(row: Row, key: str, path: str) -> Any:
    """The value of a column. A key with dots is a nested value, such as verl's "reward_model.ground_truth".

    Raises MissingColumn naming the existing columns.
    """
    if key in row:
        return row[key]
    found: Any = row
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            have = ", ".join(sorted(found if isinstance(found, Mapping) else row))
            raise MissingColumn(
                f"{path} has no column {key!r}; columns found: {have or 'none'}: set data.prompt_key and "
                "data.answer_key"
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
    """The first value of a column other than None; None if there is none."""
    within = key.split(".")
    for row in rows:
        found: Any = row
        for part in [key] if key in row else within:
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is not None:
            return found
    return None
