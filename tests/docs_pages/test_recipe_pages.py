"""docs/recipes has a page for each shipped configuration, and its figures are those of the plan.

Why it must hold: a reader rents GPUs by this page. The heads, the list and the page of configurations on CPU are made
again in every `make check`; plans of all configurations, whose tests are elsewhere, in `make test-all`.
"""

from __future__ import annotations

import pytest

from miles_like.config.load import load_config
from tests.support import recipe_pages
from tests.support.plans import path_of, shipped
from tests.support.recipe_pages import (
    CHAINS,
    CPU,
    END_OF_HEAD,
    FOLDER,
    INDEX,
    README,
    cpu_page,
    head,
    index,
    page,
    readme,
    twin,
)

RENEW = "python -m tests.support.recipe_pages --write"


def text(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text("utf-8")


@pytest.mark.parametrize("name", shipped())
def test_the_head_of_a_page_agrees_with_its_configuration(name: str) -> None:
    seen = text(name)
    assert seen.partition(END_OF_HEAD)[0] == f"{head(name)}\n", RENEW
    assert f"configs/cpu/{twin(name)}.toml" in seen and "Planned, not measured" in seen


def test_every_configuration_has_a_page() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {INDEX, CPU, *CHAINS, *shipped()}
    assert (text(INDEX), text(CPU)) == (index(), cpu_page()), RENEW


def test_a_page_of_another_layout_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed key of the configuration changes the head."""
    other = load_config(path_of("qwen3_4b"), ["parallel.tp=4", "parallel.dp=2"])
    monkeypatch.setattr(recipe_pages, "load_config", lambda path: other)
    assert "TP4 DP2" in head("qwen3_4b") and "TP4 DP2" not in text("qwen3_4b")


def test_the_readme_has_the_figures_of_the_pages() -> None:
    seen = README.read_text("utf-8")
    assert seen == readme(seen), RENEW


@pytest.mark.slow
@pytest.mark.long(beside="tests/docs_pages/test_recipe_pages.py")
@pytest.mark.parametrize("name", shipped())
def test_the_figures_of_a_page_are_those_of_the_plan(name: str) -> None:
    assert text(name) == page(name), RENEW
