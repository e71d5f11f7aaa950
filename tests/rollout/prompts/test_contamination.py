"""Prompts to train on that an eval set has too. Not covered: paraphrases, one problem with other numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from miles_like.config.load import load_config
from miles_like.types import Prompt
from rollout.prompts import contamination
from rollout.prompts.config import DataConfig
from rollout.prompts.contamination import FORM, WORDS, decontaminate, overlaps
from rollout.prompts.mix import PromptSource
from tests.support.refusals import refuses

CONFIGS = Path(__file__).parents[3] / "configs"
TOKENIZER = AutoTokenizer.from_pretrained(CONFIGS / "tiny")


def prompts(*texts: str, tag: str = "t") -> list[Prompt]:
    return [Prompt(id=f"{tag}{i}", token_ids=(1,), answer="", text=text) for i, text in enumerate(texts)]


def text(*words: int) -> str:
    return " ".join(f"w{i}" for i in words)


def found(train: list[Prompt], held: list[Prompt]) -> list[tuple[str, str, bool]]:
    return [(o.prompt.id, o.held.id, o.same_text) for o in overlaps(train, {"set": held})]


def test_the_same_text_however_it_is_set() -> None:
    """Case, white space and the form of Unicode are no difference; a sign of arithmetic is one, and so is a digit."""
    train = prompts("Where  is\nFaust?", "1+2=", "1-2=", "12=", "ﬁve", "1 + 2 =")
    held = prompts("where is faust?", "1+2=", "five", "1 + 3 =", tag="h")
    assert found(train, held) == [("t0", "h0", True), ("t1", "h1", True), ("t4", "h2", True)]


def test_so_many_words_in_a_row() -> None:
    """13, wherever they stand in either; 12 are none. Punctuation and case do not break a row, another word does, and
    a row does not go from one prompt into the next."""
    row = list(range(WORDS))
    held = prompts(text(100, *row, 101, 102), tag="h")
    train = prompts(
        text(*range(200, 230), *row),
        text(*range(300, 330), *row[:-1]),
        text(*row).upper().replace(" ", ", "),
        text(*row[:6], 400, *row[6:]),
        text(500, *row[:7]),
        text(*row[7:], 501),
    )
    assert found(train, held) == [("t0", "h0", False), ("t2", "h0", False)]


@pytest.mark.parametrize("at_once", [1, 7, 4096])
def test_against_a_search_by_hand(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a ring of words with a slip here and there, so that most rows nearly match: the same as comparing each
    row of 13 with each, however many prompts are compared at a time."""
    monkeypatch.setattr(contamination, "_AT_ONCE", at_once)
    rng = random.Random(0)
    starts = [(rng.randrange(150), rng.randrange(50)) for _ in range(120)]
    bag = [text(*(rng.randrange(150) if rng.random() < 0.04 else i % 150 for i in range(a, a + n))) for a, n in starts]
    bag[40:45], bag[95:100] = bag[20:25], bag[:5]  # texts that come twice
    train, held = prompts(*bag[:100]), prompts(*bag[100:108], tag="h")
    rows = [{tuple(p.text.split()[i : i + WORDS]) for i in range(len(p.text.split()) - WORDS + 1)} for p in held]
    counts = [{tuple(t.split()[i : i + WORDS]) for i in range(len(t.split()) - WORDS + 1)} for t in set(bag[:100])]
    want = []
    for p in train:
        words = p.text.split()
        own = {tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}
        own = {row for row in own if sum(row in c for c in counts) < FORM}
        equal = [h.id for h in held if h.text == p.text]
        shared = [h.id for h, r in zip(held, rows, strict=True) if own & r]
        if equal or shared:
            want.append((p.id, (equal or shared)[0], bool(equal)))
    assert found(train, held) == want and 5 < sum(not same for *_, same in want) < 60


def test_a_form_is_not_what_is_asked() -> None:
    """An instruction that all prompts of a file have is shared with all of an eval set; the questions are not."""
    form = "Solve this problem step by step and put the final answer alone on the last line please:"
    train = prompts(*(f"{form} {text(*range(20 * i, 20 * i + 20))}" for i in range(1, FORM + 2)))
    held = prompts(f"{form} {text(*range(60, 80))}", tag="h")
    assert found(train, held) == [("t2", "h0", True)]
    other = prompts(f"{form} so {text(*range(60, 80))}", tag="h")
    assert found(train, other) == [("t2", "h0", False)]
    assert len(found(train[: FORM - 2], other)) == FORM - 2  # too few to tell


def source(path: Path, rows: list[str], **data: object) -> PromptSource:
    path.write_text("".join(json.dumps({"id": f"{path.stem}{i}", "prompt": r}) + "\n" for i, r in enumerate(rows)))
    return PromptSource(DataConfig.model_validate({"train": str(path), **data}), TOKENIZER)


def test_what_becomes_of_them(tmp_path: Path) -> None:
    """One line with numbers and the first pair; dropped ones are never dealt and not counted; instructions do not hide
    a question."""
    held = {"set": source(tmp_path / "h.jsonl", ["1+1=", "2+2="], instruction=" ?").all()}

    def train() -> PromptSource:
        return source(tmp_path / "t.jsonl", ["3+3=", "2+2=", "4+4="], instruction=" ?")

    assert decontaminate(train(), held, "off") == ()
    kept = train()
    (warning,) = decontaminate(kept, held, "warn")
    assert warning.startswith(
        "1 of 3 training prompts are also in eval sets (1 with the same text, 0 with 13 consecutive"
    )
    assert "first is 't1' ('h1' of set)" in warning and len(kept) == 3
    whole = train()
    before = whole.state()
    (warning,) = decontaminate(whole, held, "drop")
    assert warning.endswith("removed, 2 remain") and {p.id for p in whole.take(4)} == {"t0", "t2"} and len(whole) == 2
    with refuses(ValueError, "t.jsonl", 2, 3):
        whole.restore(before)
    with refuses(ValueError, 1, 3, "drop"):
        decontaminate(train(), held, "refuse")
    with refuses(ValueError, 1, "t.jsonl"):
        decontaminate(source(tmp_path / "t.jsonl", ["1+1="]), {"set": prompts("1+1=")}, "drop")


@pytest.mark.parametrize("name", ["tiny", "tiny_gsm8k"])
def test_the_shipped_sets_are_apart(name: str) -> None:
    """Short sums are alike in form, and none is another; a warning that is always there is not read."""
    config = load_config(CONFIGS / f"{name}.toml")
    train = PromptSource(config.data, TOKENIZER)
    held = {s.name: PromptSource(config.data, TOKENIZER, s.path).all() for s in config.eval_sets}
    assert len(train) > 50 and held and decontaminate(train, held, "refuse") == ()
