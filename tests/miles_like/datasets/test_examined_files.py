"""What is found in a file: faulty rows with their lines, answers that the reward refuses, leaks, pass rates.

Not covered: whether a reward accepts wrong answers; the quality of a language's identification beyond plain sentences.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from miles_like.config.sections.reward import RewardConfig
from miles_like.datasets.card import card, write_card
from miles_like.datasets.check import DUPLICATES, GOLD, LEAKS, ROWS, Examination, examine_file
from miles_like.datasets.derive import write_reduced, write_split
from miles_like.datasets.sampled.recycle import last_visits, recycled
from miles_like.datasets.settings import DataTools, eval_files, read_settings
from miles_like.datasets.stats import language_of, lengths_of, measure
from miles_like.datasets.strata import pass_rates, strata_counts
from miles_like.datasets.table import read_table
from rollout.prompts.config import DataConfig
from rollout.prompts.dataset import read_rows
from tests.support.refusals import refuses

TINY = Path(__file__).parents[3] / "configs" / "tiny"
LONG = (
    "a farmer has {} cows and buys three more of them at the market on every second day of the week , so how many cows "
    "are there when the month of May is over ?"
)


def written(path: Path, rows: Sequence[Mapping[str, Any] | str]) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def examined(
    path: str, reward: str | None = "gsm8k", held: Mapping[str, str] | None = None, **keys: Any
) -> Examination:
    tools = DataTools(data=DataConfig(train=""), reward=None if reward is None else RewardConfig(name=reward))
    return examine_file(path, tools, held=held or {}, threshold=0.8, **keys)


def lines(found: Examination, name: str) -> list[tuple[str, str]]:
    return [(f.place, f.text) for f in found.found[name]]


def test_each_faulty_line_is_listed_as_an_editor_counts_it(tmp_path: Path) -> None:
    """Blank lines count. The other parts of the examination are made of the rows that are right."""
    good = [{"id": f"r{n}", "prompt": LONG.format(n), "answer": f"#### {n}"} for n in range(3)]
    rows = [
        good[0],
        "",
        '{"prompt": "x"',
        {"prompt": "", "answer": "1"},
        good[1],
        {"prompt": "y"},
        {**good[2], "id": "r0"},
    ]
    found = examined(written(tmp_path / "a.jsonl", [*rows, '["list"]', {"prompt": "z", "answer": [1]}]))
    assert [place for place, _ in lines(found, ROWS)] == [f"line {n}" for n in (3, 8, 4, 6, 7, 9)]
    texts = " | ".join(text for _, text in lines(found, ROWS))
    for word in ("not valid JSON", "expected an object", "prompt", "no answer", "r0", "a list"):
        assert word in texts, word
    assert lines(found, GOLD) == [] and not found.ok and found.rows == 8
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("reward", "right", "wrong"),
    [
        ("gsm8k", ["72", "so 3 + 4 =\n#### 7", "1,000", "-5"], ["seven", "3 or 4"]),
        ("exact_number", ["72", "so\n#### 72"], ["72 apples", "x"]),
        ("multiple_choice", ["B"], ["F1", "AB"]),
    ],
)
def test_gold_answers_get_the_full_reward_of_the_run(
    tmp_path: Path, reward: str, right: list[str], wrong: list[str]
) -> None:
    rows = [{"prompt": f"{LONG.format(n)} {n}", "answer": a} for n, a in enumerate([*right, *wrong])]
    found = examined(written(tmp_path / "a.jsonl", rows), reward)
    assert [place for place, _ in lines(found, GOLD)] == [f"line {len(right) + n + 1}" for n in range(len(wrong))]
    assert not found.ok


def half(prompt: Any, sample: Any) -> float:
    return 0.5 if sample.text == f"<{prompt.answer}>" else 0.25


def test_a_reward_of_one_s_own_and_a_form_of_response(tmp_path: Path) -> None:
    path, reward = written(tmp_path / "a.jsonl", [{"prompt": "p", "answer": "1"}]), f"{__file__}:half"
    assert examined(path, reward, form="<{answer}>", full=0.5).ok
    (fault,) = lines(examined(path, reward, form="<{answer}>"), GOLD)
    assert fault[0] == "line 1" and "0.5" in fault[1]
    assert "0.25" in lines(examined(path, reward, full=0.5), GOLD)[0][1]
    with refuses(ValueError, "--response", "{answer}", "none"):
        examined(path, reward, form="none")
    assert GOLD in examined(path, None).unchecked and examined(path, None).ok


def test_leaks_into_an_eval_set(tmp_path: Path) -> None:
    """The same text, nearly the same, 13 words in a row; each with the row of the eval set."""
    held = [{"prompt": LONG.format(7), "answer": "1"}, {"prompt": "1+2=", "answer": "3"}]
    passage = " ".join(LONG.format(7).split()[5:18])
    prompts = ["1-2=", "1+2=", LONG.format(8), f"something else {passage} and then another story about some sheep"]
    path = written(tmp_path / "a.jsonl", [{"prompt": p, "answer": str(n)} for n, p in enumerate(prompts)])
    against = {"held": written(tmp_path / "held.jsonl", held)}
    found = lines(examined(path, held=against), LEAKS)
    assert [place for place, _ in found] == ["line 2", "line 3", "line 4"]
    assert [text.rpartition(", ")[2] for _, text in found] == ["line 2", "line 1", "line 1"]
    assert "near-duplicate" in found[1][1] and "13" in found[2][1]
    made = write_reduced(
        path, tmp_path / "out.jsonl", DataConfig(train=""), held=against, threshold=0.8, card_file=tmp_path / "c.md"
    )
    assert [row["prompt"] for row in read_rows(str(tmp_path / "out.jsonl"))] == ["1-2="] and "1 of 4" in made[-1]
    with refuses(ValueError, "b.jsonl", 1):
        alone = written(tmp_path / "b.jsonl", [held[0]])
        write_reduced(alone, tmp_path / "x.jsonl", DataConfig(train=""), held=against, threshold=0.8, card_file=None)
    assert not list(tmp_path.glob("x.*"))


def answer(prompt: str, reward: float | None, mode: str = "sampled", name: str = "a") -> dict[str, Any]:
    return {"set": name, "mode": mode, "prompt_id": prompt, "reward": reward}


def test_pass_rates_of_the_answers_to_an_eval_set(tmp_path: Path) -> None:
    """Sampled answers where there are some; unscored ones count for nothing; other sets in the file are passed over."""
    ids = ["p0", "p1", "p2", "p3"]
    table = read_table(written(tmp_path / "a.jsonl", [{"id": i, "prompt": i} for i in ids]), DataConfig(train=""))
    rows = [
        *(answer("p0", r) for r in (1.0, 0.0, None)),
        answer("p0", 1.0, "greedy"),
        answer("p1", 1.0, "greedy"),
        *(answer("p2", r) for r in (0.0, 0.5)),
        answer("p3", None),
        answer("p0", 0.0, name="other"),
    ]
    file = Path(written(tmp_path / "answers.jsonl", rows))
    rates = pass_rates(file, table, 1.0)
    assert {k: (r.passed, r.scored) for k, r in rates.items()} == {"p0": (1, 2), "p1": (1, 1), "p2": (0, 2)}
    assert strata_counts(rates) == {"never": 1, "hard": 0, "medium": 1, "easy": 0, "always": 1}
    assert measure(table, rates=rates).pass_rate == 0.5
    with refuses(ValueError, "answers.jsonl", 4, "a.jsonl"):
        pass_rates(Path(written(file, [answer("q", 1.0)])), table, 1.0)
    with refuses(ValueError, "answers.jsonl", "line 2", "reward"):
        pass_rates(Path(written(file, [answer("p0", 1.0), {"set": "a"}])), table, 1.0)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60))
def test_lengths_against_the_standard_library(values: list[int]) -> None:
    found = lengths_of(values)
    assert found is not None and found.median == statistics.median_low(values)
    below = sum(v <= found.p95 for v in values)
    assert below >= 0.95 * len(values) > sum(v < found.p95 for v in values)


def test_tokens_are_those_of_the_model_with_its_template(tmp_path: Path) -> None:
    """Of the tiny model one a character; a longer prompt than a run accepts is a fault of its row."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "1000+2000=", "answer": "3000"}]
    path = written(tmp_path / "a.jsonl", rows)
    config = DataConfig(train="", instruction="?", max_prompt_tokens=5)
    found = measure(read_table(path, config, tokenizer), tokenizer)
    assert found.prompt_tokens == lengths_of([5, 11]) and found.answer_tokens == lengths_of([1, 4])
    assert found.prompt_chars == lengths_of([4, 10])
    assert measure(read_table(path, config)).prompt_tokens is None
    faults = examine_file(path, DataTools(data=config), tokenizer=tokenizer, held={}, threshold=0.8).found[ROWS]
    assert [f.place for f in faults] == ["line 2"] and "max_prompt_tokens = 5" in faults[0].text


