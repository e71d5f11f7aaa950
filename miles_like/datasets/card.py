"""The data card: a markdown page with the metadata that the Hugging Face hub reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_like.datasets.duplicates import Duplicates
from miles_like.datasets.stats import NONE, Stats
from miles_like.storage.completion import write_atomically

_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))


def duplicate_lines(found: Duplicates, threshold: float) -> list[str]:
    """For the console and the card."""
    return [
        f"duplicates: {len(found.removed)} rows, {found.exact} exact and {len(found.removed) - found.exact} near "
        f"(Jaccard similarity of 3-word shingles >= {threshold:g})",
        f"contradictions: {len(found.contradictions)} prompts with several answers",
        f"variants: {found.variants} pairs of near-duplicate prompts with different answers",
    ]


def card(title: str, of: Mapping[str, Stats], lines: Sequence[str] = ()) -> str:
    """of: name of each part -> its figures. lines: how the files were made. Raises ValueError without a part."""
    if not of:
        raise ValueError(f"a data card of {title} needs the figures of a part")
    total = sum(s.rows for s in of.values())
    out = ["---", *_metadata(of, total), "---", "", f"# {title}", "", f"{total} rows in {len(of)} part(s).", ""]
    out += ["| part | rows | with an answer | SHA-256 |", "|---|---|---|---|"]
    out += [f"| {name} | {s.rows} | {s.answered} | `{s.sha256}` |" for name, s in of.items()]
    if lines:
        out += ["", "## How it was made", "", *(f"- {line}" for line in lines)]
    for name, s in of.items():
        out += ["", f"## {name}", "", *(f"- {line}" for line in s.lines() if not line.startswith(("rows", "sha256")))]
    return "\n".join(out) + "\n"


def write_card(path: Path, found: Stats) -> None:
    """The card of one file."""
    name = title_of(found.path)
    write_atomically(path, card(name, {name: found}))


def _metadata(of: Mapping[str, Stats], total: int) -> list[str]:
    """YAML, whose strings are written as JSON's."""
    licences = {name for s in of.values() for name in s.licences if name != NONE}
    languages = {name for s in of.values() for name in s.languages if len(name) == 2}  # ISO 639-1
    size = next((name for most, name in _SIZES if total < most), "n>10M")
    named = {"license": sorted(licences), "language": sorted(languages), "size_categories": [size]}
    return [f"{key}: {json.dumps(values, ensure_ascii=False)}" for key, values in named.items() if values]


def title_of(path: Path | str) -> str:
    """A file's stem, or the last part of a dataset's name."""
    return Path(str(path).partition(":")[0]).stem
