"""docs/examples: every file by the key that names it, and what it says of itself.

A user starts from them, so they must work as they stand. Environment, generate function, advantage and loss are run
through the engine and a trainer's step in tests/laws/test_episodes.py. Types are held to the Protocols by mypy, which
reads docs/examples.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like import protocols
from miles_like.algorithms.filters import make_filter
from miles_like.algorithms.registry import make_algorithm
from miles_like.config import RunConfig
from miles_like.config_io import load_config
from miles_like.rewards.load import make_reward
from miles_like.rewards.styles import recognised
from miles_like.types import Score, Unit, Unscored
from rollout.environment import Episodes
from rollout.own_generate import OwnGenerate
from rollout.plays import make_play
from tests.fakes import FakeEngine
from tests.miles_like.made_samples import group, rewarded, sample

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


def configured(name: str, tmp_path: Path) -> RunConfig:
    """The configuration in the example's first lines, as it stands there, beside the example."""
    text = (ROOT / "docs" / "examples" / f"{name}.py").read_text()
    shown = [line for line in text.split('"""')[1].splitlines() if line.startswith("    ")]
    assert tomllib.loads("\n".join(shown))
    for file in EXAMPLES:
        (tmp_path / file.name).write_text(file.read_text())
    path = tmp_path / "run.toml"
    path.write_text("\n".join([f'extends = "{ROOT}/configs/tiny.toml"', *shown]))
    return load_config(path)


def test_every_example_is_named_where_users_look() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    assert [f.stem for f in EXAMPLES] == ["advantage", "environment", "generate", "group_filter", "loss", "reward"]
    assert all(f"(examples/{f.name})" in page for f in EXAMPLES)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda f: f.stem)
def test_every_example_is_held_to_a_protocol_that_the_page_names(file: Path) -> None:
    """By its last line, an assignment that mypy checks; the row of the page says the same Protocol."""
    last = re.fullmatch(r"_: (\w+) = .*  # mypy holds it to its Protocol here", file.read_text().splitlines()[-1])
    assert last, "the last line is to be `_: PROTOCOL = ...`"
    (row,) = [r for r in (ROOT / "docs" / "extending.md").read_text().splitlines() if f"(examples/{file.name})" in r]
    assert hasattr(protocols, last[1]) and f"`{last[1]}`" in row


@pytest.mark.parametrize(
    ("protocol", "unit"),
    [
        (protocols.SampleReward, Unit.SAMPLE),
        (protocols.GroupReward, Unit.GROUP),
        (protocols.BatchReward, Unit.BATCH),
    ],
)
def test_what_fits_a_protocol_of_rewards_is_called_that_way(protocol: Any, unit: Unit) -> None:
    assert recognised(partial(protocol.__call__, None)) == ("own", unit)


def test_reward(tmp_path: Path) -> None:
    reward = make_reward(configured("reward", tmp_path).reward)

    async def ask() -> list[Any]:
        answers = [group([sample(text="24", response_len=n)], answer="24") for n in (2, 4)]
        wrong = group([sample(text="25", response_len=2)], answer="24")
        out = [await reward([g.prompt], g.samples) for g in (*answers, wrong)]
        await reward.close()
        return [o for (o,) in out]

    short, long, wrong = asyncio.run(ask())
    assert isinstance(short, Score) and not isinstance(wrong, Unscored)
    assert short.value == pytest.approx(1 - 0.1 * 2 / 64) and short.value > long.value > wrong.value
    assert dict(short.parts) == {"right": 1.0, "length": -2 / 64}


def test_advantage_and_loss(tmp_path: Path) -> None:
    c = configured("advantage", tmp_path)
    algorithm = make_algorithm(c.algorithm, c.correction, c.mismatch)
    got = algorithm.advantages([rewarded([0, 5, 1, 5]), rewarded([1, 1])])
    assert [list(g) for g in got] == [[-1.0, pytest.approx(2 / 3), pytest.approx(-1 / 3), pytest.approx(2 / 3)], [0, 0]]
    c = configured("loss", tmp_path)
    loss: Any = make_algorithm(c.algorithm, c.correction, c.mismatch).loss
    assert loss.limit == 2.0
    for ratio, largest in {0.25: 0.5, 3.0: 2.0}.items():  # of the second token; it is 0.5 of the first, 1 of no token
        _, stats = loss(
            logprobs=torch.tensor([0.5, ratio, 1.0]).log(),
            entropy=torch.zeros(3),
            rollout_logprobs=torch.zeros(3),
            advantages=torch.ones(3),
            loss_mask=torch.tensor([True, True, False]),
            cu_seqlens=torch.tensor([0, 3]),
            ref_logprobs=None,
            old_logprobs=None,
            streams={},
            candidate_logprobs=None,
        )
        assert float(stats["train/is_weight/max"].total) == pytest.approx(largest)


def test_group_filter(tmp_path: Path) -> None:
    keep = make_filter(configured("group_filter", tmp_path).algorithm.filter)
    assert [keep(rewarded(r)) for r in ([0, 0], [0, 1], [1, 1])] == ["too hard", None, "too easy"]


def test_environment_and_generate(tmp_path: Path) -> None:
    tokenizer: Any = None  # nothing is played here
    for name, kind in (("environment", Episodes), ("generate", OwnGenerate)):
        assert isinstance(make_play(configured(name, tmp_path).rollout, tokenizer)(FakeEngine()), kind)
