"""Process reward models: the loss of steps, and which tokens a row's labels are put at.

Oracle of the loss: torch's binary cross entropy of the steps alone, by value and gradient; of the places: the tokens
written out. What a model says of the same steps when it is used: tests/miles_like/rewards/judges/test_local_model.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from miles_like.algorithms.process_reward import ProcessRewardLoss
from miles_like.config.sections.supervised import SupervisedConfig
from miles_like.supervised.data import ExampleReader
from miles_like.types import STEP_LABEL, LossInputs, Sample
from rollout.prompts.config import DataConfig
from tests.support.refusals import refuses

ROOT = Path(__file__).parents[3]
ROW = {"prompt": "1+2=", "steps": ["ab", "c", "d"], "labels": [True, 0.25, False]}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ROOT / "configs" / "tiny")


def read(tokenizer: Any, tmp_path: Path, row: dict[str, Any], *, template: str = "plain", **keys: Any) -> Sample:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    data = DataConfig(train=str(path), template=template)  # type: ignore[arg-type]
    own = SupervisedConfig(**keys)
    reader = ExampleReader(tokenizer=tokenizer, data=data, keys=own, algorithm="process_reward", max_tokens=40)
    [group] = reader.read(str(path))
    return group.samples[0]


def given(values: list[float], labels: list[float], mask: list[bool]) -> dict[str, Any]:
    n = len(values)
    return {
        "logprobs": torch.tensor(values, requires_grad=True),
        "loss_mask": torch.tensor(mask),
        "cu_seqlens": torch.tensor([0, n], dtype=torch.int32),
        "streams": {STEP_LABEL: torch.tensor(labels)},
        **dict.fromkeys(("entropy", "rollout_logprobs", "advantages"), torch.zeros(n)),
    }


def test_the_loss_is_torch_s_of_the_steps_alone() -> None:
    inputs = given([2.0, float("nan"), -1.0, 0.5, 0.0], [1.0, 7.0, 0.0, 0.25, 1.0], [True, False, True, True, True])
    loss, stats = ProcessRewardLoss()(LossInputs(**inputs))
    at = inputs["loss_mask"]
    steps = inputs["logprobs"].detach()[at].requires_grad_()
    want = binary_cross_entropy_with_logits(steps, inputs["streams"][STEP_LABEL][at], reduction="none")
    torch.testing.assert_close(loss[at], want)
    assert not loss[~at].any()
    mine = torch.autograd.grad(loss.sum(), inputs["logprobs"])[0]
    torch.testing.assert_close(mine[at], torch.autograd.grad(want.sum(), steps)[0])
    assert mine[1] == 0
    figures = {k: float(s.total / s.count) for k, s in stats.items()}
    # of the last step, whose value is 0, nothing is claimed: it counts as wrong
    assert figures == {"process/accuracy": 0.5, "process/value_right": 1.0, "process/value_wrong": -0.25}
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert all(f"`{key}`" in page for key in stats)


def test_a_label_is_at_the_token_after_its_step(tokenizer: Any, tmp_path: Path) -> None:
    """A scalar head has its value at an input token, which is fed for the label after it."""
    s = read(tokenizer, tmp_path, ROW)
    assert tokenizer.decode(s.token_ids) == "1+2=ab\nc\nd<|eos|><|eos|>"
    before = [tokenizer.decode(s.token_ids[: int(i)]) for i in s.loss_mask.nonzero()[:, 0]]
    assert before == ["1+2=ab\n", "1+2=ab\nc\n", "1+2=ab\nc\nd<|eos|>"]
    assert s.streams[STEP_LABEL][s.loss_mask].tolist() == [1.0, 0.25, 0.0]
    assert not s.streams[STEP_LABEL][~s.loss_mask].any()
    chat = read(tokenizer, tmp_path, ROW, template="chat", step_separator="; ")
    assert tokenizer.decode(chat.token_ids) == "user: 1+2=\nassistant: ab; c; d<|eos|><|eos|>"
    assert int(chat.loss_mask.sum()) == 3


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"labels": [True]}, (3, 1)),
        ({"labels": [True, "yes", False]}, ("yes",)),
        ({"labels": [True, 1.5, False]}, (1.5,)),
        ({"steps": "abc"}, ("steps", "supervised.steps_key")),
        ({"steps": [], "labels": []}, (0,)),
        ({"steps": ["a" * 60, "b", "c"]}, ("steps", 40)),
    ],
)
def test_rows_that_cannot_be_learnt_are_refused(
    tokenizer: Any, tmp_path: Path, change: dict[str, Any], facts: Any
) -> None:
    with refuses(ValueError, *facts):
        read(tokenizer, tmp_path, ROW | change)
