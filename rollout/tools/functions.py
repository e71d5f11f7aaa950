"""Python functions as tools: their JSON schema by their type hints and docstring, and their arguments checked."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic_core import to_json

from miles_like.limits.threads import DaemonThreads
from miles_like.limits.user_errors import raised
from miles_like.plugins import is_async
from miles_like.types import EnvironmentLost
from rollout.chat.turns import Tool
from rollout.tools.results import ToolError, WrongArguments

_REMEDY = "see docs/tools.md"


class FunctionTool:
    """A function that the policy may call. Functions without `async` run in threads, several at once.

    key: of the configuration that names it. Raises ValueError for a function without a docstring or with a parameter
    that has no type hint, no name, or a type without a JSON schema.
    """

    def __init__(self, function: Callable[..., Any], key: str) -> None:
        self.name = str(getattr(function, "__name__", type(function).__name__))
        self._function, self._threads = function, DaemonThreads()
        about, parameters = _documented(function, key)
        self._model, self._aliases = _arguments(function, parameters, key)
        self.spec: Tool = {
            "type": "function",
            "function": {"name": self.name, "description": about, "parameters": _schema(self._model, key)},
        }

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The result as text: JSON unless it is text. Raises WrongArguments; ToolError for what the function raises,
        and EnvironmentLost where it raises that."""
        try:
            read = self._model.model_validate(dict(arguments))
        except ValidationError as e:
            raise WrongArguments("; ".join(_words(error) for error in e.errors(include_url=False)[:4])) from None
        given = {name: getattr(read, alias) for name, alias in self._aliases.items()}
        if is_async(self._function):
            return as_text(await _awaited(self._function, given))
        return as_text((await self._threads.run(partial(_outcome, self._function, given)))())


async def _awaited(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    try:
        return await function(**given)
    except Exception as e:  # user code may raise anything
        _fail(e)


def _outcome(function: Callable[..., Any], given: Mapping[str, Any]) -> Callable[[], Any]:
    """The function's value or error. An error of the thread pool itself is none of the function's."""
    try:
        value = function(**given)
    except Exception as e:  # user code may raise anything
        return partial(_fail, e)
    return lambda: value


def _fail(error: Exception) -> NoReturn:
    if isinstance(error, EnvironmentLost):
        raise error
    raise ToolError(raised(error)) from error


def as_text(value: Any) -> str:
    """A tool's result as the model reads it."""
    if isinstance(value, str):
        return value
    return to_json(value, fallback=str, inf_nan_mode="constants").decode()


def _documented(function: Callable[..., Any], key: str) -> tuple[str, Mapping[str, str]]:
    """The description, and that of each parameter, by a docstring in Google's form."""
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    text = inspect.getdoc(function)
    if not text:
        raise ValueError(f"{key}: the function has no docstring, which tells the model what it does: add one")
    about, parameters, _ = parse_google_format_docstring(text)
    return str(about or "").strip(), {str(k): " ".join(str(v).split()) for k, v in (parameters or {}).items()}


def _arguments(
    function: Callable[..., Any], about: Mapping[str, str], key: str
) -> tuple[type[BaseModel], dict[str, str]]:
    """A model whose fields are the parameters under their names as aliases, and parameter -> field: a parameter may
    have the name of a method of pydantic's models."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as e:  # a hint is evaluated
        raise ValueError(f"{key}: its type hints cannot be read ({raised(e)}): {_REMEDY}") from None
    fields: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for i, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"{key}: its parameter {parameter} cannot be given by a name: {_REMEDY}")
        if name not in hints:
            raise ValueError(f"{key}: its parameter {name!r} has no type hint: add one")
        default = ... if parameter.default is parameter.empty else parameter.default
        # without a description here the hint may have one
        described: dict[str, Any] = {"description": about[name]} if name in about else {}
        fields[f"argument_{i}"] = (hints[name], Field(default, alias=name, **described))
        aliases[name] = f"argument_{i}"
    try:
        model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
    except PydanticUserError as e:
        raise ValueError(f"{key}: {e.message.splitlines()[0]}: {_REMEDY}") from None
    return model, aliases


def _schema(model: type[BaseModel], key: str) -> dict[str, Any]:
    """Without pydantic's titles, which repeat the names."""
    try:
        schema = model.model_json_schema(by_alias=True)
    except PydanticUserError as e:
        raise ValueError(f"{key}: a parameter has no JSON schema ({e.message.splitlines()[0]}): {_REMEDY}") from None
    schema.setdefault("properties", {})
    plain: dict[str, Any] = json.loads(json.dumps(_untitled(schema)))
    return plain


def _untitled(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            k: {name: _untitled(inner) for name, inner in v.items()} if k in ("properties", "$defs") else _untitled(v)
            for k, v in schema.items()
            if not (k == "title" and isinstance(v, str)) and not (k == "additionalProperties" and v is False)
        }
    return [_untitled(inner) for inner in schema] if isinstance(schema, list) else schema


def _words(error: Mapping[str, Any]) -> str:
    where = ".".join(map(str, error["loc"]))
    return f"{where}: {error['msg']}" if where else str(error["msg"])
