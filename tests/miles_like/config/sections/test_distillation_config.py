"""[distillation]: what is refused names the remedy, and nothing that is given does nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from miles_like.config.load import dump_config, load_config
from miles_like.config.sections.algorithm import Keyless
from miles_like.config.sections.distillation import DistillationConfig, TeacherConfig
from miles_like.config.sections.flat import names_of, parts_of
from tests.support.refusals import Facts, refuses

CONFIGS = Path(__file__).parents[4] / "configs"
URL = {"url": "http://h:1"}
MAKE = {"config": "c", "tokenizer": "t", "corpus": "c", "validation": "v"}


def section(**given: Any) -> DistillationConfig:
    return DistillationConfig.model_validate({"mode": "alone", "teachers": {"t": URL}} | given)


def test_a_source_has_the_teacher_that_names_it_or_the_rest_s() -> None:
    d = section(teachers={"a": URL | {"sources": ["x", "y"]}, "b": URL, "c": URL | {"sources": ["z"]}})
    assert [d.teacher_of(s) for s in ("x", "y", "z", "w", "")] == ["a", "a", "c", "b", "b"]
    assert section(teachers={"a": URL | {"sources": ["x"]}}).teacher_of("w") is None


def test_who_scores_and_what_the_trainer_keeps() -> None:
    hint = {"kind": "self", "prompt": "{prompt}{answer}"}
    kinds = {"s": URL, "w": {"kind": "weights", "path": "p"}, "c": hint, "r": hint | {"weights": "reference"}}
    d = section(teachers={n: t | {"sources": [n]} for n, t in kinds.items()})
    assert d.described() == [
        "teacher s of 's': the server at http://h:1",
        "teacher w of 'w': p, beside the trainer's weights",
        "teacher c of 'c': the policy, prompted with '{prompt}{answer}'",
        "teacher r of 'r': the run's reference weights, prompted with '{prompt}{answer}'",
    ]
    assert section(teachers={"t": {"make": MAKE}}).described() == [
        "teacher t of all other sources: a server of a model that the run makes"
    ]
    assert {n: t.by_server for n, t in d.teachers.items()} == {"s": True, "w": False, "c": True, "r": False}
    assert d.reference and not section().reference


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"mode": "off"}, ("distillation.teachers", "distillation.mode", "off")),
        ({"mode": "off", "teachers": {}, "top_k": 2}, ("distillation.top_k",)),
        ({"teachers": {}}, ("distillation.mode", "alone", "[distillation.teachers.NAME]")),
        ({"mode": 0}, ("distillation.mode", 0, "off")),
        ({"top_k": "off"}, ("top_k", "off", "integer")),
        ({"top_k": -4}, ("distillation.top_k", -4, 0)),
        ({"beta": 0.5}, ("distillation.beta", 0.5, "distillation.top_k", 0)),
        ({"teachers": {"t": {}}}, ("teachers.t", "server")),
        ({"teachers": {"t": {"url": "10.0.0.7:30000"}}}, ("URL", "http://10.0.0.7:30000")),
        ({"teachers": {"t": {"url": "ftp://h:1"}}}, ("URL", "http://HOST:PORT", "https://HOST:PORT")),
        ({"teachers": {"t": {"url": "http://h:port"}}}, ("URL",)),
        ({"teachers": {"t": {"url": "https://:3"}}}, ("URL",)),
        ({"teachers": {"t": URL | {"path": "p"}}}, ("teachers.t", "server")),
        ({"teachers": {"t": {"make": MAKE, "path": "p"}}}, ("teachers.t", "server", "make", "path")),
        (
            {"teachers": {"t": URL | {"prompt": "{prompt}{answer}"}}},
            ("prompt", "server"),
        ),
        ({"teachers": {"t": {"kind": "weights"}}}, ("teachers.t", "weights", "teacher.path")),
        ({"teachers": {"t": {"kind": "weights", "path": "p", **URL}}}, ("teachers.t", "weights", "url")),
        ({"teachers": {"t": {"kind": "self"}}}, ("teachers.t", "self", "teacher.prompt")),
        ({"teachers": {"t": {"kind": "self", "prompt": "{prompt}"}}}, ("teachers.t.prompt", "{prompt}", "['prompt']")),
        (
            {"teachers": {"t": {"kind": "self", "prompt": "{answer}{hint}"}}},
            ("teachers.t.prompt", "{answer}{hint}", "['answer', 'hint']"),
        ),
        ({"teachers": {"t": {"kind": "self", "prompt": "{prompt"}}}, ("teachers.t.prompt", "'{prompt'")),
        (
            {"teachers": {"t": {"kind": "self", "prompt": "{prompt}{answer}", "path": "p"}}},
            ("teachers.t", "self", "path"),
        ),
        ({"teachers": {"a": URL, "b": URL}}, ("distillation.teachers.a", ".b")),
        (
            {"teachers": {"a": URL | {"sources": ["x"]}, "b": URL | {"sources": ["x"]}}},
            ("distillation.teachers.a", "x"),
        ),
        (
            {"request_timeout_s": 9, "teachers": {"t": {"kind": "self", "prompt": "{prompt}{answer}"}}},
            ("distillation.request_timeout_s", 9.0),
        ),
        (
            {"sequences_per_request": 9, "teachers": {"t": {"kind": "weights", "path": "p"}}},
            ("distillation.sequences_per_request", 9),
        ),
        ({"top_k": 4, "teachers": {"t": {"kind": "weights", "path": "p"}}}, ("distillation.top_k", 4, "t")),
    ],
)
def test_what_cannot_work_or_does_nothing_is_refused(given: dict[str, Any], facts: Facts) -> None:
    with refuses(ValueError, *facts):
        section(**given)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (["rollout.temperature=0.7"], ("rollout.temperature", 0.7, 1)),
        (["algorithm.shuffle_advantages=true"], ("algorithm.shuffle_advantages",)),
        (["rollout.engine=sglang"], ("clean", "url")),
        (
            ["algorithm.normalize_std=false"],
            ("algorithm.normalize_std", "False", "distillation.mode"),
        ),
        (["algorithm.name=ppo"], ("algorithm.advantage", "ppo")),
        (["algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward"], ("algorithm.kl_in", "reward")),
        (["algorithm.overlong_penalty=0.5"], ("algorithm.overlong_penalty", 0.5)),
        (["algorithm.filter=nonzero_std"], ("algorithm.filter", "nonzero_std")),
        (["algorithm.reference_every=5"], ("algorithm.reference_every", 5)),
        (["correction.kind=tis"], ("correction", "top_k", 16)),
        (
            ["distillation.teachers.clean.ulr=3"],
            ("distillation.teachers.clean.url",),
        ),
        (["distillation.teacher.clean.url=3"], ("distillation.teachers",)),
    ],
)
def test_other_sections_have_their_say(settings: list[str], facts: Facts) -> None:
    with refuses(ValueError, *facts):
        load_config(CONFIGS / "tiny_opd.toml", settings)


@pytest.mark.parametrize(
    ("other", "facts"),
    [
        ({"kind": "servr"}, ("teacher.kind", "servr", "server")),
        (URL | {"weights": "bad"}, ("teacher.weights", "bad", "reference")),
        ({"kind": "weights", "path": "p", "url": "bad"}, ("teacher.url", "bad", "weights")),
        ({"kind": "weights", "path": "p", "url": "http://me:pass9@h:1"}, ("teacher.url", "weights")),
        (URL | {"make": {"config": "c"}}, ("teacher.kind", "server", "url", "make")),
        ({"kind": "self"}, ("teacher.prompt", "{prompt}")),
        ({"path": "p", "key_file": "k"}, ("teacher.key_file", "k", "url", "path")),
    ],
)
def test_a_refused_teacher_is_named(other: dict[str, Any], facts: Facts, tmp_path: Path) -> None:
    teachers = {"one": URL | {"sources": ["x"]}, "other": other}
    file = tmp_path / "run.toml"
    file.write_text(
        f'extends = "{CONFIGS / "tiny_opd.toml"}"\n' + tomli_w.dumps({"distillation": {"teachers": teachers}})
    )
    with refuses(ValueError, "distillation.teachers.other", *facts) as e:
        load_config(file)
    assert "pass9" not in str(e.value)


@pytest.mark.parametrize("advantage", Keyless.names())
def test_an_advantage_without_keys_goes_with_teachers_alone(advantage: str) -> None:
    assert load_config(CONFIGS / "tiny_opd.toml", [f"algorithm.advantage={advantage}"]).distillation.mode == "alone"


def test_a_reference_that_teaches_may_move() -> None:
    teacher = '{ kind = "self", prompt = "{answer}. {prompt}", weights = "reference" }'
    how = [f"distillation.teachers.me={teacher}", "distillation.mode=alone", "algorithm.reference_every=5"]
    run = load_config(CONFIGS / "tiny.toml", how)
    assert run.distillation.reference and run.algorithm.parts.reference_every == 5


def test_the_page_s_configurations_are_complete(tmp_path: Path) -> None:
    page = (CONFIGS.parent / "docs" / "distillation.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", page, flags=re.S)
    seen = set()
    for block in blocks:
        file = tmp_path / "run.toml"
        file.write_text(block.replace("configs/", f"{CONFIGS}/"))
        section = load_config(file).distillation
        seen |= {(section.mode, t.part.kind, section.top_k > 0) for t in section.teachers.values()}
    kinds = set(names_of(parts_of(TeacherConfig)["part"]))
    assert {mode for mode, *_ in seen} == {"alone", "added"} and {kind for _, kind, _ in seen} == kinds
    assert len(blocks) == 5 and any(top for *_, top in seen)


def test_the_trainer_scores_at_any_temperature_and_keeps_a_reference_for_it(tmp_path: Path) -> None:
    from miles_like.config.ranks import trainer_config

    file = tmp_path / "self.toml"
    file.write_text(
        f'extends = "{CONFIGS / "tiny_2m.toml"}"\n[distillation]\nmode = "added"\n[distillation.teachers.me]\n'
        'kind = "self"\nweights = "reference"\nprompt = "{answer}{prompt}"\n[rollout]\ntemperature = 0.7\n'
    )
    config = load_config(file)
    trainer = trainer_config(config, tmp_path)
    assert trainer.reference and not trainer.reference_for_loss  # it is the teacher's: no loss asks for it
    assert trainer_config(load_config(file, ["algorithm.kl_coefficient=0.1"]), tmp_path).reference_for_loss
    assert not trainer_config(load_config(CONFIGS / "tiny_2m.toml"), tmp_path).reference
    file.write_text(dump_config(config))
    assert load_config(file) == config
