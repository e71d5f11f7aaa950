"""Hooks of `make docs` (mkdocs.yml): pages that lie in the root, the list of recipes, and links that leave docs/.

A page links to files as they lie in the repository, so that its links work there and in an editor. In the site a link
to another page that the site has, such as CHANGELOG.md, is a link to that page; one to a source file is a
link to the repository that pyproject.toml names, or plain text where it names none.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from setup import LINK, repository

ROOT = Path(__file__).resolve().parents[2]
OF_ROOT = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}  # file -> page of the site
RECIPES = "RECIPES"  # in the navigation: all pages of docs/recipes


def on_config(config: Any) -> Any:
    """The navigation's recipes, by the files that are there."""
    pages = sorted(page.name for page in (ROOT / "docs" / "recipes").glob("*.md"))
    found = ["recipes/index.md", *(f"recipes/{name}" for name in pages if name != "index.md")]
    config.nav = _with(config.nav, found)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Pages of the repository's root, which other tools expect there."""
    from mkdocs.structure.files import File  # the optional extra `docs`

    for name, page in OF_ROOT.items():
        files.append(File.generated(config, page, content=in_site((ROOT / name).read_text("utf-8"), name, source())))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Of pages below docs/; the others are made by on_files."""
    uri = page.file.src_uri
    return markdown if uri in OF_ROOT.values() else in_site(markdown, f"docs/{uri}", source())


def in_site(text: str, path: str, url: str) -> str:
    """`text` of the file `path` with the links of its page in the site. path: from the root; url: of the repository's
    files, "" where there is none."""
    folder = posixpath.dirname(path)
    page = OF_ROOT.get(path, path.removeprefix("docs/"))

    def replaced(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        file, mark, anchor = target.partition("#")
        if not file or re.match(r"[a-z]+:", target):
            return match[0]
        there = posixpath.normpath(posixpath.join(folder, file))
        inside = OF_ROOT.get(there, there.removeprefix("docs/") if there.startswith("docs/") else "")
        if inside:
            back = posixpath.relpath(inside, posixpath.dirname(page) or ".")
            return f"{image}[{label}]({back}{mark}{anchor})"
        return f"[{label}]({url}/{there}{mark}{anchor})" if url else label

    return LINK.sub(replaced, text)


def source() -> str:
    """Where the repository's files are shown, or "" where pyproject.toml names no repository."""
    url = repository()
    return f"{url}/blob/main" if url else ""


def _with(entry: Any, recipes: list[str]) -> Any:
    if isinstance(entry, list):
        return [_with(one, recipes) for one in entry]
    if isinstance(entry, dict):
        return {title: _with(one, recipes) for title, one in entry.items()}
    return recipes if entry == RECIPES else entry
