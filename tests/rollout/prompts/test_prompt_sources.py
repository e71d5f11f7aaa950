"""Several sources: their shares, their end, duplicates, what rests, and what a saved position refuses.

The law: what is dealt is a function of (seed, prompts dealt, observations), at any point where it is saved. Not
covered: that the loop observes in an order that does not depend on the clock.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rollout.prompts.config import CurriculumConfig, DataConfig
from rollout.prompts.curriculum import STRATA, stratum
from rollout.prompts.mix import PromptSource
from tests.support.refusals import Facts, refuses

TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "configs" / "tiny")
SIZES = {"a": 2, "b": 3, "c": 5}
WEIGHTS = {"a": 1.0, "b": 2.5, "c": 0.5}
PASSED, FAILED, MIXED = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sources")
    for name, n in SIZES.items():
        write(made / f"{name}.jsonl", [{"id": f"{name}{i}", "prompt": f"{i}+1="} for i in range(n)])
    return made


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def mixed(folder: Path, *, seed: int = 0, own: dict[str, Any] | None = None, **data: Any) -> PromptSource:
    sources = {n: {"path": str(folder / f"{n}.jsonl"), "weight": w, **(own or {})} for n, w in WEIGHTS.items()}
    return PromptSource(DataConfig.model_validate({"sources": sources, **data}), TOKENIZER, seed=seed)


def test_shares_are_those_of_the_weights_at_every_point(folder: Path) -> None:
    """Not only in the mean: each step of training is to have its mixture. A whole number is never off by more than 1
    here, the closed form of Webster's divisors for these weights."""
    source, dealt = mixed(folder), Counter[str]()
    for n in range(1, 401):
        (p,) = source.take(1)
        dealt[p.source] += 1
        for name, weight in WEIGHTS.items():
            assert abs(dealt[name] - n * weight / sum(WEIGHTS.values())) <= 1, (n, dealt)
    assert dealt == {"a": 100, "b": 250, "c": 50}


def test_every_row_comes_once_an_epoch_of_its_source(folder: Path) -> None:
    """Whatever the weights, and in another order each time."""
    source = mixed(folder)
    dealt = [p.id for p in source.take(400)]
    for name, n in SIZES.items():
        own = [i for i in dealt if i[0] == name]
        epochs = [own[i : i + n] for i in range(0, len(own) - n + 1, n)]
        assert all(len(set(e)) == n for e in epochs) and len({tuple(e) for e in epochs}) > 1
    assert [p.id for p in mixed(folder, seed=1).take(400)] != dealt


