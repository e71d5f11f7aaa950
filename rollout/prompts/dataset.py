"""Read rows of a prompt file (json, jsonl, parquet) or of a dataset on the hub."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from rollout.prompts.row_files import json_rows, jsonl_rows, parquet_rows
from rollout.prompts.spool import Lazy, Spool
from rollout.prompts.values import text_of

Row: TypeAlias = Mapping[str, Any]

_READERS: dict[str, Callable[[Path], Iterator[tuple[str, dict[str, Any]]]]] = {
    ".json": json_rows,
    ".jsonl": jsonl_rows,
    ".parquet": parquet_rows,
}
_BATCH = 1024  # rows of a hub dataset converted at a time


class Rows(Lazy[Row]):
    """All rows of one file, on disk, in order, each with its place: "line 3" for a jsonl file, else "row 3"; counted
    from 1. Raises ValueError if there is no space for them."""

    def __init__(self, path: str, placed: Iterable[tuple[str, Row]]) -> None:
        self.path, self._placed = path, Spool[tuple[str, Row]](path)
        for place_and_row in placed:
            self._placed.append(place_and_row)

    def __len__(self) -> int:
        return len(self._placed)

    def _at(self, i: int) -> Row:
        return self._placed[i][1]

    def placed(self) -> Iterator[tuple[str, Row]]:
        """The place of each row and the row."""
        return iter(self._placed)

    def where(self, i: int) -> str:
        """The file and place of row i, for messages."""
        return f"{self.path}, {self._placed[i][0]}"


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
    found = _of_hub(path) if reader is None else _of_file(file, reader, path)
    rows = Rows(path, itertools.islice(found, limit))
    if not rows:
        raise ValueError(f"{path} has no rows: it has no prompts")
    return rows


def _of_file(
    file: Path, reader: Callable[[Path], Iterator[tuple[str, dict[str, Any]]]], path: str
) -> Iterator[tuple[str, Row]]:
    try:
        if not file.is_file():  # reading a FIFO or a device may never end
            raise ValueError(
                "is not a regular file" if file.exists() else "no such file: check data.train and data.eval"
            )
        if file.stat().st_size == 0:
            raise ValueError("is empty: it has no prompts")
        yield from reader(file)
    except OSError as e:
        raise ValueError(f"{path} cannot be read as prompts: {e.strerror or str(e).splitlines()[0]}") from e
    except ValueError as e:
        reason = str(e)
        raise ValueError(f"{path} {reason}" if reason.startswith("is ") else f"{path}, {reason}") from e


def _of_hub(path: str) -> Iterator[tuple[str, Row]]:
    import datasets

    name, _, split = path.partition(":")
    datasets.disable_progress_bars()
    try:
        found = datasets.load_dataset(name, split=split or "train")
        for start in range(0, len(found), _BATCH):
            rows = found.select(range(start, min(start + _BATCH, len(found)))).to_list()
            yield from ((f"row {i}", row) for i, row in enumerate(rows, start + 1))
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


def value_of(row: Row, key: str) -> Any:
    """The value of a column, or of a nested one; None if there is none."""
    if key in row:
        return row[key]
    found: Any = row
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
