"""The tables of other projects' keys name fields of the versions that the page cites.

Why it must hold: a reader looks for the key that the other configuration has. TRL's and megatron-core's are compared
with the installed sources, which are the cited versions. Not covered: verl, slime and Miles, whose sources are not
installed; that the keys of this project exist (test_docs_snippets.py), or do the same.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "start" / "coming_from.md").read_text("utf-8")
SOURCES = {
    "TRL": ("trl", ("trainer/grpo_config.py", "trainer/base_config.py")),
    "Megatron": (
        "megatron.core",
        (
            "model_parallel_config.py",
            "transformer/transformer_config.py",
            "optimizer/optimizer_config.py",
            "distributed/distributed_data_parallel_config.py",
        ),
    ),
}


def section(title: str) -> str:
    return PAGE[PAGE.index(f"\n## {title}\n") :].split("\n## ")[1]


def names(title: str) -> set[str]:
    """In the first cells of a section's rows."""
    rows = re.findall(r"^\| (`[^|]*) \|", section(title), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def fields(title: str) -> Iterator[str]:
    package, files = SOURCES[title]
    root, _, inner = package.partition(".")
    spec = importlib.util.find_spec(root)
    assert spec is not None and spec.submodule_search_locations
    for file in files:
        for node in ast.walk(ast.parse((Path(spec.submodule_search_locations[0]) / inner / file).read_text("utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id


@pytest.mark.parametrize("title", SOURCES)
def test_fields_exist_in_the_cited_version(title: str) -> None:
    installed = {"TRL": version("trl"), "Megatron": version("megatron-core")}[title]
    assert f" {installed}" in section(title).replace("\n", " ")
    assert len(names(title)) > 20 and names(title) - set(fields(title)) == set()


def test_every_project_has_its_table() -> None:
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == ["verl", "slime and Miles", "TRL", "Megatron"]
    flags = names("slime and Miles")
    assert flags and all(re.fullmatch(r"--[a-z0-9-]+\*?", flag) for flag in flags)
