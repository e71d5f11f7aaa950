"""The resolved text of the sections that are held as parts: keys, order and values in a run's config.toml do not
change. `resolved.json` has one line a case: file, settings, and the sections that differ from tiny.toml's, without the
keys that are not set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles_like.config.load import checked, dump_config, load_config, parse_toml
from miles_like.config.run import RunConfig

CONFIGS = Path(__file__).parents[3] / "configs"
RECORDED: list[tuple[str, list[str], dict[str, dict[str, Any]]]] = json.loads(
    Path(__file__).with_name("resolved.json").read_text().replace("<root>", str(CONFIGS.parent))
)
TINY = RECORDED[0][2]


@pytest.mark.parametrize(("file", "settings", "sections"), RECORDED, ids=[" ".join([f, *s]) for f, s, _ in RECORDED])
def test_the_resolved_text_stays_as_it_was(file: str, settings: list[str], sections: dict[str, dict[str, Any]]) -> None:
    config = load_config(CONFIGS / file, settings)
    found = config.model_dump(mode="json")
    text = parse_toml(dump_config(config))
    for name, usual in TINY.items():
        wanted = {key: sections.get(name, usual).get(key) for key in usual}
        assert json.dumps(found[name]) == json.dumps(wanted), name
        assert text[name].keys() == {key for key in wanted if wanted[key] is not None}
    assert checked(RunConfig, text, file) == config
