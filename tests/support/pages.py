"""README and the pages of docs/: their blocks of code, headings and links."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_ROOT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
PAGES = [*(ROOT / name for name in OF_ROOT), *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(.*)$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_KEY = re.compile(r"^\| `([a-z0-9_]+(?:\.[A-Za-z0-9_]+)*)` \|", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """Code of a page. info: what stands after the fence, "" of an indented block."""

    page: Path
    line: int
    info: str
    text: str

    @property
    def language(self) -> str:
        return self.info.split(" ")[0]

    @property
    def title(self) -> str:
        found = re.search(r'title="([^"]+)"', self.info)
        return found[1] if found else ""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@functools.cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Fenced blocks, and indented ones outside of lists, in their order."""
    return tuple(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    inside: list[str] | None = None
    info, begun, indented = "", 0, list[str]()
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if inside is not None:
            if fence:
                yield Block(page, begun, info, "\n".join(inside) + "\n")
                inside = None
            else:
                inside.append(line)
            continue
        if line.startswith("    ") or (indented and not line.strip()):
            indented.append(line.removeprefix("    "))
            continue
        if indented:
            yield Block(page, number - len(indented), "", "\n".join(indented).rstrip() + "\n")
            indented = []
        if fence:
            inside, info, begun = [], fence[1].strip(), number


def commands(text: str) -> Iterator[str]:
    """`miles-like ...` of a block, continued lines joined, comments and the brackets of a synopsis removed."""
    for line in text.replace("\\\n", " ").splitlines():
        for one in re.split(r"\s{2,}(?=miles-like )", line.strip()):
            if one.startswith("miles-like "):
                one = re.sub(r"\s#.*$", "", one)
                one = re.sub(r"\.\.\.|\s[&>].*$", " ", one)
                yield re.sub(r"[\[\]]|\s\\?\|\s", " ", one)


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """Targets of links and images in the prose, without code spans."""
    return _LINK.findall(re.sub(r"`[^`\n]*`", "`", prose(page)))


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """Of the headings, as GitHub makes them."""
    found = Counter(slug(text) for text in re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE))
    return frozenset(name for name, n in found.items() if n == 1)


def slug(heading: str) -> str:
    """`## What it costs, [and why](x.md)` -> `what-it-costs-and-why`."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@functools.cache
def keys() -> frozenset[str]:
    """All configuration keys, as docs/configuration_keys.md has them: NAME stands for any name."""
    return frozenset(_KEY.findall((ROOT / "docs" / "configuration_keys.md").read_text("utf-8")))


@functools.cache
def sections() -> frozenset[str]:
    """Dotted names of sections."""
    return frozenset(".".join(key.split(".")[:n]) for key in keys() for n in range(1, key.count(".") + 1))


def is_key(name: str) -> bool:
    """Whether a key, a section or an entry of a table has this dotted name."""
    known = keys() | sections()
    if name in known:
        return True
    parts = name.split(".")
    tables = {"cluster.env", "rollout.env", "reward.parts", "reward.args", "reward.format.patterns"}
    if any(".".join(parts[:n]) in tables for n in range(1, len(parts))):
        return True
    return any(".".join([*parts[:n], "NAME", *parts[n + 1 :]]) in known for n in range(1, len(parts)))
