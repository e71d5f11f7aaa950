"""Writes rows as jsonl or parquet, with every value as it was read. Several files appear together, or none does."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from miles_like.datasets.table import Table
from miles_like.storage.completion import file_sha256
from rollout.prompts.dataset import Row
from rollout.prompts.row_files import column_values
from rollout.prompts.values import WrittenFloat, text_of

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".jsonl", ".parquet")


class Outputs:
    """Files that are written beside their final names and renamed at the end of the context, all of them; an error
    inside leaves those that were there before, and no others.

    notes: what a parquet file has in another form than its rows.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._partial: dict[Path, Path] = {}  # final name -> written so far
        self._made: list[Path] = []  # directories

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            for path, partial in self._partial.items():
                os.replace(partial, path)
        else:
            for partial in self._partial.values():
                partial.unlink(missing_ok=True)
            for directory in reversed(self._made):
                with contextlib.suppress(OSError):
                    directory.rmdir()

    def rows(self, path: Path, rows: Sequence[Row]) -> None:
        """Raises ValueError for another suffix than SUFFIXES, and for values that the format cannot hold."""
        if check_suffix(path) == ".jsonl":
            self.text(path, "".join(f"{json_text(row)}\n" for row in rows))
            return
        table, notes = arrow_table(rows, path)
        self.notes += notes
        self._parquet(path, table)

    def selected(self, path: Path, table: Table, items: Sequence[int]) -> None:
        """Some rows of a table. From parquet to parquet the columns keep their types."""
        if check_suffix(path) == ".parquet" and Path(table.path).suffix == ".parquet":
            import pyarrow.parquet as pq

            self._parquet(path, pq.read_table(table.path).take(list(items)))
        else:
            self.rows(path, [table.items[i].row for i in items])

    def text(self, path: Path, text: str) -> None:
        with self._new(path).open("w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())

    def sha256(self, path: Path) -> str:
        """Of a file that was written, in hex."""
        return file_sha256(self._partial[path])

    def _parquet(self, path: Path, table: pa.Table) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        partial = self._new(path)
        try:
            pq.write_table(table, partial)
        except pa.ArrowException as e:
            raise ValueError(f"{path} cannot be written as parquet ({_first_line(e)}): use a .jsonl file") from None

    def _new(self, path: Path) -> Path:
        self._made += [p for p in reversed([path.parent, *path.parent.parents]) if not p.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._partial[path] = path.with_name(f"{path.name}.partial")
        return partial


def check_suffix(path: Path) -> str:
    """The suffix of a file to write. Raises ValueError for one that is not in SUFFIXES."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected a name ending in {' or '.join(SUFFIXES)}")
    return path.suffix


def json_text(value: Any) -> str:
    """A value as JSON, numbers with the digits with which they were read. Raises ValueError for bytes, NaN and values
    of other types than a prompt file has."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(str(k))}: {json_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(json_text, value)) + "]"
    if isinstance(value, WrittenFloat):
        return value.text
    if isinstance(value, float) and math.isfinite(value):
        return repr(float(value))
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    return _quoted(text_of(value))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def arrow_table(rows: Sequence[Row], path: Path) -> tuple[pa.Table, list[str]]:
    """The rows as columns with types, and a note for each column that is written as text because its values have
    several forms, such as 5 beside 0.50. Raises ValueError for a column of lists or objects that parquet would change.
    """
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in rows for name in row))
    made, notes = [], list[str]()
    for name in names:
        values = [row.get(name) for row in rows]
        array = _typed(values)
        if array is None:
            try:
                array = pa.array([None if v is None else text_of(v) for v in values])
            except ValueError:
                raise ValueError(
                    f"{path}: column {name!r} has values of several types, which parquet does not support: use a "
                    ".jsonl file"
                ) from None
            notes.append(f"{path}: column {name!r} is written as text, because its numbers have several types")
        made.append(array)
    return pa.table(dict(zip(names, made, strict=True))), notes


def _typed(values: Sequence[Any]) -> pa.Array | None:
    """None where the values would be read back in another form."""
    import pyarrow as pa

    try:
        array = pa.array([_plain(v) for v in values])
        same = list(map(_form, column_values(array))) == list(map(_form, values))
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return None
    return array if same else None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return float(value) if isinstance(value, float) else value


def _form(value: Any) -> str:
    """The value as JSON, without the keys of objects whose value is null: parquet does not tell these from missing
    ones."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {_form(v)}" for k, v in sorted(value.items()) if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_form, value)) + "]"
    return json_text(value)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
