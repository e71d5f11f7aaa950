"""Prompt files: what is read, what is refused, and the order in which prompts are dealt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from rollout.prompts.config import DataConfig
from rollout.prompts.dataset import read_rows
from rollout.prompts.mix import PromptSource
from tests.support.refusals import Facts, refuses

TINY = Path(__file__).parents[3] / "configs" / "tiny"
TOKENIZER = AutoTokenizer.from_pretrained(TINY)
ROWS = [{"id": f"r{i}", "prompt": f"{i}+1=", "answer": str(i + 1), "source": "made"} for i in range(10)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def source(path: str, *, seed: int = 0, compared_by: str | None = None, **data: Any) -> PromptSource:
    return PromptSource(DataConfig(train=path, **data), TOKENIZER, path, seed=seed, compared_by=compared_by)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "rows.jsonl", ROWS)


def test_a_row_becomes_a_prompt(file: str) -> None:
    """Tokens are the plain text's, with no special token; nothing downstream tokenizes again."""
    p = source(file).all()[3]
    assert (p.id, p.answer, p.text, p.source) == ("r3", "4", "3+1=", "made")
    assert TOKENIZER.decode(p.token_ids) == "3+1=" and len(p.token_ids) == 4
    assert not set(p.token_ids) & set(TOKENIZER.all_special_ids)


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_every_file_kind_reads_the_same(kind: str, file: str, tmp_path: Path) -> None:
    """A list in .json, lines in .jsonl, columns in .parquet. A hub name goes the same way but needs a network."""
    path = tmp_path / f"same.{kind}"
    if kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "jsonl":
        write(path, ROWS)
    else:
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    assert list(source(str(path)).all()) == list(source(file).all())


class Bos:
    """A tokenizer that puts a special token in front unless add_special_tokens is false, as Llama's does."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [len(text)]

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        return "<bos>" + conversation[0]["content"]


def test_no_special_token_is_put_in_front(file: str) -> None:
    """A template writes its own: one more would be a second BOS."""
    for template, length in (("plain", 4), ("chat", 9)):
        config = DataConfig(train=file, template=template)
        assert PromptSource(config, Bos(), file).all()[0].token_ids == (length,)


def test_the_shipped_files_read() -> None:
    """The tiny task's own files, and GSM8K's rows as they are published ('#### 72' is the reward's business)."""
    for name in ("train", "heldout"):
        prompts = source(str(TINY / f"{name}.jsonl")).all()
        assert len(prompts) >= 500 and prompts[0].text.endswith("=")
    gsm8k = source(str(TINY / "gsm8k_train.jsonl"), prompt_key="question", instruction="\nAnswer:").all()
    assert gsm8k[0].text.startswith("Natalia") and gsm8k[0].text.endswith("\nAnswer:")
    assert gsm8k[0].answer.endswith("#### 72")


def test_chat_template_and_instruction(file: str) -> None:
    """The instruction belongs to the user's message, before the template's own words."""
    p = source(file, template="chat", instruction=" Think.").all()[0]
    assert p.text == "user: 0+1= Think.\nassistant: "


def test_a_prompt_may_be_a_list_of_messages(tmp_path: Path) -> None:
    """As in DAPO's sets. One message of the user is the same as its text; the instruction goes after the last."""
    user = {"role": "user", "content": "1+1="}
    rows = [{"prompt": p, "answer": "2"} for p in ([user], [{"role": "system", "content": "Count."}, user])]
    plain = write(tmp_path / "plain.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    listed = write(tmp_path / "listed.jsonl", rows)
    one, two = source(listed, template="chat", instruction=" ?").all()
    assert one == source(plain, template="chat", instruction=" ?").all()[0]
    assert "Count." in two.text and "1+1= ?" in two.text and one.id != two.id
    with refuses(ValueError, 1, "data.template", "chat"):
        source(listed, template="plain")


def test_ids_are_given_or_of_the_content(tmp_path: Path) -> None:
    """An id names the prompt in the ledger and keys its random stream: one for a row, the same in every run."""
    bare = [{"prompt": r["prompt"], "answer": r["answer"], "level": 2} for r in ROWS]
    a = source(write(tmp_path / "a.jsonl", bare)).all()
    b = source(write(tmp_path / "b.jsonl", bare[::-1])).all()
    assert {p.id: p.text for p in a} == {p.id: p.text for p in b}
    assert a[0].id == "cde480838792d3f0" and len({p.id for p in a}) == 10
    assert dict(a[0].meta) == {"answer": "1", "level": 2}
    with refuses(ValueError, 1, 11):
        source(write(tmp_path / "c.jsonl", [*bare, bare[0]]))


def test_an_epoch_deals_every_prompt_once_in_a_new_order(file: str) -> None:
    """Order depends on (seed, epoch) only, whatever the sizes of the takes, which may span epochs."""
    whole = [p.id for p in source(file).take(30)]
    epochs = [whole[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(e) == sorted(r["id"] for r in ROWS) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    other = source(file)
    assert [p.id for k in (7, 7, 1, 15) for p in other.take(k)] == whole
    assert [p.id for p in source(file, seed=1).take(10)] != epochs[0]
    assert len(source(file)) == 10 and source(file).take(0) == []


@pytest.mark.parametrize("dealt", [0, 3, 10, 14])
def test_a_restored_cursor_deals_the_same_prompts(file: str, dealt: int) -> None:
    """Resume must not skip or repeat a prompt; the cursor survives JSON, where tuples become lists."""
    first = source(file, seed=5)
    first.take(dealt)
    state = json.loads(json.dumps(first.state()))
    second = source(file, seed=5)
    second.restore(state)
    assert [p.id for p in second.take(25)] == [p.id for p in first.take(25)]
    assert second.state() == first.state()


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"prompt": "", "answer": "2"}, (11, "bad.jsonl", "data.template")),
        ({"prompt": "9" * 600, "answer": "2"}, (11, 600, "data.max_prompt_tokens", 512)),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], facts: Facts) -> None:
    """The user must find the row."""
    with refuses(ValueError, *facts):
        source(write(tmp_path / "bad.jsonl", [*ROWS, row]))


