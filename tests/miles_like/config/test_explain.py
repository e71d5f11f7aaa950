"""`config explain` finds a key by its name or its last component, and the modules that read it.

Why it must hold: a message names a key, and the user asks what it is. Not covered: keys that a module reads with their
whole section.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_like.config.explain import ExplainedKey, ExplainedSection, explain
from miles_like.config.load import dotted_keys
from miles_like.config.run import RunConfig
from tests.support.refusals import Facts, refuses

ROOT = Path(__file__).parents[3]


def key(name: str) -> ExplainedKey:
    found = explain(name)
    assert isinstance(found, ExplainedKey)
    return found


def test_every_key_is_explained_with_type_default_and_meaning() -> None:
    for name in dotted_keys(RunConfig):
        found = key(name)
        assert found.name == name and found.row.type and found.row.default and found.row.meaning, name


def test_a_key_is_found_without_its_section_where_one_section_has_it() -> None:
    assert key("steps").name == "train.steps" and key("clip_high").name == "algorithm.clip_high"
    assert key("eval.sets.hard.path").name == "eval.sets.NAME.path" and key("rollout.env.HOME").name == "rollout.env"


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("temperature", ("rollout.temperature", "eval.temperature")),  # several sections
        ("trian.steps", ("train.steps",)),
        ("train.stps", ("train.steps",)),
        ("train.steps.x", ("train.steps",)),
        ("rollout.sglang.mem_fraction", ("rollout.sglang.mem_fraction_static",)),
        ("optimiser", ("optimizer",)),
    ],
)
def test_an_unknown_key_names_the_nearest_known_ones(name: str, facts: Facts) -> None:
    with refuses(ValueError, *facts):
        explain(name)


def test_readers_are_the_modules_that_use_the_value() -> None:
    assert "miles_like/run/train.py" in key("train.steps").readers
    assert key("algorithm.clip_high").readers == ["miles_like/algorithms/registry.py"]
    assert all((ROOT / name).is_file() for name in key("optimizer.lr").readers)


def test_a_section_lists_its_keys_and_sections() -> None:
    found = explain("eval")
    assert isinstance(found, ExplainedSection) and found.sections == ("eval.sets.NAME",)
    assert [row.key for row in found.keys] == ["every", "samples", "greedy", "temperature", "max_prompts"]
