"""Links between pages lead to a page and a heading that exist, and the site's navigation has every page once.

Why it must hold: a renamed heading breaks every link to it, in the repository and in the site, without a word. Not
covered: links to other hosts; the site's build (make docs).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from setup import described, repository
from tests.support import docs_site
from tests.support.pages import OF_ROOT, PAGES, ROOT, anchors, links, prose, slug


def broken(page: Path, targets: list[str]) -> Iterator[str]:
    for target in targets:
        if ":" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        if not there.exists():
            yield f"{target}: no such file"
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            yield f"{target}: no heading, or several"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert list(broken(page, links(page))) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# A\n## `[b]`: one, two\n## C\n## C\n[x](a.md#b-one-two) [y](no.md) [z](#c) `[w](v.md)` [q](#a)\n")
    assert list(broken(page, links(page))) == ["no.md: no such file", "#c: no heading, or several"]
    assert slug("What [it](x.md) costs, `[a.b]`") == "what-it-costs-ab"


def named(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for one in entry.values() if isinstance(entry, dict) else entry:
            yield from named(one)


def test_the_navigation_has_every_page_once() -> None:
    """Pages of docs/, those of the repository's root that the site has, and all recipes."""
    site = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader=yaml.BaseLoader)
    config = type("Config", (), {"nav": site["nav"]})()
    found = Counter(named(docs_site.on_config(config).nav))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent != ROOT}
    assert found == Counter(dict.fromkeys(pages | set(docs_site.OF_ROOT.values()), 1))
    assert site["plugins"] == ["search"] and set(docs_site.OF_ROOT) < set(OF_ROOT)
    assert set(site["validation"].values()) == {"warn"}


def test_the_site_rewrites_links_that_leave_its_pages() -> None:
    """A page of the root to its page of the site, a source file to the repository, or to plain text without one."""
    text = "[a](../CONTRIBUTING.md#tests) [b](../../scripts/x.py) [c](sub.md#d) ![e](../images/e.png) [f](https://g.h)"
    seen = docs_site.in_site(text, "docs/start/page.md", "https://host/blob/main")
    assert "[b](https://host/blob/main/scripts/x.py)" in seen and "[c](sub.md#d)" in seen
    assert "![e](../images/e.png)" in seen and "[f](https://g.h)" in seen
    assert "[a](../CONTRIBUTING.md#tests)" in seen  # docs/CONTRIBUTING.md, of which the site's build warns
    assert docs_site.in_site("[a](../../CONTRIBUTING.md#t) [b](../../x.py)", "docs/start/page.md", "") == (
        "[a](../contributing.md#t) b"
    )
    assert docs_site.in_site("[a](docs/plan.md#b)", "CHANGELOG.md", "") == "[a](plan.md#b)"


def test_the_package_s_page_has_absolute_links_alone() -> None:
    """To the repository, or as plain text without one."""
    text = "![p](docs/p.png) [`a[0]`](docs/a.md#b) [c](#c) [d](https://e.f)"
    assert described(text, "https://host/us") == (
        "![p](https://host/us/raw/main/docs/p.png) [`a[0]`](https://host/us/blob/main/docs/a.md#b) "
        "[c](https://host/us#c) [d](https://e.f)"
    )
    assert described(text, "") == " `a[0]` c [d](https://e.f)"
    readme = (ROOT / "README.md").read_text("utf-8")
    seen = described(readme, "https://host/us")
    assert seen.count("](https://host/us/") == readme.count("](docs/") + readme.count("](CONTRIBUTING.md") > 30
    assert "](docs/" in readme and docs_site.source() == (f"{repository()}/blob/main" if repository() else "")


def test_the_readme_is_read_in_three_minutes() -> None:
    """Words without links' targets, marks of tables and comments."""
    text = re.sub(r"<!--.*?-->|\]\([^)]*\)|[|`#*]", " ", (ROOT / "README.md").read_text("utf-8"))
    assert len(text.split()) <= 650


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_have_a_head(page: Path) -> None:
    """The site shows a table whose head is empty as lines of text."""
    assert re.findall(r"^\|(?: *\|)+$", prose(page), re.MULTILINE) == []
