"""Files made of another one: without its duplicates and leaks, or divided into parts. Each has a data card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from miles_like.datasets.card import card, duplicate_lines, title_of
from miles_like.datasets.duplicates import find_duplicates
from miles_like.datasets.leaks import find_leaks, leak_counts
from miles_like.datasets.split import LEFT_OUT, parse_parts, split
from miles_like.datasets.stats import Stats, measure
from miles_like.datasets.table import Table, read_table
from miles_like.datasets.write import SUFFIXES, Outputs, check_suffix
from miles_like.storage.completion import file_sha256
from rollout.prompts.config import DataConfig

CARD = "README.md"  # of a directory: the hub shows it


def write_reduced(
    path: str, out: Path, config: DataConfig, *, held: Mapping[str, str], threshold: float, card_file: Path | None
) -> list[str]:
    """Writes the rows of `path` that repeat no earlier one and are in none of the eval sets (name -> file); returns
    lines for the console. Raises ValueError for a file with a faulty row, and where no row is left."""
    check_suffix(out)
    table = read_table(path, config)
    found = find_duplicates(table.items, threshold)
    lines, kept = duplicate_lines(found, threshold), list(found.kept)
    if held:
        leaks = find_leaks(table, {name: read_table(file, config) for name, file in held.items()}, threshold)
        there, counts = {leak.item for leak in leaks}, leak_counts(leaks)
        kept = [i for i in kept if i not in there]
        lines.append(
            f"leaks into {', '.join(held.values())}: {len(leaks)} rows: {counts['exact']} exact, {counts['near']} "
            f"near, {counts['passage']} by a common passage"
        )
    if not kept:
        raise ValueError(f"{path}: all {len(table.items)} rows are in eval sets: use different eval sets")
    with Outputs() as outputs:
        outputs.selected(out, table, kept)
        if card_file is not None:
            name = title_of(out)
            outputs.text(card_file, card(name, {name: _stats(outputs, out, table, kept)}, [_origin(table), *lines]))
    return [*outputs.notes, *lines, f"{out}: {len(kept)} of {len(table.items)} rows"]


def write_split(
    path: str, out: Path, config: DataConfig, parts: str, *, threshold: float, seed: int, format: str | None
) -> list[str]:
    """Writes PART.jsonl or PART.parquet for each of `parts`, left_out likewise if there are such rows, and a card, to
    an empty directory; returns lines for the console. Raises ValueError for a file with a faulty row, a part that gets
    none, and a directory with files."""
    shares = parse_parts(parts)
    suffix = Path(path).suffix if format is None else f".{format}"
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: --format must be jsonl or parquet: pass one of them")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory: choose another one")
    table = read_table(path, config)
    found = split(table.items, shares, threshold=threshold, seed=seed)
    if empty := [name for name, rows in found.parts.items() if not rows]:
        raise ValueError(f"{path}: none of its {len(table.items)} rows belongs to {empty[0]!r}: give it a larger share")
    lines = [
        f"parts: {parts} of prompts, by the SHA-256 of the text and seed {seed}",
        f"left out: {len(found.left_out)} rows of {found.crossing} clusters that span several parts (Jaccard "
        f"similarity of 3-word shingles >= {threshold:g})",
    ]
    written = dict(found.parts) | ({LEFT_OUT: found.left_out} if found.left_out else {})
    with Outputs() as outputs:
        of = dict[str, Stats]()
        for name, rows in written.items():
            file = out / f"{name}{suffix}"
            outputs.selected(file, table, rows)
            of[name] = _stats(outputs, file, table, rows)
        outputs.text(out / CARD, card(title_of(path), of, [_origin(table), *lines]))
    return [*outputs.notes, *lines, *(f"{out / name}{suffix}: {len(rows)} rows" for name, rows in written.items())]


def _stats(outputs: Outputs, file: Path, table: Table, rows: Sequence[int]) -> Stats:
    return replace(measure(table, rows=rows), path=str(file), sha256=outputs.sha256(file))


def _origin(table: Table) -> str:
    file = Path(table.path)
    sha256 = f"SHA-256 `{file_sha256(file)}`, " if file.is_file() else ""
    return f"from `{file.name}`, {sha256}{len(table.items)} rows"