MIXED: list[dict[str, Any]] = [
    {"prompt": "0+0=", "answer": "0"},
    {"prompt": "1+1=", "answer": None},
    {"prompt": "2+2=", "answer": " "},
    {"prompt": "3+3="},
]


def test_an_answer_is_needed_only_where_it_is_compared_with(tmp_path: Path) -> None:
    """Many rewards need none. Where one does, its absence would be a 0 that teaches, or the end of a run in its middle;
    a column that was named and is not there is a slip of the pen, whatever the reward."""
    mixed = write(tmp_path / "mixed.jsonl", MIXED)
    assert [p.answer for p in source(mixed).all()] == ["0", "", "", ""]
    with refuses(ValueError, "mixed.jsonl", 2, "exact"):
        source(mixed, compared_by="exact")
    bare = write(tmp_path / "bare.jsonl", [{"prompt": r["prompt"]} for r in MIXED])
    prompts = source(bare).all()
    assert {p.answer for p in prompts} == {""} and len({p.id for p in prompts}) == 4
    with refuses(ValueError, "bare.jsonl", "answer", "gsm8k"):
        source(bare, compared_by="gsm8k")
    with refuses(ValueError, "bare.jsonl", "label"):
        source(bare, answer_key="label")
    within = write(tmp_path / "within.jsonl", [{"prompt": "1+1=", "to": {"be": "2"}}, {"prompt": "2+2=", "to": None}])
    assert [p.answer for p in source(within, answer_key="to.be").all()] == ["2", ""]
    with refuses(ValueError, "within.jsonl", 2, "to.be"):
        source(within, answer_key="to.be", compared_by="exact")


def test_a_missing_column_names_those_there_are(file: str) -> None:
    """The commonest mistake: GSM8K's `question` read as `prompt`."""
    with refuses(ValueError, "question", "data.prompt_key"):
        source(file, prompt_key="question")


def test_verls_files_are_read_as_they_are(tmp_path: Path) -> None:
    """Prompts are lists of messages, answers stand within a column."""
    asked = [{"role": "user", "content": "1+1="}]
    row = {"prompt": asked, "reward_model": {"style": "rule", "ground_truth": "2"}, "data_source": "made"}
    path = write(tmp_path / "verl.jsonl", [row])
    (prompt,) = source(path, template="chat", answer_key="reward_model.ground_truth").all()
    assert (prompt.answer, prompt.messages, prompt.meta["data_source"]) == ("2", tuple(asked), "made")
    with refuses(ValueError, "reward_model.answer", "ground_truth"):
        source(path, template="chat", answer_key="reward_model.answer")
    with refuses(ValueError, "data_source.x", "data_source", "reward_model"):
        source(path, template="chat", answer_key="data_source.x")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """One sentence each, with the path; no traceback of a reader in a reader."""
    cases = {
        "absent.jsonl": (None, ()),
        "empty.jsonl": ("", ()),
        "blank.json": ("[]", ()),
        "broken.jsonl": ('{"prompt": "1+', (1, "JSON")),
        "rows.csv": ("prompt,answer\n", (".json", ".jsonl", ".parquet")),
    }
    for name, (text, facts) in cases.items():
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        with refuses(ValueError, path, *facts) as caught:
            read_rows(str(path))
        assert "\n" not in str(caught.value)
