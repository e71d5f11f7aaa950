"""Rows are written as they were read, and files appear whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.datasets.table import read_table
from miles_like.datasets.write import Outputs, json_text
from rollout.prompts.config import DataConfig
from rollout.prompts.dataset import read_rows
from tests.support.refusals import refuses

NUMBERS = st.sampled_from(["5", "0.50", "-0", "1e3", "5.0", "123456789012345678901", "1E-7"])  # as text of a file
SCALARS = st.one_of(
    st.none().map(json.dumps),
    st.booleans().map(json.dumps),
    NUMBERS,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6).map(json.dumps),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda v: "[" + ", ".join(v) + "]"),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(
            lambda v: "{" + ", ".join(f'"{k}": {x}' for k, x in v.items()) + "}"
        ),
    ),
    max_leaves=5,
)
ROWS = st.lists(st.fixed_dictionaries({"prompt": st.just('"p"'), "x": VALUES}), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_jsonl_keeps_every_value_with_its_digits(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    """As text, so 0.50 is not 0.5; json of the standard library reads the same values from both files."""
    where = tmp_path_factory.mktemp("rows")
    file, again = where / "a.jsonl", where / "b.jsonl"
    file.write_text("".join("{" + ", ".join(f'"{k}": {v}' for k, v in row.items()) + "}\n" for row in rows))
    with Outputs() as out:
        out.rows(again, list(read_rows(str(file))))
    a, b = (path.read_text(encoding="utf-8").split("\n")[:-1] for path in (file, again))
    assert [json.loads(line) for line in a] == [json.loads(line) for line in b]
    numbers = [[json.loads(line, parse_float=str, parse_int=str) for line in lines] for lines in (a, b)]
    assert numbers[0] == numbers[1]


@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_parquet_keeps_every_value_or_says_so(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    """A column of numbers of several forms is text, with a note; one that cannot be kept is refused, and no file is
    there."""
    where = tmp_path_factory.mktemp("rows")
    file, out_file = where / "a.jsonl", where / "b.parquet"
    file.write_text("".join("{" + ", ".join(f'"{k}": {v}' for k, v in row.items()) + "}\n" for row in rows))
    read = list(read_rows(str(file)))
    try:
        with Outputs() as out:
            out.rows(out_file, read)
    except ValueError as e:
        assert ".jsonl" in str(e) and not list(where.glob("b.parquet*"))
        return
    for old, new in zip(read, read_rows(str(out_file)), strict=True):
        if out.notes:
            assert new["x"] is None or isinstance(new["x"], str)
            assert new["x"] == (None if old["x"] is None else json_text(old["x"]).strip('"')) or isinstance(
                old["x"], str
            )
        else:
            assert without_nulls(new["x"]) == without_nulls(old["x"])


def without_nulls(value: Any) -> Any:
    """Parquet does not know which keys of an object were missing."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def test_from_parquet_to_parquet_columns_keep_their_types(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    columns = {
        "prompt": pa.array(["p", "q", "r"]),
        "x": pa.array([1, None, 3], pa.int16()),
        "y": pa.array([0.1, 0.2, 0.3], pa.float32()),
    }
    pq.write_table(pa.table(columns), file)
    with Outputs() as out:
        out.selected(tmp_path / "b.parquet", read_table(str(file), DataConfig(train="")), [2, 0])
    assert pq.read_table(tmp_path / "b.parquet").equals(pq.read_table(file).take([2, 0]))


def test_files_appear_together_or_not_at_all(tmp_path: Path) -> None:
    old = tmp_path / "old.jsonl"
    old.write_text("before")
    with pytest.raises(KeyError), Outputs() as out:
        out.rows(old, [{"a": 1}])
        out.rows(tmp_path / "new" / "b.jsonl", [{"a": 1}])
        assert old.read_text() == "before"
        raise KeyError
    assert [p.name for p in tmp_path.iterdir()] == ["old.jsonl"] and old.read_text() == "before"
    with refuses(ValueError, "c.csv", ".jsonl", ".parquet"), Outputs() as out:
        out.rows(old, [{"a": 1}])
        out.rows(tmp_path / "c.csv", [{"a": 1}])
    assert old.read_text() == "before"
    with refuses(ValueError, "d.parquet", "a"), Outputs() as out:
        out.rows(tmp_path / "d.parquet", [{"a": [1]}, {"a": "x"}])
    assert [p.name for p in tmp_path.iterdir()] == ["old.jsonl"]
