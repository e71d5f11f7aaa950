"""Files as verl, slime and TRL write them, read without a key of the configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from rollout.prompts import dataset
from rollout.prompts.config import DataConfig
from rollout.prompts.dataset import read_rows
from rollout.prompts.mix import PromptSource
from tests.support.refusals import Facts, refuses

TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "configs" / "tiny")
ASKED = [{"role": "user", "content": "1+1="}]
ANSWER = {"role": "assistant", "content": "2"}


def source(tmp_path: Path, rows: Sequence[dict[str, Any]], *, compared_by: str | None = None, **keys: Any) -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptSource(DataConfig(train=str(path), **keys), TOKENIZER, compared_by=compared_by)


def verl_row(i: int, **more: Any) -> dict[str, Any]:
    """As verl's examples/data_preprocess write it."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{i}+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"split": "train", "index": i, "answer": f"#### {i + 1}", "question": f"{i}+1="},
        **more,
    }


def test_verls_parquet(tmp_path: Path) -> None:
    """Structs of parquet come back as they were; a row is named by where verl took it from."""
    path = str(tmp_path / "train.parquet")
    datasets.Dataset.from_list([verl_row(i) for i in range(3)]).to_parquet(path)
    found = PromptSource(DataConfig(train=path), TOKENIZER, compared_by="gsm8k")
    p = found.all()[2]
    assert (p.id, p.answer, p.source) == ("openai/gsm8k/train/2", "3", "openai/gsm8k")
    assert p.text == "user: 2+1=\nassistant: " and p.messages == ({"role": "user", "content": "2+1="},)
    assert p.meta["extra_info"] == verl_row(2)["extra_info"] and not found.notes


def test_verls_index_is_an_id_only_where_it_tells_rows_apart(tmp_path: Path) -> None:
    """Sets that were put together have an index twice."""
    rows = [verl_row(0), verl_row(1, extra_info={"split": "train", "index": 0})]
    ids = [p.id for p in source(tmp_path, rows).all()]
    assert len(set(ids)) == 2 and all(len(name) == 16 for name in ids)


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": ASKED, "label": "2"}, "2"),  # slime's dapo-math
        ({"messages": ASKED, "label": 2}, "2"),  # its gsm8k
        ({"input": "1+1=", "label": "2", "metadata": {"level": 1}}, "2"),  # its --input-key by default
        ({"prompt": ASKED, "solution": "$2$"}, "$2$"),  # TRL's DeepMath
        ({"prompt": "1+1="}, ""),  # TRL's prompt-only
        ({"prompt": "1+1=", "answer": "2"}, "2"),
    ],
)
def test_slimes_and_trls_rows(tmp_path: Path, row: dict[str, Any], answer: str) -> None:
    """The same question each time, as a conversation where it is one."""
    found = source(tmp_path, [row])
    (p,) = found.all()
    talk = any(isinstance(v, list) for v in row.values())
    assert (p.answer, p.text) == (answer, "user: 1+1=\nassistant: " if talk else "1+1=") and not found.notes


def test_a_hub_name_and_its_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is no file is loaded from the hub, with its name and split. Not covered: what the hub answers."""
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, *, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list([verl_row(len(asked))])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = DataConfig.model_validate({"sources": {"a": {"path": "org/a"}, "b": {"path": "org/b:test"}}})
    assert [p.answer for p in PromptSource(config, TOKENIZER).all()] == ["2", "3"]
    assert asked == [("org/a", "train"), ("org/b", "test")]


def test_a_hub_dataset_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as the library gives them at once, also of a dataset whose rows are chosen out of another."""
    made = datasets.Dataset.from_list([verl_row(i, extra=None if i else {"a": [i]}) for i in range(7)]).shuffle(seed=1)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *, split: made)
    monkeypatch.setattr(dataset, "_BATCH", 3)
    assert list(read_rows("org/a")) == made.to_list() and list(read_rows("org/a", 4)) == made.to_list()[:4]
    assert read_rows("org/a").where(6) == "org/a, row 7"


def test_a_named_key_wins(tmp_path: Path) -> None:
    """Over every name that would be recognised."""
    row = {"prompt": "1+1=", "answer": "2", "messages": ASKED, "label": "two", "chosen": "2", "rejected": "3"}
    (p,) = source(tmp_path, [row], prompt_key="messages", answer_key="label").all()
    assert (p.answer, p.messages) == ("two", tuple(ASKED))
    (p,) = source(tmp_path, [row], prompt_key="prompt").all()
    assert (p.answer, p.text) == ("2", "1+1=")


def test_another_reading_is_said_or_refused(tmp_path: Path) -> None:
    """Beside `prompt` and `answer`, the names of old, another column is only mentioned; of others none is preferred."""
    (note,) = source(tmp_path, [{"prompt": "1+1=", "answer": "2", "label": "two"}]).notes
    assert note.endswith("answers are read from column 'answer', not from 'label'; set data.answer_key to change this")
    (note,) = source(tmp_path, [{"prompt": "1+1=", "messages": ASKED}]).notes
    assert note.endswith(
        "prompts are read from column 'prompt', not from 'messages'; set data.prompt_key to change this"
    )
    with refuses(ValueError, "label", "solution", "data.answer_key"):
        source(tmp_path, [{"prompt": "1+1=", "solution": "2", "label": "two"}])


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, ("rows.jsonl", "algorithm.name", "reward_model")),
        ({"chosen": [*ASKED, ANSWER], "rejected": ASKED}, ("algorithm.name", "dpo", "reward_model")),
        ({"prompt": "1+1=", "completion": "2", "label": True}, ("rows.jsonl", "data.prompt_key", "data.answer_key")),
        ({"messages": [*ASKED, ANSWER]}, (1, "messages")),
        ({"question": "1+1="}, ("prompt", "data.prompt_key")),
    ],
)
def test_files_that_hold_no_prompts(tmp_path: Path, row: dict[str, Any], facts: Facts) -> None:
    """One sentence each, with the remedy, in place of rewards that are all 0."""
    with refuses(ValueError, *facts) as caught:
        source(tmp_path, [row])
    assert "rows.jsonl" in str(caught.value) and "\n" not in str(caught.value)
