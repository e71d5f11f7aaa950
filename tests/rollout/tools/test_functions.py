"""Python functions as tools: what the model reads of them, and what it is answered."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from miles_like.types import EnvironmentLost
from rollout.chat.turns import Call
from rollout.tools.functions import FunctionTool
from rollout.tools.toolset import Toolset
from tests.support.refusals import refuses


class Place(BaseModel):
    city: str
    country: str = "France"


def weather(place: Place, days: int = 1, unit: Literal["C", "F"] = "C", schema: str | None = None) -> str:
    """Weather of a place.

    Args:
        place: where
        days: how many days,
            from today on
    """
    return f"{place.city} {place.country} {days} {unit} {schema}"


async def add(a: Annotated[float, Field(description="first")], b: float) -> float:
    """Adds two numbers."""
    await asyncio.sleep(0)
    return a + b


@dataclass
class Point:
    x: int


def point(x: int) -> dict[str, Any]:
    """A point."""
    return {"point": Point(x), "é": [None, True]}


def broken(x: int) -> int:
    """Divides."""
    return 1 // x


def slow() -> str:
    """Sleeps."""
    time.sleep(0.5)
    return "late"


async def late() -> str:
    """Sleeps."""
    await asyncio.sleep(5)
    return "late"


def raises_timeout() -> str:
    """Has a time limit inside."""
    raise TimeoutError("inside")


def lost() -> str:
    """Its machine is gone."""
    raise EnvironmentLost("no machine")


def toolset(*functions: Any, **how: Any) -> Toolset:
    given = {"timeout_s": 5.0, "max_chars": 1000} | how
    return Toolset([FunctionTool(f, f"tool {f.__name__}") for f in functions], **given)


def answer(tools: Toolset, name: str, arguments: Any, status: str = "ok") -> tuple[str, str]:
    call = Call(name=name, arguments=arguments, text="", status=status)
    result = asyncio.run(tools.answer(call))
    return result.status, result.text


def test_the_schema_is_of_types_and_docstring() -> None:
    spec = FunctionTool(weather, "tool").spec["function"]
    assert (spec["name"], spec["description"]) == ("weather", "Weather of a place.")
    parameters = spec["parameters"]
    assert parameters["required"] == ["place"] and list(parameters["properties"]) == ["place", "days", "unit", "schema"]
    assert parameters["properties"]["days"] == {
        "default": 1,
        "description": "how many days, from today on",
        "type": "integer",
    }
    assert parameters["properties"]["unit"]["enum"] == ["C", "F"]
    assert parameters["$defs"]["Place"]["required"] == ["city"]
    assert FunctionTool(add, "tool").spec["function"]["parameters"]["properties"]["a"]["description"] == "first"
    assert FunctionTool(slow, "tool").spec["function"]["parameters"] == {"properties": {}, "type": "object"}


def test_the_schema_is_that_of_transformers() -> None:
    """For the types that transformers describes."""
    from transformers.utils import get_json_schema

    def count(words: list[str], most: int, exact: bool = True) -> int:
        """
        Counts words.

        Args:
            words: what is counted
            most: the largest count
            exact: whether case matters
        """
        return len(words)

    theirs, ours = get_json_schema(count)["function"], FunctionTool(count, "tool").spec["function"]
    assert (ours["name"], ours["description"]) == (theirs["name"], theirs["description"])
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]
    for name, wanted in theirs["parameters"]["properties"].items():
        assert wanted.items() <= ours["parameters"]["properties"][name].items()


def test_calls_are_answered() -> None:
    tools = toolset(weather, add, point)
    assert answer(tools, "weather", {"place": {"city": "Lyon"}, "days": "2"}) == ("ok", "Lyon France 2 C None")
    assert answer(tools, "add", {"a": 1, "b": 2.5}) == ("ok", "3.5")
    assert answer(tools, "point", {"x": 1}) == ("ok", '{"point":{"x":1},"é":[null,true]}')


@pytest.mark.parametrize(
    ("name", "arguments", "given", "status", "words"),
    [
        ("add", {"a": 1}, "ok", "wrong_arguments", ("b", "required")),
        ("add", {"a": 1, "b": 2, "c": 3}, "ok", "wrong_arguments", ("c",)),
        ("add", {"a": "x", "b": 2}, "ok", "wrong_arguments", ("a", "number")),
        ("sub", {"a": 1}, "ok", "unknown_tool", ("'sub'", "add, broken")),
        ("sub", {"a": 1}, "unknown_tool", "unknown_tool", ("'sub'",)),
        ("broken", {"x": 0}, "ok", "failed", ("ZeroDivisionError",)),
        ("raises_timeout", {}, "ok", "failed", ("TimeoutError", "inside")),
        ("slow", {}, "ok", "timeout", ("0.2 s",)),
        ("late", {}, "ok", "timeout", ("0.2 s",)),
        ("add", None, "invalid_json", "invalid_json", ("JSON",)),
        ("", None, "unclosed_block", "unclosed_block", ("no end",)),
        ("", {}, "missing_name", "missing_name", ("name",)),
        ("", None, "another", "another", ("another",)),
    ],
)
def test_a_failure_is_an_answer(name: str, arguments: Any, given: str, status: str, words: tuple[str, ...]) -> None:
    tools = toolset(add, broken, slow, late, raises_timeout, timeout_s=0.2)
    found, text = answer(tools, name, arguments, given)
    assert found == status and all(word in text for word in words), (found, text)


def test_a_lost_tool_is_none_of_the_model_s() -> None:
    with pytest.raises(EnvironmentLost):
        answer(toolset(lost), "lost", {})


def test_a_long_result_is_cut() -> None:
    def much() -> str:
        """Writes much."""
        return "x" * 30

    assert answer(toolset(much, max_chars=10), "much", {}) == ("ok", "x" * 10 + " [20 more characters]")


def test_functions_of_threads_run_beside_each_other() -> None:
    tools = toolset(slow)

    async def both() -> float:
        began = time.monotonic()
        await asyncio.gather(*(tools.answer(Call(name="slow", arguments={}, text="")) for _ in range(4)))
        return time.monotonic() - began

    assert asyncio.run(both()) < 1.9


def no_hint(a):  # type: ignore[no-untyped-def]
    """A tool."""


def no_docstring(a: int) -> None: ...


def many(*a: int) -> None:
    """A tool."""


def no_schema(a: Toolset) -> None:
    """A tool."""


@pytest.mark.parametrize(
    ("function", "facts"),
    [(no_hint, ("'a'", "type hint")), (no_docstring, ("docstring",)), (many, ("*a",)), (no_schema, ("docs/tools.md",))],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function: Any, facts: tuple[str, ...]) -> None:
    with refuses(ValueError, "rollout.tools.functions", *facts):
        FunctionTool(function, f"rollout.tools.functions {function.__name__!r}")


def test_two_tools_of_one_name_are_refused() -> None:
    with refuses(ValueError, "rollout.tools", "'add'"):
        toolset(add, add)
