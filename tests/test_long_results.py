"""The page with the last run of the long tier keeps rows and failures of files that a run leaves out."""

from __future__ import annotations

from pathlib import Path

from tests.support.results import collected, kept, page, rows

JUNIT = """<testsuites><testsuite name="pytest" tests="4" time="9.5">
<testcase classname="tests.laws.test_kills" name="test_a[1]" time="1.5"/>
<testcase classname="tests.laws.test_kills" name="test_a[2]" time="2.0"><failure message="m">text</failure></testcase>
<testcase classname="tests.laws.test_kills.TestB" name="test_c" time="1"><skipped message="m"/></testcase>
<testcase classname="tests.e2e.test_demo" name="test_d" time="0.4"><error message="m"/></testcase>
</testsuite></testsuites>"""
COLLECTED = "tests/laws/test_kills.py: 4\ntests/laws/test_other.py: 2\ntests/e2e/test_demo.py: 1\n"


def test_a_run_of_a_part_replaces_the_rows_of_that_part(tmp_path: Path) -> None:
    junit = tmp_path / "long.xml"
    junit.write_text(JUNIT)
    found, failed = rows(junit, collected(COLLECTED), of="abc1234")
    by_file = {row.file: row for row in found}
    kills, demo = "tests/laws/test_kills.py", "tests/e2e/test_demo.py"
    assert by_file[kills][1:7] == ("3 of 4", "1", "0", "1", "4", "abc1234")  # another one has not run
    assert by_file[demo][1:7] == ("1", "0", "1", "0", "0", "abc1234")
    assert failed == [f"{kills}::test_a[2]", f"{demo}::test_d"]

    text = page(found, failed, ([], []))
    assert kept(text) == (sorted(found), failed)
    again = [by_file[kills]._replace(cases="4", failures="0", commit="def5678")]
    text = page(again, [], kept(text))
    assert kept(text) == ([by_file[demo], *again], [f"{demo}::test_d"])
    text = page([by_file[demo]._replace(errors="0")], [], kept(text))
    assert "Failed" not in text and text.startswith("# Last run of the long tier")
