"""Rows of given answers and pairs: which tokens are fed, which are under loss, and the message for a wrong row.

One token too many under loss is trained on silently. Oracle: transformers' own mask of an assistant's turns
(`return_assistant_tokens_mask`). Not covered: parquet and hub names (test_prompts).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from miles_like.config.sections.supervised import SupervisedConfig
from miles_like.supervised.data import ExampleReader
from miles_like.types import Sample
from rollout.prompts.config import DataConfig
from tests.support.refusals import Facts, refuses

TINY = Path(__file__).parents[3] / "configs" / "tiny"
# ends each turn of the assistant with the tokenizer's end token, as most models' templates do
ENDING = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|eos|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
USER, RIGHT, WRONG = ({"role": r, "content": c} for r, c in (("user", "1+1="), ("assistant", "2"), ("assistant", "3")))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY)


def read(
    tokenizer: Any, tmp_path: Path, *rows: dict[str, Any], algorithm: str = "sft", limit: int = 64, **data: Any
) -> list[tuple[Sample, ...]]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(path), **data)
    reader = ExampleReader(
        tokenizer=tokenizer, data=config, keys=SupervisedConfig(), algorithm=algorithm, max_tokens=limit
    )
    return [group.samples for group in reader.read(str(path))]


def shown(tokenizer: Any, sample: Sample) -> tuple[str, str]:
    """(all its text, what of it is under loss)."""
    return tokenizer.decode(sample.token_ids), tokenizer.decode(sample.token_ids[sample.loss_mask])


def test_an_answer_and_its_end_are_learnt_after_what_is_asked(tokenizer: Any, tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "answer": "2"}
    [(plain,)] = read(tokenizer, tmp_path, row)
    assert shown(tokenizer, plain) == ("1+1=2<|eos|>", "2<|eos|>")
    [(chat,)] = read(tokenizer, tmp_path, row, template="chat", instruction="?")
    assert shown(tokenizer, chat) == ("user: 1+1=?\nassistant: 2\n<|eos|>", "2\n<|eos|>")


def test_of_a_conversation_the_assistants_turns_are_learnt(tokenizer: Any, tmp_path: Path) -> None:
    """transformers marks the same tokens, except for the newline that the template puts after the end: it is never
    sampled, and what follows the last end is not fed."""
    turns = [{"role": "system", "content": "Count."}, USER, RIGHT, {"role": "user", "content": "4/2="}, RIGHT]
    ending = AutoTokenizer.from_pretrained(TINY, chat_template=ENDING)
    [(sample,)] = read(ending, tmp_path, {"messages": turns}, template="chat")
    theirs = ending.apply_chat_template(turns, return_assistant_tokens_mask=True, return_dict=True, tokenize=True)
    assert sample.token_ids.tolist() == theirs["input_ids"][:-1]
    assert sample.loss_mask.int().tolist() == theirs["assistant_masks"][:-1]
    assert shown(ending, sample)[1] == "2<|eos|>2<|eos|>"
    [(cut,)] = read(ending, tmp_path, {"messages": [*turns, USER]}, template="chat")
    assert cut.token_ids.tolist() == sample.token_ids.tolist(), "a question without answer teaches nothing"


def test_pairs_of_every_shape_are_the_same_pair(tokenizer: Any, tmp_path: Path) -> None:
    """Texts, answers as messages, whole conversations with and without a column for what is asked."""
    shapes = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
        {"prompt": "1+1=", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
    ]
    for row in shapes:
        [(chosen, rejected)] = read(tokenizer, tmp_path, row, algorithm="dpo", template="chat")
        assert (chosen.index, rejected.index) == (0, 1)
        assert shown(tokenizer, chosen) == ("user: 1+1=\nassistant: 2\n<|eos|>", "2\n<|eos|>")
        assert shown(tokenizer, rejected) == ("user: 1+1=\nassistant: 3\n<|eos|>", "3\n<|eos|>")


def test_a_reward_model_is_fed_the_whole_answer(tokenizer: Any, tmp_path: Path) -> None:
    """Inputs are all tokens but a sample's last: one more stands behind the end, as the label of the token whose score
    counts."""
    [(chosen, _)] = read(
        tokenizer, tmp_path, {"prompt": "1+1=", "chosen": "2", "rejected": "3"}, algorithm="reward_model"
    )
    assert tokenizer.decode(chosen.token_ids[:-1]) == "1+1=2<|eos|>"
    assert chosen.loss_mask.tolist() == [False] * 6 + [True]


PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    ("algorithm", "row", "data", "facts"),
    [
        ("sft", {"prompt": "1+1="}, {}, (2, "answer", "data.prompt_key", "data.answer_key")),
        ("sft", {"prompt": "1+1=", "answer": " "}, {}, (2, "answer")),
        ("sft", {"prompt": "", "answer": "2"}, {}, (2, "prompt")),
        (
            "sft",
            {"prompt": "1+1=", "answer": "2" * 64},
            {},
            (2, "answer", 68),
        ),
        ("sft", {"prompt": "1+1=", "answer": "2"}, {"max_prompt_tokens": 3}, (1, 4)),
        ("sft", {"messages": [USER, RIGHT]}, {}, (2, "messages", "data.template")),
        ("sft", {"messages": [USER]}, {"template": "chat"}, (2, "messages")),
        ("dpo", {"prompt": "1+1=", "chosen": "2"}, {}, (2, "rejected", "supervised.rejected_key")),
        (
            "dpo",
            {"chosen": "2", "rejected": "3"},
            {},
            (2, "prompt", "data.prompt_key"),
        ),
        ("dpo", PAIR | {"rejected": "2 "}, {}, (2, "chosen", "rejected")),
        ("dpo", PAIR | {"rejected": ""}, {}, (2, "rejected")),
        ("dpo", PAIR | {"rejected": "2" * 60}, {}, (2, "chosen", "rejected")),
        ("dpo", PAIR | {"prompt": "1" * 600}, {}, (600,)),
    ],
)
def test_a_wrong_row_is_named(
    tokenizer: Any, tmp_path: Path, algorithm: str, row: dict[str, Any], data: dict[str, Any], facts: Facts
) -> None:
    good = {"prompt": "1+1=", "answer": "2"} if algorithm == "sft" else PAIR
    with refuses(ValueError, *facts) as wrong:
        read(tokenizer, tmp_path, good, row, algorithm=algorithm, **data)
    assert str(tmp_path / "rows.jsonl") in str(wrong.value) and "\n" not in str(wrong.value)


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    """As those that drop what a model thought before: the tokens would be some that no server ever sees."""
    forgetful = ENDING.replace("{{ m['content'] }}<|eos|>", "{{ m['content'] if loop.last else '' }}<|eos|>")
    tokenizer = AutoTokenizer.from_pretrained(TINY, chat_template=forgetful)
    with refuses(ValueError, 1, 2):
        read(tokenizer, tmp_path, {"messages": [USER, RIGHT, USER, RIGHT]}, template="chat")
