"""A reward model of a directory gives each response what transformers' own classifier gives it, alone and unpadded.

Not covered: that the trainer's head is transformers' (tests/laws/test_scalar_head.py).
"""

from __future__ import annotations

import asyncio
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_like.config.sections.reward import RewardConfig
from miles_like.hf.steps import step_tokens, tokens_of_text
from miles_like.rewards.judges.local_model import LocalRewardModel
from miles_like.rewards.load import make_reward
from miles_like.types import Finish, Prompt, Sample, Score, Unit
from tests.support.made_samples import sample
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow  # a chat template is checked in a process

TINY = Path(__file__).parents[4] / "configs" / "tiny"
RESPONSES = [("12\n3", Finish.STOP), ("4", Finish.LENGTH), ("5\n6\n\n7", Finish.STOP), ("", Finish.STOP)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("scalar")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "pad_token_id": 0}
    model = Qwen3ForSequenceClassification(Qwen3Config(num_labels=1, **sizes, **heads))
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(TINY / name, out / name)
    return out


def reward_of(directory: Path, **options: Any) -> RewardConfig:
    own = {"model": str(directory), **options}
    return RewardConfig.model_validate({"name": "local_reward_model", "local_reward_model": own})


def asked() -> tuple[list[Prompt], list[Sample]]:
    prompts = [Prompt(id=f"p{i}", token_ids=(1,), answer="", text="1+" * (i + 1)) for i in range(len(RESPONSES))]
    samples = [sample(f"p{i}", 0, text=text, finish=finish) for i, (text, finish) in enumerate(RESPONSES)]
    return prompts, samples


def theirs(directory: Path, text: str) -> float:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(directory)(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        return float(model(input_ids=ids).logits)


def test_an_outcome_is_transformers_output_for_the_whole_text(directory: Path) -> None:
    prompts, samples = asked()
    reward = make_reward(reward_of(directory))
    assert reward.unit is Unit.BATCH and reward.compares is None

    async def ask() -> Any:
        try:
            return await reward(prompts, samples)
        finally:
            await reward.close()

    got = [s.value for s in asyncio.run(ask()) if isinstance(s, Score)]
    ends = ["<|eos|>" if f is Finish.STOP else "" for _, f in RESPONSES]
    want = [theirs(directory, p.text + text + end) for p, (text, _), end in zip(prompts, RESPONSES, ends, strict=True)]
    assert got == pytest.approx(want, rel=1e-4, abs=1e-5) and len(set(got)) == len(got)


@pytest.mark.parametrize("reduce", ["min", "last", "mean", "product"])
def test_a_process_is_its_output_at_each_step_s_end(directory: Path, reduce: str) -> None:
    prompts, samples = asked()
    config = reward_of(directory, kind="process", reduce=reduce).local_reward_model
    assert config is not None
    model = LocalRewardModel(config)
    steps = [["12\n", "3<|eos|>"], ["4"], ["5\n", "6\n", "7<|eos|>"], ["<|eos|>"]]
    want = [
        [theirs(directory, p.text + "".join(of[: i + 1])) for i in range(len(of))]
        for p, of in zip(prompts, steps, strict=True)
    ]
    for mine, other in zip(model.values(prompts, samples), want, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)
    right = [[1 / (1 + math.exp(-v)) for v in of] for of in want]
    of_steps = {"min": min, "last": lambda x: x[-1], "mean": lambda x: sum(x) / len(x), "product": math.prod}
    assert model(prompts, samples) == pytest.approx([of_steps[reduce](x) for x in right], rel=1e-4)


def test_with_no_separator_each_token_is_a_step(directory: Path) -> None:
    config = reward_of(directory, kind="process", step_separator="").local_reward_model
    assert config is not None
    prompts, samples = asked()
    found = LocalRewardModel(config).values(prompts, samples)
    assert [len(x) for x in found] == [4, 1, 6, 1]
    assert found[0][-1] == pytest.approx(theirs(directory, prompts[0].text + "12\n3<|eos|>"), rel=1e-4, abs=1e-5)


def characters(text: str) -> list[int]:
    return [ord(c) for c in text]


@given(steps=st.lists(st.text("ab", min_size=1), min_size=1, max_size=5), end=st.sampled_from([None, 1]))
def test_a_step_ends_at_one_token_in_training_and_use(steps: list[str], end: int | None) -> None:
    assert tokens_of_text(characters, "\n".join(steps), "\n", end) == step_tokens(characters, steps, "\n", end)
    single = [c for step in steps for c in step]
    assert tokens_of_text(characters, "".join(steps), "", end) == step_tokens(characters, single, "", end)


def test_a_directory_without_such_a_model_is_refused(directory: Path, tmp_path: Path) -> None:
    with refuses(ValueError, "reward.local_reward_model.model", "config.json"):
        make_reward(reward_of(tmp_path))
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 128, "pad_token_id": 0}
    two = Qwen3Config(num_labels=2, hidden_size=16, intermediate_size=16, num_hidden_layers=1, **heads)
    Qwen3ForSequenceClassification(two).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(TINY / name, tmp_path / name)
    config = reward_of(tmp_path).local_reward_model
    assert config is not None
    with refuses(ValueError, 2):
        LocalRewardModel(config)(*asked())
