"""A user's own code by its place: found, held to its Protocol, and refused in one sentence where it does not fit.

Not covered: that it does what it says; types of arguments and of what it returns (mypy's, docs/extending.md).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest
from ray import cloudpickle

from miles_like.plugins import load
from tests.support.refusals import Facts, refuses

CODE = """
from __future__ import annotations
import dataclasses

SCALE = 2.0

def double(prompt, sample):
    return SCALE * sample

def one(prompt):
    return 1.0

@dataclasses.dataclass
class Counting:
    calls: int = 0

    def __call__(self, prompt, sample):
        self.calls += 1
        return self.calls

class Needs:
    def __init__(self, limit):
        self.limit = limit

class Mute:
    pass

class Broken:
    def __init__(self):
        raise KeyError("weights")
"""


class TwoArguments(Protocol):
    def __call__(self, prompt: Any, sample: Any) -> float: ...


class Named(Protocol):
    def __call__(self, prompt: Any, *, limit: float) -> object: ...


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_parts.py"
    path.write_text(CODE)
    return path


def test_by_name_by_module_and_by_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is run once: two keys that name it share its state. A class without arguments becomes an instance; one
    that is itself called as the Protocol says is left as it is."""
    assert load("here", TwoArguments, key="k", known={"here": lambda: 7}) == 7
    double = load(f"{file}:double", TwoArguments, key="k")
    assert double("p", 4) == 8
    double.__globals__["SCALE"] = 3.0
    assert load(f"{file}:double", TwoArguments, key="k")("p", 4) == 12
    counting = load(f"{file}:Counting", TwoArguments, key="k")
    assert [counting("p", "s"), counting("p", "s")] == [1, 2]
    monkeypatch.syspath_prepend(file.parent)
    assert load("my_parts:double", TwoArguments, key="k")("p", 4) == 8
    made = load("fractions:Fraction", TwoArguments, key="k")
    assert made(1, 2) * 2 == 1


def test_what_a_file_defines_travels_to_a_process_that_has_no_such_file(file: Path) -> None:
    """A trainer's rank gets its loss from the driver: by value, also classes and the globals that they read."""
    sent = cloudpickle.dumps((load(f"{file}:double", key="k"), load(f"{file}:Counting", key="k")))
    file.unlink()
    program = f"import pickle; f, g = pickle.loads({sent!r}); print(f(0, 4), g(0, 0))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=file.parent)
    assert out.stdout.split() == ["8.0", "1"]


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("exat", ("exat", "exact", "package.module:name", "path/to/file.py:name")),
        ("no_such_module:f", ("no_such_module:f", "no_such_module")),
        ("./absent.py:f", ("absent.py",)),
        ("{file}:dubble", ("dubble", "double")),
        ("{file}:SCALE", (2.0,)),
        ("{file}:one", ("TwoArguments",)),
        ("{file}:Needs", ("limit",)),
        ("{file}:Broken", ("KeyError", "weights")),
        ("{file}:Mute", ("my_parts.py.Mute",)),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(file: Path, name: str, facts: Facts) -> None:
    with refuses(ValueError, *facts) as refused:
        load(name.replace("{file}", str(file)), TwoArguments, key="k", known={"exact": lambda: 0})
    assert "\n" not in str(refused.value)


def test_arguments_that_are_given_by_name_are_asked_for_by_name(file: Path) -> None:
    with refuses(ValueError, "my_parts.py:double", "sample", "docs/extending.md"):
        load(f"{file}:double", Named, key="k")
    (file.parent / "broken.py").write_text("def f(:\n")
    with refuses(ValueError, "broken.py:f"):
        load(f"{file.parent / 'broken.py'}:f", Named, key="k")
    (file.parent / "fails.py").write_text("{}['absent']\n")
    with refuses(ValueError, "fails.py:f", "fails.py", "KeyError", "absent"):
        load(f"{file.parent / 'fails.py'}:f", Named, key="k")
