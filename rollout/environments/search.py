"""Questions over a small corpus: the policy searches it, and answers.

    class Encyclopedia(Search):
        corpus = "corpus.jsonl"        # one document a line: {"title": "...", "text": "..."}

A turn has one `<search>words</search>` or ends the episode by `<answer>text</answer>`. The reward is 1 where the answer
is the prompt's, or one of the row's column `answers`, without regard to case, articles, punctuation and spaces, and
else 0: an answer that names several is none of them. Ranking is BM25 of SQLite's FTS5.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from miles_like.limits.regular_files import json_lines, read_text
from miles_like.types import Observation, Prompt, Sample
from rollout.environments.replies import Replies, tagged

CORPUS_BYTES = 1 << 30
_WORDS = re.compile(r"\w+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class Index:
    """Documents, by BM25. Equal ranks are in the order of the file."""

    def __init__(self, documents: Sequence[tuple[str, str]]) -> None:
        """documents: title and text of each."""
        self._lock = threading.Lock()
        self._base = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._base.execute("create virtual table documents using fts5(title, text)")
        except sqlite3.OperationalError as e:
            raise RuntimeError(f"this Python's SQLite {sqlite3.sqlite_version} has no FTS5 ({e}): use another") from e
        self._base.executemany("insert into documents values (?, ?)", documents)

    def search(self, words: str, n: int) -> list[tuple[str, str]]:
        """Title and text of the `n` best documents with one of the words."""
        terms = [f'"{word}"' for word in _WORDS.findall(words)[:32]]
        if not terms:
            return []
        query = "select title, text from documents where documents match ? order by bm25(documents), rowid limit ?"
        with self._lock:
            return list(self._base.execute(query, (" OR ".join(terms), n)))


@cache
def index_of(path: str) -> Index:
    """Raises ValueError for a file that is no corpus, with the line."""
    documents = []
    for i, line in enumerate(json_lines(read_text(Path(path), CORPUS_BYTES)), 1):
        row = json.loads(line)
        if not (isinstance(row, dict) and isinstance(row.get("title"), str) and isinstance(row.get("text"), str)):
            raise ValueError(f"{path}:{i} is {line[:80]!r}: expected an object with the texts title and text")
        documents.append((row["title"], row["text"]))
    return Index(documents)


class Search(Replies):
    """Protocol: MakeEnvironment; its instances are Environments."""

    corpus: ClassVar[str] = ""  # path of the corpus
    documents: ClassVar[int] = 3  # of an answer to a search
    characters: ClassVar[int] = 500  # of each document

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        if not self.corpus:
            raise ValueError(f"{type(self).__name__} has no corpus: derive a class with corpus = 'FILE.jsonl'")
        self._index = index_of(self.corpus)
        given = prompt.meta.get("answers")
        answers = given if isinstance(given, Sequence) and not isinstance(given, str) else [prompt.answer]
        # what has no letter or digit is no answer: all such texts have one normal form
        self._answers = {normal(str(one)) for one in answers if one is not None} - {""}
        if not self._answers:
            raise ValueError(f"prompt {prompt.id!r} has the answers {answers!r}: give one with a letter or a digit")
        self.searches = 0

    async def __call__(self, sample: Sample, turn: str) -> Observation:
        found = tagged(turn, "search", "answer")
        if found is None:
            return self.reply("Write <search>words</search>, or <answer>text</answer>.")
        if found[0] == "answer":
            return Observation(ends=True, reward=float(normal(found[1]) in self._answers))
        self.searches += 1
        hits = self._index.search(found[1], self.documents)
        shown = [f"{title}: {text[: self.characters]}" for title, text in hits]
        return self.reply("\n\n".join(shown) or "Nothing was found.")


def normal(text: str) -> str:
    """SQuAD's normal form of an answer: lower case, without punctuation, articles and further spaces. An answer of
    articles alone keeps them, such as the letter of a choice."""
    kept = "".join(c for c in text.lower() if c.isalnum() or c.isspace())
    return " ".join(_ARTICLES.sub(" ", kept).split()) or " ".join(kept.split())
