"""Commands, configurations, keys and imports that pages show are ones that exist.

Why it must hold: what a reader copies must be taken. Commands are parsed by the command line's own parser, TOML is
loaded as a run's, code spans that look like a key are keys. Not covered: what a command does (test_tutorials.py runs
the tutorials); other programs.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from miles_like.cli import app
from miles_like.config.load import load_config
from miles_like.simulation.inputs.assumptions import Assumptions
from tests.support.pages import PAGES, ROOT, Block, blocks, commands, is_key, prose, sections

TOP = typer.main.get_command(app)
ALL = [block for page in PAGES for block in blocks(page)]
FILES = ("jsonl", "json", "toml", "py", "md", "npy", "safetensors", "png", "html", "so", "cfg")


def known(name: str) -> bool:
    """Whether `name` is a key of a run, or an assumption of a simulation."""
    first, _, rest = name.partition(".")
    if first != "simulation":
        return is_key(name)
    model: Any = Assumptions
    for part in rest.split("."):
        if part not in model.model_fields:
            return False
        model = model.model_fields[part].annotation
    return True


def parsed(line: str) -> list[str]:
    """What is wrong with a command line; empty: nothing. Values are not converted, files not looked at."""
    command: Any = TOP
    words, name = shlex.split(line)[1:], ["miles-like"]
    while hasattr(command, "commands"):
        while words and words[0] in ("--quiet", "--version", "--help"):
            words = words[1:]
        if not words:
            return []
        found = command.commands.get(words[0])
        if found is None:
            return [f"{' '.join(name)} has no command {words[0]!r}"]
        command, words, name = found, words[1:], [*name, words[0]]
    try:
        values, left, _ = command.make_parser(command.context_class(command)).parse_args(list(words))
    except typer.BadParameter.__base__ as e:
        return [f"{line}: {e.format_message()}"]
    wrong = [f"{line}: {left} is too much"] if left else []
    for setting in values.get("overrides") or []:
        key = setting.partition("=")[0]
        if "=" in setting and key != "KEY" and not known(key):
            wrong.append(f"{line}: no key {key}")
    for word in words:
        if re.fullmatch(r"configs/[\w/]+\.toml", word) and not (ROOT / word).exists():
            wrong.append(f"{line}: no file {word}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_of_a_page_are_taken_by_the_command_line(page: Path) -> None:
    lines = [line for block in blocks(page) for line in commands(block.text)]
    lines += [line for span in re.findall(r"`(miles-like [^`\n]+)`", prose(page)) for line in commands(span)]
    lines = [line for line in lines if not re.search(r"[a-z]\|[a-z]", line)]  # a synopsis with alternatives
    assert [wrong for line in lines for wrong in parsed(line)] == []


def test_a_wrong_command_is_found() -> None:
    assert parsed("miles-like train configs/tiny.toml --rundir x") and parsed("miles-like trian x")
    assert parsed("miles-like train configs/no.toml --run-dir x") and parsed("miles-like watch a b")
    assert parsed("miles-like train configs/tiny.toml --run-dir x --set train.stepz=3")
    seen = [one.split() for one in commands("miles-like a [--b C | --d]...  # e\n miles-like f \\\n  --g\n")]
    assert seen == [["miles-like", "a", "--b", "C", "--d"], ["miles-like", "f", "--g"]]
    assert parsed("miles-like train configs/tiny.toml --run-dir x --set train.steps=3 --resume") == []


def flattened(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and (name in sections() or not is_key(name)):
            yield from flattened(value, f"{name}.")
        else:
            yield name


OF_RUNS = [block for block in ALL if block.language == "toml"]


@pytest.mark.parametrize("block", OF_RUNS, ids=lambda b: b.where)
def test_toml_of_a_page_has_keys_that_exist(block: Block) -> None:
    table = tomllib.loads(block.text)
    table.pop("extends", None)
    assert [name for name in flattened(table) if not known(name)] == []


WHOLE = [block for block in OF_RUNS if block.text.startswith("extends")]


@pytest.mark.parametrize("block", WHOLE, ids=lambda b: b.where)
def test_a_whole_configuration_of_a_page_is_loaded(block: Block, tmp_path: Path) -> None:
    text = re.sub(r'^extends = "(?:.*/)?([\w]+\.toml)"', rf'extends = "{ROOT}/configs/\1"', block.text)
    (tmp_path / "run.toml").write_text(text)
    load_config(tmp_path / "run.toml")


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


OURS = ("miles_like", "megatron_bridge", "rollout", "routing_replay", "quant")


def missing(module: str, name: str) -> bool:
    """Whether an import would fail, without importing: a module of the project is read, of others found."""
    if module.split(".")[0] not in OURS:
        return importlib.util.find_spec(module.split(".")[0]) is None
    path = ROOT / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return True
    inside = re.search(rf"\b{re.escape(name)}\b", file.read_text("utf-8"))
    return not (not name or inside or (path / f"{name}.py").exists() or (path / name).is_dir())


SIGNATURE = re.compile(r"(?:async )?def \w+\([^\n]*\n")  # without a body
PYTHON = [block for block in ALL if block.language == "python"]


@pytest.mark.parametrize("block", PYTHON, ids=lambda b: b.where)
def test_python_of_a_page_parses_and_its_imports_exist(block: Block) -> None:
    text = f"{block.text.rstrip()}: ..." if SIGNATURE.fullmatch(block.text) else block.text
    tree = ast.parse(text)
    assert [(module, name) for module, name in imported(tree) if missing(module, name)] == []


def test_an_import_that_does_not_exist_is_found() -> None:
    assert missing("miles_like.no", "x") and missing("miles_like.types", "NoSuchType")
    assert not missing("miles_like.types", "Sample") and not missing("miles_like", "types")


KEY = re.compile(rf"(?:{'|'.join(sorted({name.split('.')[0] for name in sections()}))})(?:\.[a-z][a-z0-9_]*)+")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_spans_that_look_like_keys_are_keys(page: Path) -> None:
    text = prose(page)
    if page.name == "coming_from.md":  # the first cell of a row has another project's
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    spans = {span.partition("=")[0].strip() for span in re.findall(r"`([^`\n]+)`", text)}
    named = {span for span in spans if KEY.fullmatch(span) and span.rpartition(".")[2] not in FILES}
    if page.name == "simulation.md":  # its tables have assumptions without the section's name
        named = {name for name in named if not known(f"simulation.{name}")}
    assert sorted(name for name in named if not is_key(name)) == []


ROW = re.compile(r'^\| `([^`]+)` \| ((?:`"[^"`]*"`(?:, )?)+) \|', re.MULTILINE)  # a key of one of several words
CHOICES = {
    key: set(re.findall(r'"([^"]*)"', words))
    for key, words in ROW.findall((ROOT / "docs" / "configuration_keys.md").read_text("utf-8"))
}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_spans_that_set_a_key_have_one_of_its_values(page: Path) -> None:
    """`replay.mode = "r3"`: of keys whose type is a list of words."""
    spans = re.findall(r'`([a-z_.]+) = "([^"`]*)"`', prose(page))
    assert len(CHOICES) > 20
    assert [(key, value) for key, value in spans if key in CHOICES and value not in CHOICES[key]] == []
