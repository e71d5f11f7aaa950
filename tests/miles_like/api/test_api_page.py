"""docs/python_api.md has every public function as its docstring and signature describe it, and code that is complete.

Why it must hold: the page is what a user of Python reads. Not covered: whether a description is true.
"""

from __future__ import annotations

import inspect
import re

import miles_like
from miles_like.config.load import load_config
from tests.support.api_page import BEGIN, END, PAGE, block, public, replaced
from tests.support.refusals import refuses

CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_the_page_is_as_generated() -> None:
    page = PAGE.read_text()
    assert replaced(page) == page, "write it again: python -m tests.support.api_page --write"


def test_every_parameter_is_described() -> None:
    for name in public():
        function = getattr(miles_like, name)
        if inspect.isfunction(function):
            described = re.findall(
                r"^ {8}(\w[\w, ]*): ", (function.__doc__ or "").partition("Returns:")[0], re.MULTILINE
            )
            assert [one for names in described for one in names.split(", ")] == [
                *inspect.signature(function).parameters
            ], name
            assert "Returns:" in function.__doc__ and "UserError: " in function.__doc__, name


def test_the_first_program_has_ten_lines_and_the_dict_is_a_configuration() -> None:
    first, config, *_ = CODE.findall(PAGE.read_text())
    assert len([line for line in first.splitlines() if line.strip()]) <= 10
    compile(first, "first", "exec")
    scope: dict[str, object] = {}
    exec(config, scope)
    assert load_config(scope["config"]).train.groups_per_step == 32  # type: ignore[arg-type]


def test_what_is_around_the_block_stays() -> None:
    assert replaced(f"a\n{BEGIN}\nold\n{END}\nb\n") == f"a\n{block()}\nb\n"
    with refuses(ValueError, BEGIN, END):
        replaced("a page without markers")