CURRICULUM = CurriculumConfig(min_pass_rate=0.1, max_pass_rate=0.9, rest_epochs=2)
ACTIONS = st.lists(
    st.one_of(
        st.integers(0, 4),  # take so many
        st.tuples(st.sampled_from([f"{n}{i}" for n, k in SIZES.items() for i in range(k)]), st.sampled_from("pfm")),
        st.just("save"),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS, epochs=st.sampled_from([None, 1, 4]))
def test_a_saved_position_goes_on_as_if_never_stopped(folder: Path, actions: list[Any], epochs: int | None) -> None:
    """Saved through JSON at any point, into a new source: both deal the same, learn the same and end the same."""
    keys = {"curriculum": CURRICULUM, "epochs": epochs}
    whole, parts = mixed(folder, **keys), mixed(folder, **keys)
    outcomes = {"p": PASSED, "f": FAILED, "m": MIXED}
    for action in [*actions, 7]:
        if action == "save":
            state = json.loads(json.dumps(parts.state()))
            parts = mixed(folder, **keys)
            parts.restore(state)
        elif isinstance(action, int):
            asked = whole.take(action)
            assert [p.id for p in asked] == [p.id for p in parts.take(action)]
            assert len(asked) == action or whole.ended
        else:
            prompt_id, outcome = action
            for source in (whole, parts):
                source.observe([(prompt_id, outcomes[outcome])])
    assert whole.state() == parts.state() and whole.ended == parts.ended


def test_a_source_that_ends_leaves_its_share_and_all_end(folder: Path) -> None:
    """Each row as often as there are epochs, then fewer than were asked for, then none; no call waits for more."""
    source = mixed(folder, epochs=2)
    dealt = source.take(19)
    assert not source.ended
    dealt += source.take(19)
    assert source.ended and source.take(3) == [] and not mixed(folder).ended
    assert Counter(p.id for p in dealt) == {f"{n}{i}": 2 for n, k in SIZES.items() for i in range(k)}


def test_prompts_out_of_bounds_rest_and_come_again(folder: Path) -> None:
    """For `rest_epochs` turns after each measurement; those that were never measured, or are within, always come."""
    path = str(folder / "b.jsonl")
    config = DataConfig(train=path, curriculum=CURRICULUM)
    source = PromptSource(config, TOKENIZER)
    source.take(3)
    source.observe([("b0", PASSED), ("b1", MIXED), ("b2", [])])
    assert len(source.state()["rests"]) == 1
    assert [{p.id for p in source.take(k)} for k in (2, 2, 3)] == [{"b1", "b2"}, {"b1", "b2"}, {"b0", "b1", "b2"}]
    source.observe([("b0", PASSED), ("b0", MIXED), ("b1", FAILED)])  # the last one counts
    assert [{p.id for p in source.take(k)} for k in (2, 2, 3)] == [{"b0", "b2"}, {"b0", "b2"}, {"b0", "b1", "b2"}]
    source.observe([(i, FAILED) for i in ("b0", "b1", "b2")])
    assert len({p.id for p in source.take(3)}) == 3  # where all rest, their epochs pass at once
    half = CurriculumConfig(max_pass_rate=0.5, pass_at=0.5)
    source = PromptSource(DataConfig(train=path, curriculum=half), TOKENIZER)
    source.observe([("b0", [0.5, 0.6, 0.4]), ("b1", [0.5, 0.4])])
    assert len(source.state()["rests"]) == 1
    with refuses(ValueError, "b.jsonl", "z"):
        source.observe([("z", MIXED)])


def test_the_difficulty_of_a_step_is_measured(folder: Path) -> None:
    """Over the prompts of one call, those that a filter discarded too; a prompt without a score counts for nothing."""
    assert [stratum(x) for x in (0, 0.25, 0.26, 0.74, 0.75, 0.99, 1)] == [
        *("never", "hard", "medium", "medium", "easy", "easy", "always"),
    ]
    source = PromptSource(DataConfig(train=str(folder / "b.jsonl"), curriculum=CURRICULUM), TOKENIZER)
    found = source.observe([("b0", [1.0, 1.0, 1.0, 0.0]), ("b1", FAILED), ("b2", [])])
    shares = {name: found.pop(f"curriculum/share/{name}") for name in STRATA}
    assert shares == {"never": 0.5, "hard": 0, "medium": 0, "easy": 0.5, "always": 0}
    assert found == {"curriculum/pass_rate/mean": 0.375, "curriculum/resting_frac": 1 / len(source)}
    assert source.observe([]) == {}
    keys = [*found, *(f"curriculum/share/{name}" for name in STRATA)]
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_without_a_curriculum_nothing_is_learnt(folder: Path) -> None:
    source = mixed(folder)
    assert source.observe([("a0", PASSED)]) == {}
    assert source.state()["rests"] == {}


def test_a_source_has_its_own_columns_template_and_name(folder: Path, tmp_path: Path) -> None:
    """What it leaves out is as [data] says; a row that says where it is from is believed."""
    asks = write(tmp_path / "asks.jsonl", [{"question": "1+1=", "to": "2"}, {"question": "2+2=", "source": "web"}])
    talks = write(tmp_path / "talks.jsonl", [{"prompt": [{"role": "user", "content": "3+3="}], "label": "6"}])
    sources = {
        "asks": {"path": asks, "prompt_key": "question", "answer_key": "to", "instruction": " ?", "template": "chat"},
        "talks": {"path": talks},
    }
    config = DataConfig.model_validate({"sources": sources, "instruction": " !"})
    found = PromptSource(config, TOKENIZER)
    assert [(p.text, p.answer, p.source) for p in found.all()] == [
        ("user: 1+1= ?\nassistant: ", "2", "asks"),
        ("user: 2+2= ?\nassistant: ", "", "web"),
        ("user: 3+3= !\nassistant: ", "6", "talks"),
    ]
    assert found.find(found.all()[1].id) == found.all()[1] and len(found) == 3


def test_one_id_in_two_sources_is_named_with_both_places(folder: Path, tmp_path: Path) -> None:
    """The ledger counts by id: two prompts under one would be trained as one."""
    again = write(tmp_path / "again.jsonl", [{"id": "x", "prompt": "9+9="}, {"id": "b1", "prompt": "8+8="}])
    sources = {"b": {"path": str(folder / "b.jsonl")}, "again": {"path": again}}
    with refuses(ValueError, "b.jsonl", 2, "again.jsonl", 2, "b1"):
        PromptSource(DataConfig.model_validate({"sources": sources}), TOKENIZER)


def test_a_file_that_changed_since_the_checkpoint_is_named(folder: Path, tmp_path: Path) -> None:
    """With how many prompts it has and had; another token or answer is another prompt, another order another run. The
    sources that are right are not moved."""
    rows = [{"id": f"r{i}", "prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    path = write(tmp_path / "rows.jsonl", rows)
    sources = {"b": {"path": str(folder / "b.jsonl")}, "rows": {"path": path}}
    config = DataConfig.model_validate({"sources": sources})
    before = PromptSource(config, TOKENIZER)
    before.take(3)
    state = json.loads(json.dumps(before.state()))
    for changed, n in (
        (rows[:3], 3),
        ([*rows, {"id": "r4", "prompt": "4+1=", "answer": "5"}], 5),
        ([{**rows[0], "prompt": "0+2="}, *rows[1:]], 4),
        ([{**rows[0], "answer": "7"}, *rows[1:]], 4),
        ([{**rows[0], "tests": "what a reward reads"}, *rows[1:]], 4),
        (rows[::-1], 4),
    ):
        write(tmp_path / "rows.jsonl", changed)
        after = PromptSource(config, TOKENIZER)
        fresh = after.state()
        with refuses(ValueError, "rows.jsonl", n):
            after.restore(state)
        assert after.state() == fresh
    write(tmp_path / "rows.jsonl", rows)
    PromptSource(config, TOKENIZER).restore(state)
    with refuses(ValueError, "train", "b", "rows"):
        PromptSource(DataConfig(train=path), TOKENIZER).restore(state)


@pytest.mark.parametrize(
    "damage",
    [
        {"sources": {}},
        {"rests": None},
        {"rests": {"unknown": 1}},
        {"rests": {"b0": 0}},
        {"sources": {"train": None}},
        {"position": 3},
        {"epoch": -1},
        {"dealt": "3"},
    ],
)
def test_a_damaged_position_is_refused(folder: Path, damage: dict[str, Any]) -> None:
    """In one sentence; never a run that deals something else."""
    source = PromptSource(DataConfig(train=str(folder / "b.jsonl")), TOKENIZER)
    state = json.loads(json.dumps(source.state()))
    if damage.keys() <= state.keys():
        state |= damage
    else:
        state["sources"]["train"] |= damage
    with refuses(ValueError) as caught:
        source.restore(state)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        ({}, ("data.train",)),
        ({"train": "x", "sources": {"a": {"path": "y"}}}, ("data.train", "x")),
        ({"sources": {"a": {"path": "y", "weight": 2}}}, ("data.sources.a.weight",)),
        ({"train": "x", "curriculum": {}}, ("[data.curriculum]", "min_pass_rate", "max_pass_rate")),
        (
            {"train": "x", "curriculum": {"min_pass_rate": 0.5, "max_pass_rate": 0.4}},
            ("data.curriculum.min_pass_rate", 0.5, "max_pass_rate"),
        ),
    ],
)
def test_keys_that_make_no_sense_are_refused(data: dict[str, Any], facts: Facts) -> None:
    with refuses(ValueError, *facts):
        DataConfig.model_validate(data)


def test_keys_that_would_do_nothing_in_a_run_are_refused() -> None:
    curriculum = DataConfig(train="x", curriculum=CURRICULUM)
    curriculum.check_run(has_eval_set=False, has_reward=True)
    with refuses(ValueError, "[data.curriculum]"):
        curriculum.check_run(has_eval_set=True, has_reward=False)
    DataConfig(train="x").check_run(has_eval_set=False, has_reward=False)
    for how in ("drop", "refuse"):
        with refuses(ValueError, "data.decontaminate", how):
            DataConfig(train="x", decontaminate=how).check_run(has_eval_set=False, has_reward=True)
