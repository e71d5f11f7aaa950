"""The reference of docs/python_api.md: signature and docstring of every public name of `miles_like`.

    python -m tests.support.api_page            # prints the block
    python -m tests.support.api_page --write    # writes it into the page

A docstring has paragraphs, and after them sections `Args:`, `Returns:` and `Raises:`, whose entries are `name: text`.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import miles_like

PAGE = Path(__file__).parents[2] / "docs" / "python_api.md"
BEGIN = "<!-- reference: python -m tests.support.api_page --write -->"
END = "<!-- end of reference -->"
_SECTION = re.compile(r"^(Args|Returns|Raises):\n", re.MULTILINE)
_ENTRY = re.compile(r"^(\w[\w, ]*): ", re.MULTILINE)


def public() -> list[str]:
    """Functions in the order of a run, then what they return and raise."""
    order = [
        "train",
        "evaluate",
        "verify",
        "plan",
        "convert",
        "quantize",
        "export",
        "RunResult",
        "UserError",
        "Stopped",
    ]
    assert {*order, "__version__"} == set(miles_like.__all__), "a public name is not in this list"
    return order


def block() -> str:
    """The lines between the markers."""
    lines = [line for name in public() for line in _about(name)]
    return "\n".join([BEGIN, "", *lines, END])


def replaced(page: str) -> str:
    """`page` with a new block. Raises ValueError where it has no markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"docs/{PAGE.name} has no lines {BEGIN!r} and {END!r}: add them")
    return before + block() + after


def _about(name: str) -> Iterator[str]:
    found = getattr(miles_like, name)
    yield from (f"### `miles_like.{name}`", "")
    if inspect.isclass(found):
        if name == "RunResult":
            yield from ("```python", f"{name}(run_dir)", "```", "")
        yield from _described(found.__doc__)
        yield from _members(found)
        return
    yield from ("```python", *_signature(name, inspect.signature(found)), "```", "")
    yield from _described(found.__doc__)


def _signature(name: str, signature: inspect.Signature) -> Iterator[str]:
    """One parameter a line, with the annotations as the source has them."""
    yield f"def {name}("
    keyword = False
    for one in signature.parameters.values():
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not keyword:
            yield "    *,"
            keyword = True
        yield f"    {_parameter(one)},"
    yield f") -> {signature.return_annotation}: ..."


def _parameter(one: inspect.Parameter) -> str:
    default = "" if one.default is inspect.Parameter.empty else f" = {one.default!r}".replace("'", '"')
    return f"{one.name}: {one.annotation}".replace("'", '"') + default


def _members(kind: type) -> Iterator[str]:
    """Public properties and methods that have a docstring, as a table."""
    rows = []
    for name, member in vars(kind).items():
        text = inspect.getdoc(member.fget if isinstance(member, property) else member)
        if name.startswith("_") or not text or not (isinstance(member, property) or inspect.isfunction(member)):
            continue
        call = "" if isinstance(member, property) else f"({', '.join(list(inspect.signature(member).parameters)[1:])})"
        rows.append(f"| `{name}{call}` | {' '.join(text.split())} |")
    if rows:
        yield from ("| member | value |", "|---|---|", *rows, "")


def _described(text: str | None) -> Iterator[str]:
    """Lines of Markdown of a docstring."""
    first, *sections = _SECTION.split(inspect.cleandoc(text or ""))
    for paragraph in first.strip().split("\n\n"):
        yield from (*textwrap.wrap(" ".join(paragraph.split()), 120), "")
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        body = textwrap.dedent(body).strip()
        _, *entries = _ENTRY.split(body)
        if title == "Args":
            yield from ("| argument | meaning |", "|---|---|")
            for names, about in zip(entries[::2], entries[1::2], strict=True):
                shown = ", ".join(f"`{name}`" for name in names.split(", "))
                yield f"| {shown} | {' '.join(about.split())} |".replace(" | None", r" \| None")
            yield ""
        else:
            if title == "Raises":
                body = re.sub(r"^(\w+):", r"`\1`:", body, flags=re.MULTILINE)
            yield from (*textwrap.wrap(f"{title}: {' '.join(body.split())}", 120), "")


def main() -> None:
    if "--write" in sys.argv[1:]:
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(block())


if __name__ == "__main__":
    main()
