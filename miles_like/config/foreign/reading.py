"""Reads a configuration of another project: its keys and values, and which project's they are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from miles_like.config.foreign.shell import read_commands
from miles_like.config.load import CONFIG_BYTES, parse_toml
from miles_like.limits.regular_files import read_text

Project = Literal["verl", "slime", "miles", "prime-rl"]
PROJECTS: tuple[Project, ...] = get_args(Project)
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"(^|/)\w*train\w*\.py$|^verl\.|main_ppo")
_REDIRECTED = re.compile(r"\d*[<>]")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_DEEPEST = 32


def read_foreign(file: Path, project: str | None = None) -> tuple[Project, dict[str, Any]]:
    """The project, and key -> value: dotted keys, or names of flags. Raises ValueError for a file that cannot be read
    or has no keys of a known project."""
    if project is not None and project not in PROJECTS:
        raise ValueError(f"--from {project!r}: choose one of {', '.join(PROJECTS)}")
    try:
        text = read_text(file, CONFIG_BYTES)
        found = _read(file, text)
    except FileNotFoundError:
        raise ValueError(f"file not found: {file}: pass a configuration of {', '.join(PROJECTS)}") from None
    except ValueError as e:
        raise ValueError(f"{file} cannot be read: {e}") from None
    if not found:
        raise ValueError(
            f"{file} has neither overrides (section.key=value) nor flags (--name value): pass verl's YAML or "
            "script, slime's or Miles's script, or prime-rl's TOML"
        )
    known = PROJECTS[PROJECTS.index(project)] if project in PROJECTS else _project(file, found, text)
    if known == "verl" and not any(key.startswith("actor_rollout_ref.") for key in found):
        raise ValueError(
            f"{file} has no key actor_rollout_ref.*: pass a configuration of main_ppo, the only verl program "
            "that can be imported"
        )
    return known, found


def _read(file: Path, text: str) -> dict[str, Any]:
    if file.suffix == ".toml":
        return dict(_flat(parse_toml(text)))
    if file.suffix in (".yaml", ".yml"):
        return dict(_flat(_yaml(text)))
    words = _words_of_program(read_commands(text))
    return dict(_overrides(words)) or dict(_flags(words))


def _project(file: Path, found: Mapping[str, Any], text: str) -> Project:
    """slime and Miles, which share flags, differ by the name in the file."""
    if file.suffix == ".toml":
        return "prime-rl"
    if any("." in key for key in found):
        return "verl"
    return "miles" if re.search(r"\bmiles\b", text, re.IGNORECASE) else "slime"


def _words_of_program(commands: list[list[str]]) -> list[str]:
    """The words after the training program; of a file without one, all words."""
    for command in commands:
        for i, word in enumerate(command):
            if _PROGRAM.search(word):
                words = command[i + 1 :]
                end = next((n for n, one in enumerate(words) if _REDIRECTED.match(one)), len(words))
                return words[:end]
    return [word for command in commands for word in command]


def _overrides(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Hydra's `key=value`; one with `~` removes the key."""
    for word in words:
        if (found := _OVERRIDE.fullmatch(word)) is not None:
            yield found[1], None if word.startswith("~") else _parsed(found[2])


def _flags(words: list[str]) -> Iterator[tuple[str, Any]]:
    """`--name value...` and `--name=value`; without a value true. A value that begins with a letter stays text."""
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if name:
            of = [_parsed(value) for value in values]
            yield name, True if not of else of[0] if len(of) == 1 else of
        name, equals, value = word.removeprefix("--").partition("=")
        values = [value] if equals else []


def _parsed(text: str) -> Any:
    """A value of the command line: YAML, with numbers as Python writes them."""
    if _NUMBER.fullmatch(text):
        number = float(text)
        return number if re.search(r"[.eE]", text) or not math.isfinite(number) else int(text)
    return _numbers(_yaml(text, text)) if text else ""


def _numbers(value: Any) -> Any:
    """YAML 1.1 takes 1e-6 for text."""
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _yaml(text: str, otherwise: Any = None) -> Any:
    """Raises ValueError for invalid YAML, or returns `otherwise` if it is given."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.composer.ComposerError(problem="an alias", problem_mark=self.peek_event().start_mark)
            return super().compose_node(parent, index)

    if text.count("[") + text.count("{") > _DEEPEST and otherwise is not None:
        return otherwise
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as e:
        if otherwise is not None:
            return otherwise
        mark = getattr(e, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}: {getattr(e, 'problem', '')}"
        raise ValueError(f"invalid YAML{where}") from None


def _flat(tree: Any, before: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted keys. Interpolations (`${...}`) repeat another key, and hydra's own keys are no settings."""
    if not isinstance(tree, Mapping):
        raise ValueError("it is not a table of sections")
    if depth > _DEEPEST:
        raise ValueError(f"sections are nested more than {_DEEPEST} deep")
    for key, value in tree.items():
        name = f"{before}{key}"
        if key in ("defaults", "hydra", "_target_"):
            continue
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.", depth + 1)
        elif not (isinstance(value, str) and value.startswith("${")):
            yield name, _numbers(value)
