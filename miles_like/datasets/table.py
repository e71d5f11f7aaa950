"""The rows of a prompt file as the data commands use them: read as a run reads them, with the place of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_like.types import Prompt
from rollout.prompts.config import DataConfig
from rollout.prompts.dataset import MissingColumn, Row, Rows, column, read_rows, text_column
from rollout.prompts.row_files import jsonl_line
from rollout.prompts.schema import Columns, columns, given_id
from rollout.prompts.source import Tokenizer, as_messages, row_prompt

_UNLIMITED = 1 << 40  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A row, and the prompt that a run makes of it."""

    row: Row
    place: str  # "line 3" of a jsonl file, else "row 3"
    prompt: Prompt
    asked: str  # the prompt as written: the last message that is not an answer, without instruction and template


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The rows of one file."""

    path: str
    items: Sequence[Item]
    columns: Columns
    tokenized: bool  # whether token counts are those of a tokenizer

    def where(self, i: int) -> str:
        return f"{self.path}, {self.items[i].place}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a row."""

    place: str  # "line 3", "row 3", or "" where it is of the whole file
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.place else self.text


class Characters:
    """A stand-in for a tokenizer where none is given: a token a character, and messages one after the other."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        return "\n".join(m["content"] for m in conversation)


def read_table(path: str, config: DataConfig, tokenizer: Tokenizer | None = None) -> Table:
    """All rows of a file, with prompts of any length. Raises ValueError with the first fault."""
    unlimited = config.model_copy(update={"max_prompt_tokens": _UNLIMITED})
    table, faults = examined(read_rows(path), unlimited, tokenizer, answers=False)
    if faults:
        more = f" ({len(faults)} such faults: `miles-like data check` lists them)" if len(faults) > 1 else ""
        raise ValueError(f"{path}, {faults[0]}{more}" if faults[0].place else f"{faults[0]}{more}")
    return table


def examined(
    rows: Rows, config: DataConfig, tokenizer: Tokenizer | None, *, answers: bool
) -> tuple[Table, list[Finding]]:
    """The rows that a run would accept, and what is wrong with the others. answers: whether each row needs one. Raises
    ValueError for a file whose columns are ambiguous, and for a column that no row has."""
    path = rows.path
    found = columns(config, rows)
    _check_present(rows, found, answers=answers or config.answer_key is not None)
    items, faults = list[Item](), list[Finding]()
    first_of: dict[str, str] = {}
    for place, row in rows.placed():
        where = f"{path}, {place}"
        try:
            given = given_id(config, found, row, where)
            item = _item(rows.path, place, row, found, config, tokenizer, given)
            if answers and not item.prompt.answer:
                raise ValueError(f"the prompt has no answer ({found.answer})")
        except ValueError as e:
            faults.append(Finding(place, str(e).removeprefix(f"{where}: ").removeprefix(f"{path} ")))
            continue
        if given is not None and given in first_of:
            faults.append(Finding(place, f"id {given!r} is also that of {first_of[given]}: give each row a unique id"))
            continue
        first_of.setdefault(item.prompt.id, place)
        items.append(item)
    return Table(path=path, items=items, columns=found, tokenized=tokenizer is not None), faults


def readable_rows(path: str) -> tuple[Rows, list[Finding]]:
    """The rows of a file, and the lines that are no rows: of a jsonl file every one of them. Raises ValueError for
    another file as `read_rows` does, and where no line is a row."""
    file = Path(path)
    try:
        return read_rows(path), []
    except ValueError:
        if file.suffix != ".jsonl" or not file.is_file():
            raise
        kept, faults = _each_line(file)
        if not kept:
            raise
        return Rows(path, kept), faults


def _each_line(file: Path) -> tuple[list[tuple[str, dict[str, Any]]], list[Finding]]:
    kept, faults = list[tuple[str, dict[str, Any]]](), list[Finding]()
    for n, raw in _lines(file):
        try:
            kept.append((f"line {n}", jsonl_line(raw, n)))
        except ValueError as e:
            place = f"line {n}"
            faults.append(Finding(place, str(e).removeprefix(f"{place}: ").removeprefix(f"{place} ")))
    return kept, faults


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as opened:
        for n, line in enumerate(opened, 1):
            raw = line.removeprefix(b"\xef\xbb\xbf") if n == 1 else line
            if raw.strip():
                yield n, raw


def _check_present(rows: Rows, found: Columns, *, answers: bool) -> None:
    """Raises ValueError for a column that no row has."""
    for key in (found.prompt, *((found.answer,) if answers else ())):
        missing: MissingColumn | None = None
        for row in rows:
            try:
                column(row, key, rows.path)
            except MissingColumn as e:
                missing = missing or e
            else:
                break
        else:
            assert missing is not None
            raise missing


def _item(
    path: str,
    place: str,
    row: Row,
    found: Columns,
    config: DataConfig,
    tokenizer: Tokenizer | None,
    given: str | None,
) -> Item:
    where = f"{path}, {place}"
    if tokenizer is None:
        config = config.model_copy(update={"max_prompt_tokens": _UNLIMITED})
    try:
        value = column(row, found.answer, path)
    except MissingColumn:
        value = None
    answer = text_column(value, found.answer, where)
    prompt = row_prompt(
        config,
        Characters() if tokenizer is None else tokenizer,
        row,
        answer if answer.strip() else "",
        found,
        where,
        path,
        given=given,
        source="",
    )
    question = as_messages(column(row, found.prompt, path))
    asked = [m["content"] for m in question if m["role"] != "assistant"] or [m["content"] for m in question]
    return Item(row=row, place=place, prompt=prompt, asked=asked[-1])
