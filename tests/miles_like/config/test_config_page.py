"""docs/configuration_keys.md has every key of a run's configuration, as the classes of its sections define it.

Why it must hold: a key that no page names can be found only in the code. Not covered: whether a meaning is true.
"""

from __future__ import annotations

import re

import pytest

from miles_like.config.keys import comment
from miles_like.config.load import dotted_keys
from miles_like.config.run import RunConfig
from tests.support.config_page import BEGIN, END, PAGE, block, replaced
from tests.support.refusals import refuses

ROW = re.compile(r"^\| `([^`]+)` \| (.*) \| (.*) \| (.*) \|$", re.MULTILINE)


def test_the_page_is_as_generated() -> None:
    page = PAGE.read_text()
    assert replaced(page) == page, "write it again: python -m tests.support.config_page --write"


def test_every_key_has_one_row_with_type_and_meaning() -> None:
    rows = ROW.findall(PAGE.read_text())
    assert [key for key, *_ in rows] == list(dict.fromkeys(key for key, *_ in rows))
    assert {key for key, *_ in rows} == set(dotted_keys(RunConfig))
    empty = [key for key, *cells in rows if not all(cell.strip(" :") for cell in cells) or cells[-1].endswith(": ")]
    assert empty == [], "write a comment beside or above their fields"


@pytest.mark.parametrize(
    ("key", "cells"),
    [
        ("optimizer.clip_grad", ("number > 0", "`1.0`")),
        ("precision.format", ('`"nvfp4"`', '`"fp8"`')),  # an enumeration
        ("correction.kind", ('`"off"`, `"tis"`', '`"off"`')),
        ("algorithm.clip_high", ("number > 0", "`0.0004` with `loss` = `gspo`")),  # of several parts
        ("distillation.teachers.NAME.kind", ('`"server"`, `"weights"`, `"self"`', '`"server"`')),
        ("rollout.env", ("table of text", "`{}`")),
        ("precision.block", ("list of 2 integer", "not set")),
    ],
)
def test_a_row_has_the_type_and_the_default_of_its_field(key: str, cells: tuple[str, str]) -> None:
    (row,) = (row for row in ROW.findall(block()) if row[0] == key)
    assert cells[0] in row[1] and cells[1] in row[2]


# above it
class Documented:
    both: int = 0  # beside it
    # two lines
    # above it; None: no value
    above: int | None = None
    none: int = 0


def test_a_meaning_is_the_comment_beside_the_field_and_the_lines_directly_above_it() -> None:
    assert [comment(Documented, name) for name in ("both", "above", "none")] == [  # type: ignore[arg-type]
        "beside it",
        "two lines above it; not set: no value",
        "",
    ]


def test_what_is_around_the_block_stays() -> None:
    assert replaced(f"a\n{BEGIN}\nold\n{END}\nb\n") == f"a\n{block()}\nb\n"
    with refuses(ValueError, BEGIN, END):
        replaced("a page without markers")
