"""Prompt files: json, jsonl and parquet, damaged and odd. Values of an accepted file are as they were written."""

from __future__ import annotations

import base64
import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.prompts.config import DataConfig
from rollout.prompts.mix import PromptSource
from tests.fuzz.commands import outcome_of
from tests.fuzz.mutate import changed, spoiled, value
from tests.fuzz.pool import Case, Outcome, long_tier

CASES = 500
SUFFIXES = (".json", ".jsonl", ".parquet")
ANSWERS = (
    *("5", "0.5", "1e3", "00012", "2020-01-01", "123456789012345678901234567890", "−5", "nan", "true", " 7 "),
    *(5, 0, -3, 10**20, True, 0.5, 1e20, 3.0, None),
)
NAMES = ("data", "a[b", "a*b", "a b", "ü", "a:b", "-x")


class Letters:
    """A tokenizer of one token a character."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [1 + ord(c) for c in text]

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(i - 1) for i in ids)

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return "".join(str(m["content"]) for m in messages)


def rows_of(rng: random.Random) -> list[Any]:
    rows: list[Any] = [
        {"prompt": f"{i} + 1 = ", "answer": rng.choice(ANSWERS), "id": f"r{i}"} for i in range(rng.choice((1, 2, 8)))
    ]
    if rng.random() < 0.3:
        rows = changed(rng, rows)
    if rng.random() < 0.1 and isinstance(rows, list):
        rows.append({"prompt": "one more", "answer": value(rng)})
    return rows


def draw(rng: random.Random) -> Case:
    suffix, rows = rng.choice(SUFFIXES), rows_of(rng)
    data = encoded(suffix, rows)
    plain = rng.random() < 0.6
    if not plain:
        data = spoiled(rng, data)
    if rng.random() < 0.05:
        depth = rng.choice((500, 100_000))
        data, plain = b'{"prompt": ' + b"[" * depth + b"]" * depth + b', "answer": "1"}', False
    kind = rng.choice(("file",) * 12 + ("fifo", "link", "directory"))
    return {
        "suffix": suffix,
        "name": rng.choice(NAMES),
        "kind": kind,
        "data": base64.b64encode(data).decode(),
        "rows": rows if plain and suffix != ".parquet" else None,
    }


def encoded(suffix: str, rows: Any) -> bytes:
    if suffix == ".jsonl" and isinstance(rows, list):
        return "".join(json.dumps(r) + "\n" for r in rows).encode()
    if suffix == ".parquet":
        try:
            out = pa.BufferOutputStream()
            pq.write_table(pa.Table.from_pylist(rows), out)
            return bytes(out.getvalue())
        except (pa.ArrowException, TypeError, AttributeError, ValueError, OverflowError, KeyError):
            pass
    return json.dumps(rows).encode()


def play(case: Case, folder: Path) -> Outcome:
    path = folder / f"{case['name']}{case['suffix']}"
    data = base64.b64decode(case["data"])
    if case["kind"] == "fifo":
        os.mkfifo(path)
    elif case["kind"] == "directory":
        path.mkdir()
    elif case["kind"] == "link":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(data)
    found: list[PromptSource] = []
    outcome = outcome_of(lambda: found.append(source(path)))
    if found and case["rows"] is not None and case["kind"] == "file":
        return as_written(found[0], case["rows"]) or outcome
    return outcome


def source(path: Path) -> PromptSource:
    tokenizer: Any = Letters()
    config = DataConfig(train=str(path), max_prompt_tokens=100_000)
    return PromptSource(config, tokenizer, str(path))


def as_written(source: PromptSource, rows: list[Any]) -> Outcome | None:
    """An answer that was text is that text, a whole number its digits."""
    answers = [p.answer for p in source.all()]
    wanted = [r.get("answer") if isinstance(r, dict) else None for r in rows]
    if len(answers) != len(wanted):
        return Outcome(kind="unsound", words=f"{len(rows)} rows gave {len(answers)} prompts")
    for answer, want in zip(answers, wanted, strict=True):
        text = want if isinstance(want, str) else json.dumps(want) if type(want) in (int, float) else None
        if text is not None and answer not in (text, text.strip()):
            return Outcome(kind="unsound", words=f"answer {want!r} arrives as {answer!r}")
    return None


def run(cases: int, seed: int) -> dict[str, float | int | str]:
    return long_tier("prompts", cases, seed)
