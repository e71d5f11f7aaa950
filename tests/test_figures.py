"""Figures in README and docs come from the scripts that measure them: each stands in a block that names its script, a
commit, a date and a machine (benchmarks/figures.py), and docs/benchmarks.md has none outside.

Not covered: whether a figure is still true.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.refusals import refuses

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"<!-- figures: (\S+) -->\n(.*?)<!-- end of figures -->", re.DOTALL)
FOUND = [(page, *m.groups()) for page in PAGES for m in BLOCK.finditer(page.read_text())]
FROM_ELSEWHERE = {  # their blocks are on other pages
    "algorithms.py",
    "staleness_study.py",
    "episode_study.py",
    "chains.py",
    "alignment.py",
    "gap_by_context.py",
    "demo.py",
    "plan_figures.py",
    "gpu_rates.py",
    "gpu_program.py",
    "tail_studies.py",
    "weight_sync_simulated.py",
}
PARTS = {
    "figures.py",
    "algorithms_report.py",
    "data_plane_workers.py",
    "long_tail.py",
    "transformers_step.py",
    "trl_side.py",
    "weight_receiver.py",
    "weight_slices.py",
}  # of scripts


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("page", "script", "body"), FOUND, ids=lambda v: v.name if isinstance(v, Path) else "")
def test_a_block_names_its_script_commit_date_and_command(page: Path, script: str, body: str) -> None:
    script, _, _ = script.partition(":")  # and the name of one of its blocks
    text = (ROOT / script).read_text()
    assert re.search(r"from (figures|algorithms_report) import", text), f"{page}: {script} does not write blocks"
    (line,) = (line for line in body.splitlines() if line.startswith("Commit "))
    assert re.match(r"Commit [0-9a-f]{7}[^,]*, 20\d\d-\d\d-\d\d[,:] \S", line), line
    assert re.search(rf"`python {re.escape(script)}[^`]*`|no device", line), line


def test_every_marker_is_of_a_whole_block_and_every_script_has_one() -> None:
    for page in PAGES:
        text = page.read_text()
        blocks = len(BLOCK.findall(text))
        assert text.count("<!-- figures:") == text.count("<!-- end of figures -->") == blocks, page
    scripts = {p.name for p in (ROOT / "benchmarks").glob("*.py")} - PARTS
    here = {Path(script).name for page, script, _ in FOUND if page.name == "benchmarks.md"}
    assert here == scripts - FROM_ELSEWHERE
    assert {"benchmarks/demo.py", "benchmarks/algorithms.py", "benchmarks/alignment.py"} < {
        script for _, script, _ in FOUND
    }


def test_the_page_of_benchmarks_has_no_figures_outside_its_blocks() -> None:
    prose = BLOCK.sub("", (ROOT / "docs" / "benchmarks.md").read_text())
    prose = re.sub(r"Goals?:.*?\.(?=\s)", "", prose, flags=re.DOTALL)  # what is wanted, not what was seen
    assert re.findall(r"\d+\.\d+|\d+ ?%|\b\d+ (?:s|ms|min|GB/s|tokens/s)\b", prose) == []


@pytest.mark.slow
def test_a_script_replaces_its_block_and_no_other(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"a\n{figures.begin('benchmarks/codec.py')}\nold 1.2\n{figures.END}\nb\n")
    monkeypatch.setattr(figures, "PAGE", page)
    script = str(ROOT / "benchmarks" / "codec.py")
    monkeypatch.setattr(sys, "argv", [script, "--quick"])
    figures.finish("codec", {"ratio": 3.14159, "n": 2}, {"ratio_min": 3.0}, True)
    assert "old 1.2" in page.read_text()
    monkeypatch.setattr(sys, "argv", [script, "--quick", "--write"])
    figures.finish("codec", {"ratio": 3.14159, "n": 2}, {"ratio_min": 3.0}, True)
    text = page.read_text()
    assert "old" not in text and text.startswith("a\n") and text.endswith(f"{figures.END}\nb\n")
    assert "| `ratio` | 3.142 | >= 3 |" in text and "| `n` | 2 |  |" in text
    assert re.search(r"^Commit [0-9a-f]{7}.*`python benchmarks/codec.py --quick --write`$", text, re.MULTILINE)
    assert capsys.readouterr().out.count('"name": "codec"') == 2
    with refuses(ValueError, "benchmarks/other.py"):
        figures.write_block(page, "benchmarks/other.py", [])