def test_languages_of_sentences() -> None:
    sentences = {
        "en": "How many apples does she have in total after the trip?",
        "de": "Wie viele Äpfel hat sie nach der Reise insgesamt gekauft?",
        "zh": "小明有三个苹果，小红给了他五个苹果，请问小明现在一共有多少个苹果",
        "und": "12+34=46",
    }
    assert {language_of(text): text for text in sentences.values()} == sentences


def test_a_card_has_what_a_user_asks_of_a_file(tmp_path: Path) -> None:
    rows = [{"prompt": LONG.format(n), "answer": "1", "license": "mit", "source": "farm"} for n in range(2)]
    path = written(tmp_path / "a.jsonl", [*rows, {"prompt": "1+1=", "licence": "cc0-1.0"}])
    found = measure(read_table(path, DataConfig(train="")))
    assert found.sources == {"farm": 2, "none given": 1} and found.licences == {"mit": 2, "cc0-1.0": 1}
    write_card(tmp_path / "card.md", found)
    page = (tmp_path / "card.md").read_text()
    for word in (
        'license: ["cc0-1.0", "mit"]',
        "n<1K",
        "| a | 3 | 2 |",
        found.sha256,
        "farm 2",
        "characters of a prompt",
    ):
        assert word in page, word
    with refuses(ValueError, "empty"):
        card("empty", {})


