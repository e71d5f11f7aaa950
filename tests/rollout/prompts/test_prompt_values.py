"""Values of prompt files arrive as the file writes them, or are rejected in one sentence that names the place.

Compared with the text that was written, and for whole files with orjson and pyarrow. Not covered: datasets of the hub,
whose columns the library `datasets` types.
"""

from __future__ import annotations

import datetime
import json
import os
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rollout.prompts.config import DataConfig
from rollout.prompts.dataset import read_rows
from rollout.prompts.mix import PromptSource
from rollout.prompts.values import WrittenFloat
from tests.support.refusals import Facts, refuses

TINY = Path(__file__).parents[3] / "configs" / "tiny"
TOKENIZER = AutoTokenizer.from_pretrained(TINY)


def answers(path: Path) -> list[str]:
    return [p.answer for p in PromptSource(DataConfig(train=str(path)), TOKENIZER).all()]


def written(folder: Path, values: list[str], kind: str) -> Path:
    """A file whose answers are this JSON text."""
    rows = [f'{{"id": "{i}", "prompt": "{i}+1=", "answer": {value}}}' for i, value in enumerate(values)]
    path = folder / f"rows.{kind}"
    path.write_text("\n".join(rows) if kind == "jsonl" else f"[{', '.join(rows)}]")
    return path


AS_WRITTEN = ["5", "0.5", "12345678901234567890123", "1" * 4000, "1e3", "0.50", "-0", "-0.0", "1E+2", "true"]
AS_WRITTEN += ["0.1234567890123456789012345", "100000000000000000000.0", "9007199254740993"]
QUOTED = ["2020-01-01", "2020-01-01 10:00:00", "5.0", "05", "1e400", "NaN", "x \u2028 y"]


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_answers_are_the_text_of_the_file(kind: str, tmp_path: Path) -> None:
    """Whatever the other rows hold: one row of 0.5 makes no 5.0 of a 5, a time beside a date no midnight."""
    path = written(tmp_path, [*AS_WRITTEN, *map(json.dumps, QUOTED)], kind)
    assert answers(path) == [*AS_WRITTEN, *QUOTED]


NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?", fullmatch=True)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_every_number_of_the_grammar(tmp_path_factory: pytest.TempPathFactory, values: list[str]) -> None:
    path = written(tmp_path_factory.mktemp("numbers"), values, "jsonl")
    assert answers(path) == values
    for row, value in zip(read_rows(str(path)), values, strict=True):
        assert row["answer"] == json.loads(value)


def test_a_written_float_is_a_float(tmp_path: Path) -> None:
    x = WrittenFloat("0.50")
    assert (str(x), f"{x}", x, x + 1, json.dumps(x)) == ("0.50", "0.50", 0.5, 1.5, "0.5")
    assert str(pickle.loads(pickle.dumps(x))) == "0.50"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=3),
    max_leaves=10,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.text(), VALUES, min_size=1, max_size=4), min_size=1, max_size=4))
