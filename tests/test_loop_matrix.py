"""The table of runs on stock SGLang (docs/engine.md, `make sglang-all`) holds every two values of two settings that a
configuration allows together.

Not covered: the runs themselves (tests/sglang_cpu/test_loop_on_stock_sglang.py); three values at a time.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from miles_like.config.load import load_config
from tests.support.covering import Row, all_rows, covering_rows, pairs_of
from tests.support.loop_matrix import FACTORS, allowed, in_flight, loop_settings, page, rows, settings

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "tiny_bf16.toml"
STOCK = ("parallel.dp=1", "parallel.ep=1", "rollout.engine=sglang")
OF_THE_LOOP = ("pause", "staleness", "partial", "over_sampling")


def test_every_pair_that_is_allowed_is_in_few_rows() -> None:
    pairs = {pair for row in all_rows(FACTORS, allowed) for pair in pairs_of(row)}
    covered = {pair for row in rows() for pair in pairs_of(row)}
    assert covered == pairs and all(map(allowed, rows()))
    values = [(name, value) for name, values in FACTORS.items() for value in values]
    apart = [p for p in itertools.combinations(values, 2) if p[0][0] != p[1][0] and p not in pairs]
    assert apart == [
        (("pause", "retract"), ("partial", True)),
        (("partial", True), ("over_sampling", False)),
    ]
    largest = sorted((len(values) for values in FACTORS.values()), reverse=True)
    assert len(rows()) <= max(8, largest[0] * largest[1])


@pytest.mark.parametrize("values", itertools.product(*(FACTORS[name] for name in OF_THE_LOOP)), ids=str)
def test_what_is_left_out_is_what_a_configuration_refuses(values: tuple[object, ...]) -> None:
    row: Row = {name: FACTORS[name][0] for name in FACTORS} | dict(zip(OF_THE_LOOP, values, strict=True))
    try:
        load_config(CONFIG, [*STOCK, *loop_settings(row)])
    except ValueError:
        taken = False
    else:
        taken = True
    assert taken is allowed(row)


def test_each_row_is_a_configuration_and_the_page_shows_it() -> None:
    for row in rows():
        config = load_config(CONFIG, [*STOCK, *settings(row)])
        assert config.in_flight_at_publication is in_flight(row)
    assert page() in (ROOT / "docs" / "engine.md").read_text()


def test_rows_of_another_table() -> None:
    """Three settings of two values need four rows; a value that nothing allows is in none."""
    factors = dict.fromkeys("abc", (0, 1))
    assert len(covering_rows(factors, lambda row: True)) == 4
    assert all(row["a"] == 0 for row in covering_rows(factors, lambda row: row["a"] == 0))
    assert len(covering_rows({"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1)}, lambda row: True)) == 9