def test_a_split_keeps_all_columns_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "license": "mit", "extra": {"n": n}} for n in range(40)]
    path, out = written(tmp_path / "a.jsonl", rows), tmp_path / "out"
    for format in ("jsonl", "parquet"):
        where = out / format
        write_split(path, where, DataConfig(train=""), "train=0.8,held=0.2", threshold=0.8, seed=0, format=format)
        parts = [list(read_rows(str(where / f"{name}.{format}"))) for name in ("train", "held")]
        assert sorted((row for part in parts for row in part), key=lambda row: row["extra"]["n"]) == rows
        page = (where / "README.md").read_text()
        assert all(f"| {name} | {len(part)} |" in page for name, part in zip(("train", "held"), parts, strict=True))
    with refuses(ValueError, "jsonl", "empty"):
        write_split(path, out / "jsonl", DataConfig(train=""), "a=0.5,b=0.5", threshold=0.8, seed=0, format=None)
    with refuses(ValueError, "line 41", "prompt", 5):
        bad = written(tmp_path / "bad.jsonl", [*rows, {"prompt": 5, "no_such": 1}])
        write_split(bad, tmp_path / "none", DataConfig(train=""), "a=0.5,b=0.5", threshold=0.8, seed=0, format=None)
    with refuses(ValueError, "one.jsonl", "a", 1):
        one = written(tmp_path / "one.jsonl", rows[:1])
        write_split(one, tmp_path / "none", DataConfig(train=""), "a=0.5,b=0.5", threshold=0.8, seed=0, format=None)
    assert not (tmp_path / "none").exists()


