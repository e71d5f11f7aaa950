"""Read rows of json, jsonl and parquet files, with every value as it is written in the file.

The standard library parses JSON, and numbers keep their text (rollout/prompts/values.py). Readers that convert rows to
typed columns change 5 to 5.0 if another row has 0.5, and round integers beyond 64 bits.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np

from rollout.prompts.values import WrittenFloat, integer, number

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]

MOST_NESTED = 64  # nested objects and lists
_WHOLE = 1 << 24  # all integers up to it are exact in float32
_BOM = b"\xef\xbb\xbf"
_PIECE = 1 << 18  # bytes of a file that are read at a time
_BATCH = 1024  # rows of a parquet file converted at a time
_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON value: write null, or leave the column out")


def _object(pairs: list[tuple[str, Any]]) -> Row:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [k for k, _ in pairs]
        twice = next(k for k in names if names.count(k) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return made


_DECODER = json.JSONDecoder(
    parse_float=number, parse_int=integer, parse_constant=_constant, object_pairs_hook=_object, strict=True
)


def jsonl_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """Yield ("line N" counted from 1, row) for each line that is not blank. A file that starts with `[` is one list.

    Raises ValueError naming the line.
    """
    if _starts_a_list(file):
        yield from json_rows(file)
        return
    with file.open("rb") as opened:
        for n, line in enumerate(opened, 1):
            raw = line.removeprefix(_BOM) if n == 1 else line
            if raw.strip():
                yield f"line {n}", jsonl_line(raw, n)


def _starts_a_list(file: Path) -> bool:
    with file.open("rb") as opened:
        found = opened.read(_PIECE).removeprefix(_BOM)
        while found and not found.strip():
            found = opened.read(_PIECE)
    return found.lstrip().startswith(b"[")


def jsonl_line(raw: bytes, n: int) -> Row:
    """The row of line n, counted from 1. Raises ValueError naming the line."""
    where = f"line {n}"
    row, _ = _row(_utf8(raw.rstrip(b"\r\n"), where), 0, where, (n - 1, 0), alone=True)
    return row


def json_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """Yield ("row N" counted from 1, row) for a list of objects, or for consecutive objects.

    Raises ValueError naming the row, or the line of broken JSON.
    """
    with file.open("rb") as opened:
        yield from _listed_rows(_Pieces(opened))


def _listed_rows(pieces: _Pieces) -> Iterator[tuple[str, Row]]:
    at, n, comma = pieces.skip(0), 0, False
    listed = pieces.text.startswith("[", at)
    if listed:
        at = pieces.skip(at + 1)
    while at < len(pieces.text) and not (listed and not comma and pieces.text[at] == "]"):
        n += 1
        row, at = pieces.row(at, f"row {n}")
        yield f"row {n}", row
        at = pieces.skip(at)
        comma = listed and pieces.text.startswith(",", at)
        if comma:
            at = pieces.skip(at + 1)
        elif listed and not pieces.text.startswith("]", at):
            raise ValueError(f"line {pieces.line(at)}: expected a comma or ] after row {n}")
    if listed and at == len(pieces.text):
        raise ValueError(f"line {pieces.line(at)}: the list does not end with ]")
    if listed:
        line, at = pieces.line(at + 1), pieces.skip(at + 1)
        if at < len(pieces.text):
            raise ValueError(f"line {line}: text after the ] that ends the list")


class _Pieces:
    """The text of a file from some place on: what is before it is forgotten, what follows is read when it is needed."""

    def __init__(self, opened: BinaryIO) -> None:
        self._opened, self._decoder = opened, codecs.getincrementaldecoder("utf-8")()
        self._before = (0, 0)  # lines before the text, and characters before it in its first line
        self._bytes, self._ended = 0, False  # bytes that were decoded
        self.text = ""

    def line(self, at: int) -> int:
        return self._before[0] + self.text.count("\n", 0, at) + 1

    def skip(self, at: int) -> int:
        """The place in `text`, which may be another one, of the first character from `at` on that is no space, or the
        end of the file."""
        while (at := _skip(self.text, at)) == len(self.text) and not self._ended:
            at = self._read(at)
        return at

    def row(self, at: int, where: str) -> tuple[Row, int]:
        """The object at `at`, and its end in `text`."""
        while True:
            try:
                return _row(self.text, at, where, self._before)
            except ValueError:
                if self._ended:
                    raise
            at = self._read(at)  # the object may end in what follows

    def _read(self, at: int) -> int:
        """Forgets what is before `at`, reads at least as much as is left, and returns the place of `at`."""
        lines, last = self.text.count("\n", 0, at), self.text.rfind("\n", 0, at)
        self._before = (self._before[0] + lines, at - last - 1 if lines else self._before[1] + at)
        self.text = self.text[at:]
        found = self._opened.read(max(_PIECE, len(self.text)))
        self._ended = not found
        if not self._bytes:
            found = found.removeprefix(_BOM)
        try:
            self.text += self._decoder.decode(found, final=self._ended)
        except UnicodeDecodeError as e:
            start = self._bytes + len(found) - len(e.object) + e.start  # the decoder kept bytes of the piece before
            raise ValueError(f"its text is not UTF-8: byte {e.object[e.start]:#04x} at {start}") from None
        self._bytes += len(found)
        return 0


def _row(text: str, at: int, where: str, before: tuple[int, int], *, alone: bool = False) -> tuple[Row, int]:
    """The object at `at`, and its end. before: lines before the text, and characters before it in its first line;
    alone: nothing may follow the object."""
    try:
        found, end = _DECODER.raw_decode(text, _skip(text, at))
        if alone and _skip(text, end) < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except json.JSONDecodeError as e:
        column = e.colno + (before[1] if e.lineno == 1 else 0)
        raise ValueError(f"line {before[0] + e.lineno}: not valid JSON: {e.msg}, column {column}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested more than {MOST_NESTED} deep") from None
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} is a {type(found).__name__}, expected an object of columns")
    if text.count("[", at, end) + text.count("{", at, end) > MOST_NESTED and _depth(found) > MOST_NESTED:
        raise ValueError(f"{where} is nested more than {MOST_NESTED} deep")
    if text.find("\\u", at, end) >= 0 and _SURROGATE.search(json.dumps(found, ensure_ascii=False)):
        raise ValueError(f"{where}: half of a surrogate pair (\\ud800 to \\udfff) is not a character")
    return found, end


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _utf8(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{where} is not UTF-8: byte {e.object[e.start]:#04x} at {e.start}") from None


def _depth(value: Any) -> int:
    deepest, open_ = 0, [(value, 1)]
    while open_:
        found, depth = open_.pop()
        deepest = max(deepest, depth)
        inside = found.values() if isinstance(found, dict) else found
        open_ += [(v, depth + 1) for v in inside if isinstance(v, dict | list)]
    return deepest


def parquet_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """Yield ("row N" counted from 1, row). A column's type determines the text of its values: 5 in a column of doubles
    is 5.0, and a 16- or 32-bit float has the digits of its precision.

    Raises ValueError for a damaged file and for duplicate column names.
    """
    import pyarrow as pa  # slow to import, and only needed here
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, buffer_size=1 << 18) as opened:
            names = opened.schema_arrow.names
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"two columns have the name {twice!r}")
            n = 0
            for batch in opened.iter_batches(batch_size=_BATCH):
                columns = [column_values(c) for c in batch.columns]
                for values in zip(*columns, strict=True):
                    n += 1
                    yield f"row {n}", dict(zip(names, values, strict=True))
    except (pa.ArrowException, OverflowError) as e:
        raise ValueError((str(e).strip() or type(e).__name__).splitlines()[0]) from e


def column_values(column: pa.Array) -> list[Any]:
    """The values of a column as `parquet_rows` yields them. Raises pyarrow.ArrowException for times that Python's
    cannot hold."""
    import pyarrow as pa

    if pa.types.is_time64(column.type):
        column = column.cast("time64[us]")  # raises for nanoseconds, which Python's times cannot hold
    values: list[Any] = column.to_pylist()
    convert = _narrow(column.type)
    return values if convert is None else [convert(v) for v in values]


def _narrow(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """A converter of the type's 16- and 32-bit floats to WrittenFloat; None if it has no such floats."""
    import pyarrow as pa

    if pa.types.is_float16(kind) or pa.types.is_float32(kind):
        width = np.float16 if pa.types.is_float16(kind) else np.float32
        # keep integers: the shortest float16 text of 65504 is 6.55e+04
        return lambda v: v if v is None or (v % 1 == 0 and abs(v) <= _WHOLE) else WrittenFloat(str(width(v)))
    if pa.types.is_struct(kind):
        inside = {f.name: c for f in kind if (c := _narrow(f.type)) is not None}
        return (lambda v: v and {k: inside[k](x) if k in inside else x for k, x in v.items()}) if inside else None
    if pa.types.is_map(kind):
        of_items = _narrow(kind.item_type)
        return None if of_items is None else lambda v: v and [(k, of_items(x)) for k, x in v]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        each = _narrow(kind.value_type)
        return None if each is None else lambda v: v and [each(x) for x in v]
    return None
