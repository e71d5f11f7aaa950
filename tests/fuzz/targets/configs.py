"""Configurations: `train --dry-run` of a changed TOML file and `--set` options.

An accepted one must dump to TOML that loads to an equal configuration.
"""

from __future__ import annotations

import functools
import random
import tomllib
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel

from miles_like.config.load import dump_config, load_config
from miles_like.config.run import RunConfig
from tests.fuzz.commands import command
from tests.fuzz.mutate import changed, spoiled, value
from tests.fuzz.pool import Case, Outcome, long_tier

CASES = 1_000
CONFIGS = Path(__file__).parents[3] / "configs"
LARGE = ("deepseek_v3_fp8.toml", "kimi_k2_int4_qat.toml", "qwen3_30b_a3b.toml")  # a second of CPU each
INTEGERS = (0, -1, 1, 2, 3, 4, 5, 8, 32, 64, 100, 4096, 10**6, 2**31, 2**40, 2**62)
FLOATS = (0.0, -1.0, 1e-9, 0.1, 0.5, 1.0, 2.0, 3.5, 600.0, 1e9, 1e30, 1e308)
NAMES = (
    *(
        "",
        "x",
        "a" * 300,
        "\0",
        "./x.py:f",
        "math:floor",
        "os.path:join",
        "no_such:f",
        "exact",
        "math",
        "remote",
        "grpo",
    ),
    *("/dev/zero", "/etc/passwd", "/", ".", "http://127.0.0.1:1", "https://user:pw@host/x", "auto", "nonzero_std"),
)
HERE = "@configs@"  # stands for CONFIGS in a case


@functools.cache
def keys() -> dict[str, Any]:
    """section.key of every field of the configuration -> its type."""

    def below(model: type[BaseModel], at: str) -> dict[str, Any]:
        found = {}
        for name, field in model.model_fields.items():
            found[f"{at}{name}"] = field.annotation
            for inner in (field.annotation, *get_args(field.annotation)):
                if isinstance(inner, type) and issubclass(inner, BaseModel):
                    found |= below(inner, f"{at}{name}.")
        return found

    return below(RunConfig, "")


def fitting(rng: random.Random, kind: Any, depth: int = 0) -> Any:
    """A value of a field's type, so that what follows the check of types is reached."""
    inner = [a for a in get_args(kind) if a is not type(None) and a is not ...]
    if get_origin(kind) is Literal:
        return rng.choice(inner)
    if get_origin(kind) in (Union, UnionType, Annotated):
        return fitting(rng, rng.choice(inner) if get_origin(kind) is not Annotated else inner[0], depth)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return rng.choice(list(kind)).value
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        names = (
            rng.sample(list(kind.model_fields), rng.randrange(min(4, len(kind.model_fields)) + 1)) if not depth else []
        )
        return {name: fitting(rng, kind.model_fields[name].annotation, depth + 1) for name in names}
    if get_origin(kind) in (tuple, list):
        return [fitting(rng, rng.choice(inner), depth + 1) for _ in range(rng.randrange(4))]
    if get_origin(kind) is dict:
        return {rng.choice(("a", "math", "")): fitting(rng, inner[-1], depth + 1) for _ in range(rng.randrange(3))}
    return rng.choice({bool: (True, False), int: INTEGERS, float: FLOATS, str: NAMES}.get(kind, NAMES))


@functools.cache
def names() -> list[str]:
    return sorted(p.name for p in CONFIGS.glob("*.toml"))


def toml(found: object) -> str:
    """A value as TOML, or as text that is none."""
    try:
        return tomli_w.dumps({"x": found}).partition("=")[2].strip()
    except (TypeError, ValueError):
        return str(found)


def draw(rng: random.Random) -> Case:
    base = rng.choice(names())
    if base in LARGE and rng.random() < 0.8:
        base = "tiny.toml"
    text = f'extends = "{HERE}/{base}"\n'
    kind = rng.randrange(6)
    sets = []
    if kind == 0:
        text = spoiled(rng, (CONFIGS / base).read_bytes()).decode("utf-8", "surrogateescape")
    elif kind == 1:
        depth = rng.choice((3, 200, 3_000, 100_000))
        text += rng.choice((f"x = {'[' * depth}{']' * depth}\n", f"{'.'.join('x' * depth)} = 1\n", f"[{'[' * depth}"))
    elif kind == 2:
        text = tree_text(changed(rng, tomllib.loads((CONFIGS / base).read_text(encoding="utf-8"))))
    else:
        drawn = [rng.choice(list(keys().items())) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        sets = [f"{key}={toml(value(rng) if rng.random() < 0.4 else fitting(rng, of))}" for key, of in drawn]
    return {"text": text, "sets": sets}


def tree_text(tree: Any) -> str:
    try:
        return tomli_w.dumps(tree)
    except (TypeError, ValueError, AttributeError):
        return str(tree)


def play(case: Case, folder: Path) -> Outcome:
    path = folder / "run.toml"
    text = case["text"].replace(HERE, str(CONFIGS)).replace('"./', f'"{CONFIGS}/')
    if 'extends = "tiny' in text:
        text = text.replace('extends = "', f'extends = "{CONFIGS}/')
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    options = [word for one in case["sets"] for word in ("--set", one)]
    found = command("train", str(path), "--run-dir", str(folder / "run"), "--dry-run", *options)
    if found.kind != "accepted":
        return found
    config = load_config(path, case["sets"])
    again = folder / "again.toml"
    again.write_text(dump_config(config), encoding="utf-8")
    if load_config(again) != config:
        return Outcome(kind="unsound", words="the dumped configuration loads to another one")
    if (folder / "run").exists():
        return Outcome(kind="unsound", words="a dry run made the run directory")
    return found


def run(cases: int, seed: int) -> dict[str, float | int | str]:
    return long_tier("configs", cases, seed)