def run_files(run: Path) -> None:
    """p0 failed at step 2 after a success at step 1, p1 passed once of four, p2 always, p3 was discarded with 0s, p4
    with another reason."""

    def rollout(**rewards: Sequence[float | None]) -> list[dict[str, Any]]:
        return [{"prompt_id": p, "reward": r} for p, of in rewards.items() for r in of]

    (run / "rollouts").mkdir(parents=True)
    written(run / "rollouts" / "step_1.jsonl", rollout(p0=[1, 1], p1=[1, 0, 0, 0]))
    written(run / "rollouts" / "step_2.jsonl", rollout(p0=[0, 0, None], p2=[1, 1], elsewhere=[0]))
    closed = [
        ("p3", {"all rewards equal (0)": 2}),
        ("p4", {"the prompts ended": 2}),
        ("p2", {"all rewards equal (-1)": 2}),
    ]
    entries = [{"step": 1, "ticket": n, "prompt": p, "trained": [], "discarded": d} for n, (p, d) in enumerate(closed)]
    written(run / "ledger.jsonl", [*entries, {"step": 1, "tickets": 3, "discarded": 6, "in_flight": 0}])


def test_hard_prompts_of_a_run_by_their_last_visit(tmp_path: Path) -> None:
    run_files(tmp_path / "run")
    visits = last_visits(tmp_path / "run", 1.0)
    assert {k: tuple(v) for k, v in visits.items()} == {
        "p0": (2, 0, 2), "p1": (1, 1, 4), "p2": (2, 2, 2), "p3": (1, 0, 2), "elsewhere": (2, 0, 1),
    }  # fmt: skip
    rows = [{"id": f"p{n}", "prompt": f"{n}+1=", "answer": str(n + 1), "license": "mit"} for n in range(5)]
    table = read_table(written(tmp_path / "a.jsonl", rows), DataConfig(train=""))
    found = recycled([table], visits, low=0, high=0.25)
    assert (found.visited, found.unknown) == (5, 1)
    added = {"p0": (0.0, 2, 2), "p3": (0.0, 2, 1), "p1": (0.25, 4, 1)}
    assert [row["id"] for row in found.rows] == list(added)  # the hardest first
    for row in found.rows:
        rate, samples, step = added[row["id"]]
        assert row == {**rows[int(row["id"][1])], "pass_rate": rate, "samples": samples, "last_step": step}
    assert [r["id"] for r in recycled([table], visits, low=0.2, high=0.9).rows] == ["p1"]
    with refuses(ValueError, "--min-pass-rate", 0.5, 0.25):
        recycled([table], visits, low=0.5, high=0.25)
    with refuses(ValueError, 5, "a.jsonl", "--tokenizer"):
        recycled(
            [read_table(written(tmp_path / "a.jsonl", [{"prompt": "x"}]), DataConfig(train=""))], visits, low=0, high=1
        )
    with refuses(ValueError, "ledger.jsonl"):
        last_visits(tmp_path, 1.0)


def test_settings_are_those_of_a_run() -> None:
    found = read_settings(TINY.parent / "tiny.toml", ["data.prompt_key=question"])
    assert found.data.prompt_key == "question" and found.reward is not None
    assert read_settings(None, []).reward is None
    assert list(eval_files(found, ())) == ["heldout"]
    assert eval_files(found, ["x.jsonl", "y=x.jsonl"]) == {"x": "x.jsonl", "y": "x.jsonl"}
    with refuses(ValueError, "--against", "x"):
        eval_files(found, ["x.jsonl", "a/x.jsonl"])
    with refuses(ValueError, "--set", "train.lr", "data"):
        read_settings(None, ["train.lr=1"])


def test_the_files_of_the_demo_are_right() -> None:
    """Held-out sums are in no training row, and each answer gets the reward of the run."""
    found = examined(str(TINY / "train.jsonl"), "exact_number", {"heldout": str(TINY / "heldout.jsonl")})
    assert found.ok and not found.found[DUPLICATES] and found.rows == 2531
