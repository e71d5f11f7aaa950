"""`miles-like calibrate`: two rewards on pairs of a file, by the command line.

Functions stand for reward model and judge. Not covered: the figures
(tests/miles_like/rewards/test_reward_calibration.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles_like.cli import app
from tests.support.cli_runner import CliRunner
from tests.support.refusals import Facts, check_refusal

TINY = Path(__file__).parents[3] / "configs" / "tiny"
HELD = str(TINY / "pairs_heldout.jsonl")
OWN = """import re


def right(prompt, sample):
    found = re.fullmatch(r"(\\d+)([-+*/])(\\d+)=", prompt.text)
    if found is None:
        return 0.0
    left, op, other = int(found[1]), found[2], int(found[3])
    value = {"+": left + other, "-": left - other, "*": left * other, "/": left // (other or 1)}[op]
    return float(sample.text == str(value))


def long(prompt, sample):
    return float(len(sample.text))
"""
SENDS_TOKENS = "reward.reward_model={url='http://127.0.0.1:1',send='tokens'}"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)


def asked(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["calibrate", *arguments])


def test_two_rewards_are_measured_and_compared() -> None:
    result = asked(HELD, "--by", "./own.py:right", "--by", "./own.py:long", "--max-pairs", "60", "--json", "f.json")
    assert result.exit_code == 0, result.output
    found = json.loads(Path("f.json").read_text())
    right, long = (found["rewards"][f"./own.py:{name}"] for name in ("right", "long"))
    assert found["pairs"] == 60 and right["accuracy"] == 1.0 and right["unscored"] == 0.0
    rows = [json.loads(line) for line in Path(HELD).read_text().splitlines()][:60]
    doubled = sum(len(r["rejected"]) > len(r["chosen"]) for r in rows)
    assert long["accuracy"] == pytest.approx(0.5 * (60 - doubled) / 60)
    assert long["length/longer_first"] == 1.0 and long["length/longer_better"] == 0.0
    assert long["length/padding_wins"] == 1.0 and right["length/padding_wins"] == 0.0
    assert right["refusal/above_better"] == 0.0 and right["refusal/above_worse"] == 0.5
    assert 0 < long["counter_examples/length"] < 0.5 and right["counter_examples/all"] == 0.5
    same = found["agreement"]["./own.py:right and ./own.py:long"]
    assert same == {"same_choice": 0.0, "kappa": 0.0}
    assert all(word in result.output for word in ("accuracy", "counter_examples/refusal", "kappa"))


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["none.jsonl", "--by", "./own.py:long"], ("none.jsonl",)),
        ([str(TINY / "train.jsonl"), "--by", "./own.py:long"], ("train.jsonl", "chosen", "supervised.chosen_key")),
        ([HELD, "--by", "./own.py:long", "--by", "./own.py:long"], ("--by",)),
        ([HELD, "--by", "exat"], ("exat",)),
        ([HELD, "--by", "judge"], ("judge", "reward.parts")),
        ([HELD, "--by", "./own.py:long", "--set", "data.template=chat"], ("data.template", "--tokenizer")),
        ([HELD, "--by", "./own.py:long", "--set", "train.steps=2"], ("train", "reward")),
        (
            [HELD, "--by", "reward_model", "--set", "reward.name=reward_model", "--set", SENDS_TOKENS],
            ("reward.reward_model.send", "tokens"),
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], facts: Facts) -> None:
    result = asked(*arguments)
    assert result.exit_code == 2, result.output
    check_refusal(result.output, *facts)
