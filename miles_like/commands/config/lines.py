"""Lines that `miles-like config` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_like.config.explain import ExplainedKey, ExplainedSection
    from miles_like.config.keys import Row

_WIDE = 120
_WIDEST = 60  # of a column but the last


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of cells as aligned columns."""
    widths = [min(_WIDEST, max(map(len, column))) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def explained(found: ExplainedKey | ExplainedSection) -> Iterator[str]:
    """What is known of a key or section."""
    from miles_like.config.explain import ExplainedKey

    if isinstance(found, ExplainedKey):
        yield found.name
        readers = ", ".join(found.readers) or "read together with its section"
        for label, text in (*_facts(found.row), ("read in", readers)):
            yield from textwrap.wrap(text, _WIDE, initial_indent=f"  {label:9}", subsequent_indent=" " * 11)
        return
    yield f"[{found.name}]"
    yield from textwrap.wrap(found.about, _WIDE)
    yield from columns([(row.key, _plain(row.type), _plain(row.default), _plain(row.meaning)) for row in found.keys])
    for name in found.sections:
        yield f"[{name}]"


def _facts(row: Row) -> Iterator[tuple[str, str]]:
    yield "type", _plain(row.type)
    yield "default", _plain(row.default)
    yield "meaning", _plain(row.meaning)


def _plain(text: str) -> str:
    """Without the marks of Markdown."""
    return text.replace("`", "")
