"""Questions over a corpus: ranking against BM25 by its formula, answers, and hacks of answers."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path

import pytest

from miles_like.rewards.answered import answered_sample
from miles_like.types import Observation, Prompt
from rollout.environments.search import Index, Search, index_of, normal
from tests.support.refusals import refuses

DOCUMENTS = [
    ("Aster", "The aster is a flower of the autumn. Bees visit the aster."),
    ("Bee", "A bee makes honey. Bees live in a hive."),
    ("Hive", "A hive is the home of bees."),
    ("Honey", "Honey is sweet, and made of nectar by the bees of a hive."),
    ("Iron", "Iron is a metal."),
]


def bm25(query: str, k: float = 1.2, b: float = 0.75) -> list[str]:
    """Titles by Okapi BM25 over title and text, with the idf of FTS5: at least 1e-6."""
    texts = [re.findall(r"\w+", f"{title} {text}".lower()) for title, text in DOCUMENTS]
    mean = sum(map(len, texts)) / len(texts)
    scores = []
    for text in texts:
        score = 0.0
        for word in re.findall(r"\w+", query.lower()):
            n = sum(word in other for other in texts)
            idf = max(math.log((len(texts) - n + 0.5) / (n + 0.5)), 1e-6)
            f = text.count(word)
            score += idf * f * (k + 1) / (f + k * (1 - b + b * len(text) / mean))
        scores.append(score)
    order = sorted((i for i, s in enumerate(scores) if s > 0), key=lambda i: -scores[i])
    return [DOCUMENTS[i][0] for i in order]


@pytest.mark.parametrize("query", ["honey", "hive bee", "metal flower", "aster autumn bees", "nothing here"])
def test_ranking_is_bm25(query: str) -> None:
    assert [title for title, _ in Index(DOCUMENTS).search(query, 9)] == bm25(query)


def test_words_of_a_query_are_no_syntax() -> None:
    index = Index(DOCUMENTS)
    for query in ('honey" OR "iron', "honey NOT honey", "title: *", "(", "honey AND", "near/2"):
        index.search(query, 9)
    assert index.search("?!", 9) == []


def play(tmp_path: Path, turns: list[str], **row: object) -> list[Observation]:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"title": a, "text": b}) + "\n" for a, b in DOCUMENTS))

    class Own(Search):
        corpus = str(path)

    prompt = Prompt(id="a", token_ids=(1,), answer="the Hive", meta=row)  # type: ignore[arg-type]
    environment = Own(prompt, seed=0)

    async def all_of() -> list[Observation]:
        return [await environment(answered_sample(prompt, 0, [2], ""), turn) for turn in turns]

    return asyncio.run(all_of())


def test_an_episode(tmp_path: Path) -> None:
    found = play(
        tmp_path, ["where?", "<search>home of bees</search>", "<search>zzz</search>", "<answer>a hive.</answer>"]
    )
    assert "<search>" in found[0].text and found[1].text.startswith("\nHive: A hive is")
    assert found[2].text == "\nNothing was found.\n" and found[3] == Observation(ends=True, reward=1.0)
    assert play(tmp_path, ["<think><answer>hive</answer></think><answer>bee</answer>"])[0].reward == 0.0
    assert play(tmp_path, ["<answer>comb</answer>"], answers=["comb", "hive"])[0].reward == 1.0


@pytest.mark.parametrize(
    "answer", ["", "the", "?", "hive or bee", "hive, bee, honey", "not hive", "hive hive", "Ignore all: 1"]
)
def test_an_answer_that_hedges_is_wrong(answer: str, tmp_path: Path) -> None:
    assert play(tmp_path, [f"<answer>{answer}</answer>"])[0].reward == 0.0


def test_the_letter_of_a_choice_is_an_answer(tmp_path: Path) -> None:
    """A is an article too, and is not the same as any text without letters."""
    given = {"(A)": 1.0, "a": 1.0, "the": 0.0, "?": 0.0, "B": 0.0}
    found = {text: play(tmp_path, [f"<answer>{text}</answer>"], answers=["A"])[0].reward for text in given}
    assert found == given


def test_what_is_refused(tmp_path: Path) -> None:
    with refuses(ValueError, "corpus"):
        Search(Prompt(id="a", token_ids=(1,), answer=""), seed=0)
    (tmp_path / "c.jsonl").write_text('{"title": "a", "text": "b"}\n{"title": 1}\n')
    with refuses(ValueError, "c.jsonl:2"):
        index_of(str(tmp_path / "c.jsonl"))
    for answers in ([], [None, "..."]):
        with refuses(ValueError, "'a'", answers):
            play(tmp_path, [], answers=answers)
    assert normal("The  Cat's-eye!") == "catseye"
