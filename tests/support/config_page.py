"""The tables of docs/configuration_keys.md: the keys of a run's configuration as
`miles_like/config/keys.py` describes them.

    python -m tests.support.config_page            # prints the block
    python -m tests.support.config_page --write    # writes it into the page
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from miles_like.config.keys import about, rows, sections
from miles_like.config.run import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration_keys.md"
BEGIN = "<!-- keys: python -m tests.support.config_page --write -->"
END = "<!-- end of keys -->"


def block() -> str:
    """The lines between the markers."""
    return "\n".join([BEGIN, "", *_tables(RunConfig, ""), END])


def replaced(page: str) -> str:
    """`page` with a new block. Raises ValueError where it has no markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"docs/{PAGE.name} has no lines {BEGIN!r} and {END!r}: add them")
    return before + block() + after


def _tables(model: type[BaseModel], name: str) -> Iterator[str]:
    """Lines: the table of a section, then those of the sections in it. name: dotted; "": the whole configuration."""
    inner = sections(model)
    shown = [row for row in rows(model) if row.key not in inner]
    yield f"## {f'[{name}]' if name else 'Outside sections'}"
    yield ""
    if name and (text := about(model)):
        yield from (*textwrap.wrap(text, 120), "")
    if shown:
        yield from ("| key | type | default | meaning |", "|---|---|---|---|")
        for row in shown:
            cells = (f"`{f'{name}.{row.key}' if name else row.key}`", row.type, row.default, row.meaning)
            yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
        yield ""
    for key, (of, named) in inner.items():
        yield from _tables(of, ".".join(filter(None, [name, key, "NAME" if named else ""])))


def main() -> None:
    if "--write" in sys.argv[1:]:
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(block())


if __name__ == "__main__":
    main()
