"""Prompts stay on disk: what is dealt is what a list of them would deal, and memory holds little of each.

Not covered: resident memory of pyarrow's buffers while a parquet file is read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import resource
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.types import Prompt
from rollout.prompts import ids, row_files, spool
from rollout.prompts.config import DataConfig
from rollout.prompts.dataset import read_rows
from rollout.prompts.ids import Ids
from rollout.prompts.mix import PromptSource
from rollout.prompts.row_files import json_rows
from rollout.prompts.spool import Joined, Selected, Spool
from tests.support.refusals import refuses

MOST = 200  # bytes of memory a prompt


class Bytes:
    """A tokenizer of one token a byte."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode()

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        return "".join(m["content"] for m in conversation)


def source(path: Path | str, **keys: Any) -> PromptSource:
    config = DataConfig(train=str(path), max_prompt_tokens=1 << 20, **keys)
    return PromptSource(config, Bytes(), str(path), seed=3)


def rows_of(n: int) -> Iterator[dict[str, Any]]:
    words = ["what", "a", "fast", "and", "small", "source", "of", "many", "prompts", "keeps", "of", "each"]
    for i in range(n):
        text = " ".join(words[(3 * i + j) % len(words)] for j in range(20))
        yield {"prompt": f"{text} {i}?", "answer": str(i), "level": i % 5, "extra_info": {"index": i}}


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_memory_of_a_prompt(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its peak too, while the file is read, whose rows have 250 bytes; verl's ids are compared with each other
    there. What does not grow with the rows is made small, so that few rows show the rest: benchmarks/scaling.py has
    the resident memory of many."""
    n, path = 2500, tmp_path / f"many.{kind}"
    lines = [json.dumps(row) for row in rows_of(n)]
    path.write_text("\n".join(lines) if kind == "jsonl" else f"[{','.join(lines)}]")
    monkeypatch.setattr(row_files, "_PIECE", 1 << 12)
    monkeypatch.setattr(spool, "_BUFFER", 1 << 12)
    source(path).take(1)  # what is imported and made once
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        made = source(path)
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(made) == n and (now - before) / n < MOST / 4
    assert (peak - before) / n < MOST, peak - before


def plain(rows: Sequence[dict[str, Any]], takes: int, seed: int) -> list[Prompt]:
    """A list of prompts, shuffled whole in each epoch."""
    prompts = [
        Prompt(
            id=str(row["id"]),
            token_ids=tuple(str(row["prompt"]).encode()),
            answer=str(row["answer"]),
            text=row["prompt"],
            meta={k: v for k, v in row.items() if k not in ("prompt", "id") and v is not None},
        )
        for row in rows
    ]
    out, epoch = list[Prompt](), 0
    while len(out) < takes:
        order = list(range(len(prompts)))
        random.Random(f"prompts {seed} {epoch}").shuffle(order)
        out += [prompts[i] for i in order]
        epoch += 1
    return out[:takes]


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40).filter(str.strip)
ROW = st.fixed_dictionaries({"prompt": TEXT, "answer": st.text("xyz0123", min_size=1), "level": st.integers(0, 9)})


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=12), piece=st.sampled_from([1, 50, 1 << 18]), indent=st.booleans())
def test_what_is_dealt_is_what_a_list_deals(
    rows: list[dict[str, Any]], piece: int, indent: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of every kind of file, however little of it is read at a time, over epochs."""
    folder = tmp_path_factory.mktemp("dealt")
    rows = [{"id": f"r{i}", **row} for i, row in enumerate(rows)]
    want = plain(rows, 2 * len(rows) + 1, seed=3)
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "a.json").write_text(json.dumps(rows, indent=2 if indent else None, ensure_ascii=indent))
    (folder / "b.json").write_text(" ".join(json.dumps(row, ensure_ascii=False) for row in rows))
    (folder / "b.jsonl").write_text(f"\n {json.dumps(rows)}")
    datasets.Dataset.from_list(rows).to_parquet(folder / "a.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_files, "_PIECE", piece)
        patch.setattr(spool, "_BUFFER", piece)
        for name in ("a.jsonl", "a.json", "b.json", "b.jsonl", "a.parquet"):
            made = source(folder / name)
            assert made.take(len(want)) == want, name
            assert [made.find(p.id) for p in want] == want
            made = source(folder / name, epochs=1)
            made.drop({"r0", "another"} if len(rows) > 1 else ())
            assert {p.id for p in made.take(99)} == {row["id"] for row in rows[len(rows) > 1 :]}


BROKEN = [
    *('[{"a": 1}\n{"a": 2}]', '[{"a": 1},\n]', '[{"a": 1}\n', "[\n", '[{"a": 1}]\n\n[]', '[{"ä": 1},\n {"a": }]'),
    *('{"a": 1} {"b": 2}\n {"a": 01}', '{"a": 1, "a": 2}', '[{"a": "\\ud83d"}]', "[1]", '{"a": "b', '[{"a": 1e999}]'),
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_fault_is_at_the_same_place_however_little_is_read_at_a_time(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line and column of the whole file, as the standard library counts them in it."""
    path, found = tmp_path / "a.json", list[str]()
    path.write_text(text)
    for piece in (1 << 18, 1, 3, 8):
        monkeypatch.setattr(row_files, "_PIECE", piece)
        with pytest.raises(ValueError) as caught:
            list(json_rows(path))
        found.append(str(caught.value))
    assert set(found) == {found[0]}


def test_text_that_is_not_utf8_is_at_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A character in two pieces is one, and a bad byte is counted from the file's begin, without its mark."""
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf" + f'{{"a": "a{"äß" * 3}'.encode() + b'\xff"}')
    for piece in (1 << 18, 4, 5, 6):
        monkeypatch.setattr(row_files, "_PIECE", piece)
        with refuses(ValueError, "UTF-8", "0xff", 20):
            list(json_rows(path))


def test_a_forked_process_may_write_the_items_too() -> None:
    """Both have those that were not written before the fork, and one position in the file. A copy of the descriptor
    stands for the other process."""
    spool: Spool[str] = Spool("prompts.jsonl")
    for i in range(9):
        spool.append(f"prompt {i}")
    with os.fdopen(os.dup(spool._descriptor), "wb") as other:
        other.write(spool._buffer)
    spool.append("prompt 9")
    assert list(spool) == [f"prompt {i}" for i in range(10)]


def test_another_process_does_not_get_the_file() -> None:
    """The number of a descriptor would stand for another file there."""
    with pytest.raises(TypeError, match="file of this process"):
        pickle.dumps(Spool("prompts.jsonl"))


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the folder and what to do; nothing is left there. A limit on the size of files stands for a full disk."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(3000)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with refuses(ValueError, path, folder, 1 << 16, "TMPDIR") as caught:
            source(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value) and not list(folder.iterdir())
    assert len(source(path)) == 3000 and not list(folder.iterdir())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with refuses(ValueError, path, tmp_path / "absent", 0, "TMPDIR") as caught:
        source(path)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOENT


def test_ids_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of a billion prompts may have it."""
    names = ["a", "b", "c", "b", "a"]
    monkeypatch.setattr(ids, "hash", lambda name: 5, raising=False)
    of = {n: Ids(np.full(n, 5), names.__getitem__) for n in (3, 4, 5)}
    assert [of[3].find(name) for name in "abcd"] == [0, 1, 2, None]
    assert {n: made.twice() for n, made in of.items()} == {3: None, 4: (1, 3), 5: (1, 3)}


def test_lazy_sequences_are_sequences() -> None:
    """As a list: places from either end, slices, and an end."""
    stored, items = Spool[int]("a.jsonl"), list(range(7))
    for i in items:
        stored.append(i)
    views: list[tuple[Any, list[int]]] = [
        (stored, items),
        (Selected(stored, [1, 3, 6]), [1, 3, 6]),
        (Joined([stored, [], Selected(stored, [2])]), [*items, 2]),
        (Joined([]), []),
    ]
    for view, want in views:
        assert list(view) == want and len(view) == len(want)
        assert [view[i] for i in range(-len(want), len(want))] == want * 2
        assert [list(view[a:b:c]) for a in (0, 2, -2) for b in (None, 4) for c in (1, 3, -1)] == [
            want[a:b:c] for a in (0, 2, -2) for b in (None, 4) for c in (1, 3, -1)
        ]
        for i in (len(want), -len(want) - 1):
            with pytest.raises(IndexError):
                view[i]


def test_the_hash_of_a_source_is_of_the_written_form_of_its_prompts(tmp_path: Path) -> None:
    """Checkpoints hold it, so it must not change: SHA-256 of Python's text of each prompt, one after the other."""
    rows = [
        {"id": "q'\"", "prompt": "x", "answer": "é\n", "extra": {"b": [1.5, None], "a": "\\"}},
        {"id": "r", "prompt": "a longer one", "answer": "2"},
    ]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    want = hashlib.sha256()
    for row in rows:
        meta = json.dumps({k: v for k, v in row.items() if k not in ("id", "prompt")}, sort_keys=True)
        want.update(repr((row["id"], row["answer"], tuple(str(row["prompt"]).encode()), "", meta)).encode())
    state: Any = source(path).state()
    assert state["sources"]["train"]["sha256"] == want.hexdigest()


def test_rows_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"a": 1.50}\n\n{"a": 2}\n')
    rows = read_rows(str(path))
    assert [str(row["a"]) for row in rows] == ["1.50", "2"] and rows[-1] == {"a": 2}
    assert rows.where(0) == f"{path}, line 2" and [place for place, _ in rows.placed()] == ["line 2", "line 4"]
    assert len(read_rows(str(path), limit=1)) == 1
