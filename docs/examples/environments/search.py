"""Questions over the documents of corpus.jsonl (docs/environments.md)."""

from __future__ import annotations

from pathlib import Path

from miles_like.protocols import MakeEnvironment
from rollout.environments.search import Search


class Bees(Search):
    corpus = str(Path(__file__).with_name("corpus.jsonl"))
    documents = 2


_: MakeEnvironment = Bees  # mypy holds it to its Protocol here
