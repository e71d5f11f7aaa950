"""The page with the last run of the long tier keeps the rows of folders that a run leaves out."""

from __future__ import annotations

from pathlib import Path

from tests.support.results import collected, kept, page, rows

JUNIT = """<testsuites><testsuite name="pytest" tests="4" time="9.5">
<testcase classname="tests.laws.test_kills" name="test_a[1]" time="1.5"/>
<testcase classname="tests.laws.test_kills" name="test_a[2]" time="2.0"><failure message="m">text</failure></testcase>
<testcase classname="tests.laws.test_kills.TestB" name="test_c" time="1"><skipped message="m"/></testcase>
<testcase classname="tests.e2e.test_demo" name="test_d" time="0.4"><error message="m"/></testcase>
</testsuite></testsuites>"""
COLLECTED = "tests/laws/test_kills.py: 3\ntests/laws/test_other.py: 2\ntests/e2e/test_demo.py: 1\n"


def test_a_run_of_a_part_replaces_the_rows_of_that_part(tmp_path: Path) -> None:
    junit = tmp_path / "long.xml"
    junit.write_text(JUNIT)
    found, failed = rows(junit, collected(COLLECTED), of="abc1234")
    by_folder = {row.folder: row for row in found}
    assert by_folder["tests/laws"][1:7] == ("3 of 5", "1", "0", "1", "4", "abc1234")  # another 2 have not run
    assert by_folder["tests/e2e"][1:7] == ("1", "0", "1", "0", "0", "abc1234")
    assert failed == ["tests/laws/test_kills.py::test_a[2]", "tests/e2e/test_demo.py::test_d"]

    text = page(found, [], failed)
    assert kept(text) == sorted(found)
    again = [by_folder["tests/laws"]._replace(cases="5", failures="0", commit="def5678")]
    text = page(again, kept(text), [])
    assert kept(text) == [by_folder["tests/e2e"], *again]
    assert "Failed" not in text and text.startswith("# Last run of the long tier")
