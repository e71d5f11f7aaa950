"""The package's description, which an index shows outside of the repository: README with absolute links.

All other metadata is in pyproject.toml. README links to files as they lie in the repository; a description keeps only
links that name a host. They become links to the repository that pyproject.toml names as `project.urls.Repository`;
where it names none, a link becomes its text, and an image is left out.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")  # ("!" of an image, text, target)


def repository() -> str:
    """URL of the project's repository, or "" where pyproject.toml names none."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"].get("urls", {})
    return str(urls.get("Repository", "")).rstrip("/")


def described(text: str, url: str) -> str:
    """`text` of README.md with absolute links. url: of the repository, "" where there is none."""

    def replaced(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        if not url:
            return "" if image else label
        page = f"{url}/{'raw' if image else 'blob'}/main"
        return f"{image}[{label}]({url if target.startswith('#') else page + '/'}{target})"

    return LINK.sub(replaced, text)


if __name__ == "__main__":
    from setuptools import setup

    setup(
        long_description=described((ROOT / "README.md").read_text("utf-8"), repository()),
        long_description_content_type="text/markdown",
    )
