"""Paths that the pages name exist in the tree.

Why it must hold: a page refers the reader to the test that proves a statement and to the file that implements it,
and those move without a compiler that follows. Not covered: files of a run and of other projects, paths without a
folder, docstrings.
"""

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOP = (
    "miles_like",
    "megatron_bridge",
    "rollout",
    "routing_replay",
    "quant",
    "scripts",
    "configs",
    "tests",
    "benchmarks",
    "docs",
)
OF_TESTS = ("laws", "e2e", "gpu", "fuzz", "support", "sglang_cpu", "vllm_cpu")  # a table of proofs leaves out `tests/`
CODE, LINK = re.compile(r"`([^`\n]+)`"), re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(rf"(?:{'|'.join((*TOP, *OF_TESTS))})/[\w./*{{}},-]*\.(?:py|toml|md)")
BRACES = re.compile(r"\{([^{}]*)\}")
EXAMPLES = {"megatron_bridge/families/mixtral.py"}  # files that a page tells the reader to write


def named(text: str) -> set[str]:
    """Paths in code spans that begin with a folder of the repository or of its tests, with braces expanded."""
    words = (word for span in CODE.findall(text) for word in span.split())
    paths = {word.partition("::")[0] for word in words}
    return {one for path in paths if PATH.fullmatch(path) for one in expanded(path)} - EXAMPLES


def expanded(path: str) -> list[str]:
    """`a_{b,c}.py` -> `a_b.py`, `a_c.py`."""
    choices = [part.split(",") for part in BRACES.findall(path)]
    return [BRACES.sub("{}", path).format(*chosen) for chosen in itertools.product(*choices)]


def exists(path: str) -> bool:
    """In the repository or below `tests/`; `*` and a placeholder such as NAME stand for any name."""
    if any((base / path).exists() for base in (ROOT, ROOT / "tests")):
        return True
    pattern = re.sub(r"\b[A-Z]+\b", "*", path)
    return "*" in pattern and any(next(base.glob(pattern), None) for base in (ROOT, ROOT / "tests"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_in_pages_exist(page: Path) -> None:
    """Code spans from the root or from `tests/`; links from the page's folder."""
    text = page.read_text()
    missing = sorted(path for path in named(text) if not exists(path))
    links = {link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)}
    missing += sorted(link for link in links if not (page.parent / link).exists())
    assert not missing, f"{page.relative_to(ROOT)} names paths that do not exist: {', '.join(missing)}"


def test_a_path_that_does_not_exist_is_found() -> None:
    text = "`tests/test_no.py` and `python configs/ti{ny,no}.toml`, `rollout/reward/mean`, `laws/*_no.py::test_x`"
    assert named(text) == {"tests/test_no.py", "configs/tiny.toml", "configs/tino.toml", "laws/*_no.py"}
    assert [path for path in sorted(named(text)) if exists(path)] == ["configs/tiny.toml"]
    assert exists("benchmarks/NAME.py") and exists("laws/test_nonfinite.py") and not exists("docs/NO/no.md")
