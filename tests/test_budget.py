"""The budget of the tests is held: what is over it is named with both numbers, and a new folder needs a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.budget import Budget, by_folder, file_of, grown, load, main, over, taken

JUNIT = """<testsuites><testsuite tests="3" time="7.5">
<testcase classname="tests.laws.test_kills" name="test_a[x]" time="4.0"/>
<testcase classname="tests.laws.test_kills.TestClass" name="test_b" time="1.5"/>
<testcase classname="tests.test_budget" name="test_c" time="0.5"/>
</testsuite></testsuites>"""
TESTS = Path(__file__).parent


def test_seconds_are_summed_by_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    found = taken([tmp_path / "junit.xml"] * 2)
    assert found.seconds == {"tests/laws/test_kills.py": 11.0, "tests/test_budget.py": 1.0}
    assert found.cases == {"tests/laws/test_kills.py": 4, "tests/test_budget.py": 2}
    assert by_folder(found.seconds) == {"tests/laws": 11.0, "tests": 1.0} and found.wall_s == 15.0


def budget(**values: Any) -> Budget:
    free = dict.fromkeys(("wall_s", "check_s", "ci_s", "baseline_s"), 99.0)
    free |= {"growth_s": 0.0, "factor": 1.0, "extra_s": 0.0}
    return Budget(**(free | values))


def test_what_is_over_the_budget_is_named(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    found = taken([tmp_path / "junit.xml"])
    fits = budget(seconds={"tests/laws": 4.0, "tests": 1.0}, wall_s=6.0, factor=1.25, extra_s=0.5)
    assert over(found, fits) == []
    tight = budget(seconds={"tests/laws": 3.0}, wall_s=5.0, factor=1.5)
    without, folder = over(found, tight)
    assert "tests " in without and "no line in budget.toml" in without
    assert "tests/laws took 6 s, its budget is 3 s, at most 4 s" in folder
    wide = {"tests/laws": 9.0, "tests": 1.0}
    (wall,) = over(found, budget(seconds=wide, wall_s=4.0))
    assert "the run took 8 s, its budget is 4 s" in wall
    assert over(found, budget(seconds=wide, check_s=4.0)) == []
    (check,) = over(found, budget(seconds=wide, check_s=3.0), check=True)
    assert "the run took 8 s, its budget is 3 s" in check


def test_the_whole_of_ci_has_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ci", str(load().ci_s)]) == 0
    assert main(["--ci", "99999"]) == 1
    assert "took 99999 s, its budget is 2400 s" in capsys.readouterr().err


def test_the_folders_grow_by_what_an_issue_may_add() -> None:
    seconds = {"tests/laws": 40.0, "tests": 21.0}
    assert grown(budget(seconds=seconds, baseline_s=1.0, growth_s=60.0)) == []
    (sentence,) = grown(budget(seconds=seconds, baseline_s=0.0, growth_s=60.0))
    assert "have 61 s" in sentence and "growth_s = 60 s" in sentence
    assert grown(load()) == []


def test_every_folder_with_tests_has_a_line_and_every_line_a_folder() -> None:
    files = [f for f in TESTS.rglob("test_*.py") if not {"sglang_cpu", "vllm_cpu"} & set(f.parts)]  # other targets
    folders = {f.parent.relative_to(TESTS.parent).as_posix() for f in files}
    assert set(load().seconds) == folders
    assert file_of("tests.rollout.wire.test_wire") == "tests/rollout/wire/test_wire.py"