def test_files_hold_what_orjson_reads(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    """Lists, lines, lines that end with CR LF and indented lists, with and without a byte order mark."""
    folder = tmp_path_factory.mktemp("values")
    lines = [json.dumps(row) for row in rows]
    files = {
        "list.json": json.dumps(rows).encode(),
        "indented.json": b"\xef\xbb\xbf" + json.dumps(rows, indent=1, ensure_ascii=False).encode(),
        "lines.jsonl": "\n\n".join(lines).encode(),
        "crlf.jsonl": b"\xef\xbb\xbf" + "\r\n".join([*lines, ""]).encode(),
        "listed.jsonl": b"\n" + json.dumps(rows, indent=1).encode(),
        "concatenated.json": json.dumps(rows[0], indent=1).encode() + "".join(lines[1:]).encode(),
    }
    for name, text in files.items():
        (folder / name).write_bytes(text)
        assert list(read_rows(str(folder / name))) == [orjson.loads(line) for line in lines], name


def test_a_parquet_columns_type_is_how_its_values_are_written(tmp_path: Path) -> None:
    columns = {
        "int64": (pa.array([5, 7]), ["5", "7"]),
        "uint64": (pa.array([2**64 - 1, 1], pa.uint64()), [str(2**64 - 1), "1"]),
        "double": (pa.array([5.0, 0.5]), ["5.0", "0.5"]),
        "float": (pa.array([0.1, 5], pa.float32()), ["0.1", "5.0"]),
        "whole float": (pa.array([16777215, -0.0], pa.float32()), ["16777215.0", "-0.0"]),
        "half": (pa.array(np.array([65504, 0.1], np.float16)), ["65504.0", "0.1"]),
        "microseconds": (pa.array([1000, 2_000_000_000], pa.time64("ns")), ["00:00:00.000001", "00:00:02"]),
        "decimal": (pa.array([Decimal("1.50"), Decimal("1000.00")]), ["1.50", "1000.00"]),
        "date": (pa.array([datetime.date(2020, 1, 1)] * 2), ["2020-01-01"] * 2),
        "text": (pa.array(["05", "1e400"]), ["05", "1e400"]),
        "bool": (pa.array([True, False]), ["true", "false"]),
    }
    for name, (values, want) in columns.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"prompt": ["0+1=", "1+1="], "answer": values}), path)
        assert answers(path) == want, name
        assert [r["prompt"] for r in read_rows(str(path))] == ["0+1=", "1+1="]
    mapped = pa.array([[("truth", 0.1)]], pa.map_(pa.string(), pa.float32()))
    pq.write_table(pa.table({"prompt": ["0+1="], "scores": mapped}), tmp_path / "mapped.parquet")
    (row,) = read_rows(str(tmp_path / "mapped.parquet"))
    assert row["scores"] == [("truth", WrittenFloat("0.1"))]
    pq.write_table(pa.table({"prompt": ["0+1="], "answer": pa.array([1], pa.time64("ns"))}), tmp_path / "ns.parquet")
    with refuses(ValueError, "ns.parquet", "time64", "[ns]", 1):
        read_rows(str(tmp_path / "ns.parquet"))
    nested = pa.array([{"truth": [0.1]}], pa.struct([("truth", pa.list_(pa.float32()))]))
    pq.write_table(pa.table({"prompt": ["0+1="], "reward_model": nested}), tmp_path / "nested.parquet")
    (row,) = read_rows(str(tmp_path / "nested.parquet"))
    assert row == {"prompt": "0+1=", "reward_model": {"truth": [WrittenFloat("0.1")]}}
    assert str(row["reward_model"]["truth"][0]) == "0.1"


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ('{"prompt": "0+1=", "answer": NaN}', (2, "NaN", "JSON")),
        ('{"prompt": "0+1=", "answer": -Infinity}', (2, "JSON")),
        ('{"prompt": "0+1=", "answer": 1e999}', (2, "1e999", "64-bit")),
        ('{"prompt": "0+1=", "answer": ' + "1" * 5000 + "}", (2, 5000, 4300)),
        ('{"prompt": "0+1=", "answer": {"a": 1}}', (2, "answer", "a", 1)),
        ('{"prompt": "0+1=", "answer": [1]}', (2, "answer", "[1]")),
        ('{"id": [7], "prompt": "0+1=", "answer": 1}', (2, "id", "[7]")),
        ('{"source": {}, "data_source": {"a": 1}, "prompt": "0+1="}', (2, "data_source")),
        ('{"prompt": {"text": "0+1="}, "answer": 1}', (2, "text", "0+1=")),
        ('{"prompt": "0+1="', (2, "JSON", ",", 18)),
        ('{"prompt": "0+1="} x', (2, "JSON", 19)),
        ('{"prompt": "0+1=", "answer": 01}', (2, "JSON")),
        ("5", (2,)),
        ('{"answer": 1, "answer": 2}', (2, "answer")),
        ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", (2, 64)),
        ('{"prompt": ' + "[" * 70 + "]" * 70 + "}", (2, 64)),
        ('{"a": ' * 100_000 + "1" + "}" * 100_000, (2, 64)),
        ('{"prompt": "\\ud83d"}', (2,)),
        ('{"prompt": "a\\u0000\tb"}', (2, "JSON")),
        ("\x00" * 3, (2, "JSON")),
    ],
)
def test_what_is_rejected_names_its_line(text: str, facts: Facts, tmp_path: Path) -> None:
    """Counted from 1, as editors count; the same text in a list names row 2."""
    first = '{"prompt": "7+1=", "answer": "8"}'
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{first}\n{text}\n{first}")
    listed = tmp_path / "list.json"
    listed.write_text(f"[{first},\n{text}]")
    for file in (path, listed):
        with refuses(ValueError, file, *(facts if file is path else ())) as caught:
            PromptSource(DataConfig(train=str(file)), TOKENIZER)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_lines_are_counted_with_blank_ones(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n\n{"prompt": "0+1="}\n\r\n{"prompt": ""}')
    with refuses(ValueError, "rows.jsonl", 5):
        PromptSource(DataConfig(train=str(path)), TOKENIZER)
    path.write_bytes(b'{"prompt": "0+1="}\n{"prompt": "\xff"}')
    with refuses(ValueError, "rows.jsonl", 2, "UTF-8", "0xff", 12):
        read_rows(str(path))
    broken = tmp_path / "rows.json"
    for text, facts in (
        ('[\n{"a": 1}\n{"a": 2}]', (3, 1)),
        ('[{"a": 1},\n]', (2, "JSON", 1)),
        ('[{"a": 1}\n', (2, 1)),
        ("[\n", (2,)),
        ('[{"a": 1}]\n[]', (1,)),
        ('[{"a": 1},\n {"a": }]', (2, "JSON", 8)),
    ):
        broken.write_text(text)
        with refuses(ValueError, broken, *facts):
            read_rows(str(broken))


def test_messages_that_are_no_objects_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for messages in (["hello"], [["user", "1+1="]], [None], "1+1=", [{"role": "user", "content": 5}]):
        path.write_text(json.dumps({"messages": messages, "answer": "2"}))
        if isinstance(messages, str):
            assert len(PromptSource(DataConfig(train=str(path)), TOKENIZER)) == 1
            continue
        with refuses(ValueError, "rows.jsonl", 1):
            PromptSource(DataConfig(train=str(path)), TOKENIZER)


def test_odd_paths_are_paths(tmp_path: Path) -> None:
    """Brackets, stars and question marks are patterns to other readers; a FIFO would be waited for without end."""
    for name in ("a[1].jsonl", "b*?.jsonl", "c d:e.jsonl", "{f}.jsonl"):
        (tmp_path / name).write_text('{"prompt": "0+1=", "answer": 1}')
        assert answers(tmp_path / name) == ["1"]
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "zero"):
        with refuses(ValueError, f"{name}.jsonl"):
            read_rows(str(tmp_path / f"{name}.jsonl"))


def test_columns_that_have_no_json_form_are_rejected(tmp_path: Path) -> None:
    """Reward functions and servers get the other columns as JSON: bytes were Python's repr there, NaN an error in the
    middle of the run."""
    path = tmp_path / "rows.parquet"
    for value, fact in ((b"png", "b'png'"), (float("nan"), "nan"), ({"x": [float("inf")]}, "inf")):
        pq.write_table(pa.table({"prompt": ["0+1="], "extra": [value]}), path)
        with refuses(ValueError, path, 1, "extra", fact):
            PromptSource(DataConfig(train=str(path)), TOKENIZER)


def test_damaged_parquet_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": [f"{i}+1=" for i in range(200)]}), path)
    whole = path.read_bytes()
    for damaged in (
        b"PAR1",
        whole[:-9],
        whole[: len(whole) // 2],
        b"\0" * len(whole),
        whole.replace(b"prompt", b"\xff" * 6),
    ):
        path.write_bytes(damaged)
        with refuses(ValueError, path) as caught:
            PromptSource(DataConfig(train=str(path)), TOKENIZER)
        assert "\n" not in str(caught.value)
    path.write_bytes(whole)
    assert len(PromptSource(DataConfig(train=str(path)), TOKENIZER)) == 200
