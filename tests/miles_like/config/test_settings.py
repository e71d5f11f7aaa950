"""`config show` prints a configuration that is the same one, and the source of each value.

Why it must hold: a user copies what is printed, and looks for a value where it is printed to be set. Not covered: the
meaning of keys.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_like.config.load import SET, checked, parse_toml
from miles_like.config.run import RunConfig
from miles_like.config.settings import DEFAULT, DERIVED, Settings, as_toml, differences, read_settings

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = CONFIGS / "tiny.toml"
PRESETS = [
    [],
    ["algorithm=dapo", "algorithm.filter=off"],  # the default of another preset
    ["algorithm=gspo", "algorithm.clip_high=0.28"],
    ["algorithm.advantage=ppo", "algorithm.gamma=0.9", "critic.lr=1e-5"],
    ["correction.kind=mis", "correction.level=sequence"],
    [
        "reward.parts={format=1.0}",
        "reward.format.patterns={a='x'}",
        "rollout.env.A='b'",
        "data.curriculum.max_pass_rate=0.9",
    ],
    ["eval.sets.a.path=./a.jsonl", "eval.sets.b={path='./b.jsonl',greedy=false}"],
]


def sources(settings: Settings) -> dict[str, str]:
    return {one.name: one.source for one in settings.every}


@pytest.mark.parametrize("every", [False, True], ids=["differing", "all"])
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_what_is_shown_is_the_same_configuration(path: Path, every: bool) -> None:
    settings = read_settings(path)
    text = "\n".join(as_toml(settings, every=every))
    assert checked(RunConfig, parse_toml(text), "shown") == settings.config


@pytest.mark.parametrize("overrides", PRESETS, ids=lambda overrides: " ".join(overrides)[:30])
def test_defaults_of_presets_and_parts_are_not_shown_and_come_back(overrides: list[str]) -> None:
    settings = read_settings(TINY, overrides)
    text = "\n".join(as_toml(settings))
    assert checked(RunConfig, parse_toml(text), "shown") == settings.config
    assert "normalize_std" not in text and "tau_pos" not in text


def test_a_value_names_the_last_file_that_sets_it(tmp_path: Path) -> None:
    base, child = tmp_path / "base.toml", tmp_path / "child.toml"
    base.write_text(f'extends = "{TINY}"\n[train]\nsteps = 3\ngroups_per_step = 4\n[rollout.sglang]\ntp_size = 2\n')
    child.write_text('extends = "base.toml"\n[train]\nsteps = 5\n[rollout]\nsglang = false\n')
    found = sources(read_settings(child, ["optimizer.lr=1e-3"]))
    assert found["train.steps"] == str(child) and found["train.groups_per_step"] == str(base)
    assert found["data.train"] == str(TINY) and found["model.make.lr"] == str(CONFIGS / "tiny" / "model.toml")
    assert found["optimizer.lr"] == SET and found["rollout.sglang.tp_size"] == DEFAULT
    assert found["reward.name"] == DERIVED and found["seed"] == str(TINY)


def test_a_run_directory_is_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(TINY.read_text().replace('"tiny/', f'"{CONFIGS}/tiny/'))
    assert sources(read_settings(tmp_path))["train.steps"] == str(tmp_path / "config.toml")


def test_differences_are_the_keys_that_were_changed() -> None:
    a, b = read_settings(TINY), read_settings(TINY, ["train.steps=7", "rollout.env.A='b'", "optimizer.lr=1e-3"])
    assert list(differences(a, b)) == [
        ("optimizer.lr", "0.0003", "0.001"),
        ("train.steps", "100", "7"),
        ("rollout.env", "{}", "not set"),
        ("rollout.env.A", "not set", '"b"'),
    ]
    assert list(differences(a, a)) == []
