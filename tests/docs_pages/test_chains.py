"""The chains of docs/recipes, command by command as a reader runs them, on the tiny model.

Why it must hold: a stage that begins with other weights than those of the stage before it learns something too, and
its figures are then those of another chain. What is asserted beside "every command succeeds": the model that each stage
began with, and that the last stage is better than the first by the figure that the page states. Not covered: the
figures of the pages; the configurations for GPUs, which test_docs_snippets.py loads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.config.sections.distillation import StartedServer
from miles_like.pipeline.cache import fetched_model
from rollout.prompts.dataset import read_rows
from tests.support.own_ray import own_ray
from tests.support.pages import ROOT, blocks
from tests.support.reader import Reader

pytestmark = [pytest.mark.slow, pytest.mark.long(beside="tests/docs_pages/test_docs_snippets.py")]
ACCURACY = "eval/heldout/avg@4"  # of 4 samples of each of 600 held-out problems, at temperature 1


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """One for all chains, which begin with the same model: it is made once. The runs join one Ray."""
    reader = Reader(tmp_path_factory.mktemp("chains"))
    with own_ray() as variables:
        reader.environment |= variables
        yield reader
    reader.close()


def follow(reader: Reader, name: str) -> None:
    for block in blocks(ROOT / "docs" / "recipes" / f"{name}.md"):
        reader.follow(block)


def config(reader: Reader, run: str) -> RunConfig:
    return load_config(reader.home / "runs" / run / "config.toml")


def begun_with(reader: Reader, run: str) -> Path:
    """The Hugging Face directory, as the run's fetch stage checked it."""
    return fetched_model(config(reader, run), reader.home / "runs" / run)


def weights(directory: Path) -> dict[str, Tensor]:
    return {name: t.float() for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def moved(reader: Reader, stage: str, former: str) -> float:
    """Relative distance of two exported models over the tensors of one name; random models have 1.4."""
    new, old = (weights(reader.home / "runs" / name) for name in (stage, former))
    both = sorted(new.keys() & old.keys())
    assert len(both) >= len(old) - 1  # a reward model has another head
    of = [float((new[n] - old[n]).norm() ** 2) for n in both], [float(old[n].norm() ** 2) for n in both]
    return float((sum(of[0]) / sum(of[1])) ** 0.5)


def figures(reader: Reader, name: str) -> dict[str, Any]:
    return dict(json.loads((reader.home / "runs" / name).read_text()))


def _is(response: str, answer: str) -> bool:
    """Whether they are the same number, as 03 and 3."""
    return re.fullmatch(r"-?\d+", response.strip()) is not None and int(response) == int(answer)


def check_pairs(reader: Reader, name: str) -> None:
    """Of the model's answers to training prompts, none of which is held out, the right one is chosen."""
    parts = [list(read_rows(str(reader.home / "runs" / f"{name}{part}.jsonl"))) for part in ("", "_heldout")]
    for pairs in parts:
        assert len(pairs) > 200
        assert all(_is(p["chosen"], p["answer"]) and not _is(p["rejected"], p["answer"]) for p in pairs)
    first, second = ({p["prompt"] for p in pairs} for pairs in parts)
    assert not first & second


def test_sft_then_a_reward_model_then_ppo(home: Reader) -> None:
    follow(home, "chain_reward_model")
    sft = home.home / "runs" / "chain_sft_hf"
    check_pairs(home, "chain_pairs")
    assert begun_with(home, "chain_reward").samefile(sft) and begun_with(home, "chain_ppo").samefile(sft)
    assert 0 < moved(home, "chain_reward_hf", "chain_sft_hf") < 0.7
    judge = home.metrics("chain_reward")[-1]
    assert judge["eval/chain_pairs_heldout/accuracy"] > 0.7
    trained_on = config(home, "chain_ppo").reward
    assert trained_on.weights == {"local_reward_model": 1.0} and trained_on.local_reward_model is not None
    assert Path(trained_on.local_reward_model.model).samefile(home.home / "runs" / "chain_reward_hf")
    rows = home.metrics("chain_ppo")
    assert rows[-1][ACCURACY] > rows[0][ACCURACY] + 0.02
    assert rows[-1]["rollout/reward/mean"] > rows[1]["rollout/reward/mean"]


def test_sft_then_dpo_then_grpo(home: Reader) -> None:
    follow(home, "chain_preferences")
    sft, dpo = (home.home / "runs" / f"chain_pref_{name}_hf" for name in ("sft", "dpo"))
    check_pairs(home, "chain_pref_pairs")
    assert begun_with(home, "chain_pref_dpo").samefile(sft) and begun_with(home, "chain_pref_grpo").samefile(dpo)
    assert 0 < moved(home, "chain_pref_dpo_hf", "chain_pref_sft_hf") < 0.7
    pairs = home.metrics("chain_pref_dpo")
    key = "eval/chain_pref_pairs_heldout"
    assert pairs[0][f"{key}/loss"] == pytest.approx(0.6931, abs=1e-3)  # the policy is the reference
    assert pairs[-1][f"{key}/accuracy"] > 0.65
    rows, before = home.metrics("chain_pref_grpo"), figures(home, "chain_pref_sft.json")[ACCURACY]
    assert rows[0][ACCURACY] > before
    assert rows[-1][ACCURACY] > rows[0][ACCURACY] + 0.02


def test_long_cot_sft_then_grpo_then_a_smaller_student(home: Reader) -> None:
    follow(home, "chain_reasoning")
    sft, teacher = (home.home / "runs" / f"chain_cot_{name}_hf" for name in ("sft", "grpo"))
    assert begun_with(home, "chain_cot_grpo").samefile(sft)
    assert 0 < moved(home, "chain_cot_grpo_hf", "chain_cot_sft_hf") < 0.7
    rows = home.metrics("chain_cot_grpo")
    assert rows[-1][ACCURACY] > rows[0][ACCURACY] + 0.02
    teaching = config(home, "chain_student").distillation.started
    assert [Path(t.path).samefile(teacher) for t in teaching.values() if isinstance(t, StartedServer)] == [True]
    sizes = [sum(t.numel() for t in weights(d).values()) for d in (begun_with(home, "chain_student"), teacher)]
    assert 3 * sizes[0] < sizes[1]
    answers = list(read_rows(str(home.home / "runs" / "chain_cot_best.jsonl")))
    assert len(answers) > 800 and sum(" " in row["response"] for row in answers) > len(answers) / 3
    rows = home.metrics("chain_student")
    assert rows[-1][ACCURACY] > rows[0][ACCURACY] + 0.04
