"""The tables of docs/algorithms.md have every preset, advantage and loss once, and the parts that a preset has.

Why it must hold: what is missing there is not found, and a wrong part is another algorithm. Not covered: formulas,
which the tests of tests/miles_like/algorithms hold.
"""

from __future__ import annotations

import re

from miles_like.config.sections.algorithm import PRESETS, AlgorithmConfig, RolloutAlgorithm
from miles_like.config.sections.flat import names_of, parts_of, values
from tests.support.pages import ROOT

PAGE = (ROOT / "docs" / "algorithms.md").read_text("utf-8")


def rows(title: str) -> list[list[str]]:
    """Cells of the table below a heading."""
    text = re.split(r"^## ", PAGE.partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]
    return [[cell.strip() for cell in line.split(" | ")] for line in text.splitlines() if line.startswith('| `"')]


def named(title: str) -> list[str]:
    return [re.findall(r'"(\w+)"', row[0])[0] for row in rows(title)]


def test_every_preset_has_a_row_with_its_parts() -> None:
    assert named("Presets") == list(PRESETS)
    for name, (_, about, advantage, loss, aggregation, source) in zip(PRESETS, rows("Presets"), strict=True):
        keys = values(AlgorithmConfig(name=name))
        assert (advantage, loss, aggregation) == (keys["advantage"], keys["loss"], keys["aggregation"]), name
        assert about and source


def test_every_advantage_and_loss_has_a_row() -> None:
    parts = parts_of(RolloutAlgorithm)
    assert sorted(named("Advantages")) == sorted(names_of(parts["advantage"]))
    assert sorted(named("Losses")) == sorted(names_of(parts["loss"]))


def test_the_study_names_the_presets_that_it_has_not_run() -> None:
    page = (ROOT / "docs" / "studies" / "algorithms.md").read_text("utf-8")
    before, _, table = page.partition("<!-- figures")
    run = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    missing = set(PRESETS) - set(run)
    assert set(run) <= set(PRESETS) and missing == set(re.findall(r"`(\w+)`", before)) & set(PRESETS)
