"""Sampled answers become rows for supervised training: pairs, and the best of them.

Why it must hold: a pair whose sides are exchanged, or an unfinished answer with an end token behind it, is learnt as
any other. Compared with all pairs of a prompt, enumerated. Not covered: how answers are sampled and scored.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from miles_like.config.sections.supervised import SupervisedConfig
from miles_like.datasets.sampled.examples import best_answers, preference_pairs
from miles_like.datasets.table import Table, read_table
from miles_like.supervised.data import ExampleReader
from rollout.prompts.config import DataConfig
from tests.support.refusals import refuses

TINY = Path(__file__).parents[4] / "configs" / "tiny"
ROWS = [{"id": f"p{n}", "prompt": f"{n}+1=", "answer": str(n + 1), "license": "mit"} for n in range(3)]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return read_table(str(written(tmp_path / "prompts.jsonl", ROWS)), DataConfig(train=""))


def answer(prompt: str, text: str | None, reward: float | None, finish: str = "stop") -> dict[str, Any]:
    found = {"set": "heldout", "mode": "sampled", "prompt_id": prompt, "reward": reward, "finish": finish}
    return found if text is None else found | {"response": text}


def answers(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    return written(tmp_path / "answers.jsonl", list(rows))


def test_a_pair_is_a_right_answer_and_the_commonest_mistake(table: Table, tmp_path: Path) -> None:
    """Cut, empty and unscored answers are in no pair; a prompt whose answers are all right or all wrong has none."""
    file = answers(
        tmp_path,
        *(answer("p0", text, float(text.strip() == "1")) for text in ("7", "1", "8", "8", "1 ")),
        *(answer("p1", "2", 1.0) for _ in range(3)),
        answer("p2", "3", 1.0),
        answer("p2", "333", 0.0, "length"),
        answer("p2", " ", 0.0),
        answer("p2", "4", None),
    )
    found = preference_pairs(table, file)
    pair = {"chosen": "1", "rejected": "8", "chosen_reward": 1.0, "rejected_reward": 0.0}
    assert found.rows == [ROWS[0] | pair]
    assert (found.prompts, found.answered, found.cut) == (1, 3, 1)
    assert [row["rejected"] for row in preference_pairs(table, file, per_prompt=5).rows] == ["8", "7"]
    best = best_answers(table, file)
    assert [(row["id"], row["response"], row["response_reward"]) for row in best.rows] == [
        ("p0", "1", 1.0), ("p1", "2", 1.0), ("p2", "3", 1.0),
    ]  # fmt: skip
    assert best.rows[0] == ROWS[0] | {"response": "1", "response_reward": 1.0}


SAMPLED = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([0.0, 0.25, 0.5, 1.0])), min_size=2, max_size=8)


@given(SAMPLED, st.integers(1, 4), st.sampled_from([0.0, 0.25, 0.6]))
def test_the_pairs_of_a_prompt_against_all_there_are(
    tmp_path_factory: pytest.TempPathFactory, sampled: list[tuple[str, float]], per_prompt: int, gap: float
) -> None:
    """The better answer is chosen, the gaps are the largest ones, and no pair that may be taken is left out."""
    tmp_path = tmp_path_factory.mktemp("pairs")
    table = read_table(str(written(tmp_path / "prompts.jsonl", ROWS[:1])), DataConfig(train=""))
    file = answers(tmp_path, *(answer("p0", text, reward) for text, reward in sampled))
    times = Counter(text for text, _ in sampled)
    mean = {text: sum(r for t, r in sampled if t == text) / times[text] for text in times}
    gaps = [abs(mean[a] - mean[b]) for a, b in combinations(sorted(mean), 2)]
    wanted = sorted((g for g in gaps if g > 0 and g >= gap), reverse=True)[:per_prompt]
    if not wanted:
        with pytest.raises(ValueError, match="--min-gap"):
            preference_pairs(table, file, per_prompt=per_prompt, min_gap=gap)
        return
    found = preference_pairs(table, file, per_prompt=per_prompt, min_gap=gap).rows
    assert [mean[row["chosen"]] - mean[row["rejected"]] for row in found] == pytest.approx(wanted)
    assert len({(row["chosen"], row["rejected"]) for row in found}) == len(found)


def test_the_best_answers_are_taken_in_order(table: Table, tmp_path: Path) -> None:
    rewards = {"a": 0.5, "b": 1.0, "c": 0.75, "d": 0.75, "e": 0.2}
    file = answers(tmp_path, *(answer("p1", text, rewards[text]) for text in "acdbde"))
    assert [row["response"] for row in best_answers(table, file, per_prompt=9, min_reward=0.5).rows] == list("bdca")
    assert [row["response"] for row in best_answers(table, file).rows] == ["b"]


@pytest.mark.parametrize("algorithm", ["dpo", "reward_model", "sft"])
def test_a_run_reads_the_rows(table: Table, tmp_path: Path, algorithm: str) -> None:
    """With the columns that its configuration has by default; of answers with `data.answer_key = "response"`."""
    file = answers(tmp_path, answer("p2", "3", 1.0), answer("p2", "33", 0.0))
    made = best_answers if algorithm == "sft" else preference_pairs
    rows = written(tmp_path / "rows.jsonl", list(made(table, file).rows))
    key = "response" if algorithm == "sft" else None
    reader = ExampleReader(
        tokenizer=AutoTokenizer.from_pretrained(TINY),
        data=DataConfig(train=str(rows), answer_key=key),
        keys=SupervisedConfig(),
        algorithm=algorithm,
        max_tokens=64,
    )
    (group,) = reader.read(str(rows))
    assert [s.text for s in group.samples] == (["3"] if algorithm == "sft" else ["3", "33"])


def test_what_gives_no_rows_is_refused(table: Table, tmp_path: Path) -> None:
    file = answers(tmp_path, answer("p0", "1", 1.0), answer("p0", "2", 0.75))
    with refuses(ValueError, "prompts.jsonl", 1, "0.5", "--min-gap"):
        preference_pairs(table, file, min_gap=0.5)
    with refuses(ValueError, "prompts.jsonl", 2, "--min-reward"):
        best_answers(table, file, min_reward=2)
    with refuses(ValueError, "--per-prompt", 0):
        preference_pairs(table, file, per_prompt=0)
    with refuses(ValueError, "--per-prompt", 0):
        best_answers(table, file, per_prompt=0)
    with refuses(ValueError, "--min-gap", "nan"):
        preference_pairs(table, file, min_gap=float("nan"))
    with refuses(ValueError, "answers.jsonl", "response"):
        preference_pairs(table, answers(tmp_path, answer("p0", None, 1.0)))
    paired = written(tmp_path / "paired.jsonl", [ROWS[0] | {"chosen": "1"}])
    with refuses(ValueError, "paired.jsonl", "line 1", "chosen"):
        preference_pairs(read_table(str(paired), DataConfig(train="")), file)
