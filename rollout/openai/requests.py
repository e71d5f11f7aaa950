"""Bodies of OpenAI's /v1/completions and /v1/chat/completions: keys, types and bounds.

Keys and defaults are those of OpenAI's API reference; `top_k`, `min_p`, `stop_token_ids`, `ignore_eos` and
`chat_template_kwargs` are SGLang 0.5.23's additions. null is a key that is left out. A key that would change the answer
and is not served is refused, as every unknown one.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from miles_like.types import SamplingParams
from rollout.openai.errors import BadRequest
from rollout.wire.bodies import MAX_N, MAX_STOP_IDS, Count, TokenId
from rollout.wire.generate import MIN_TEMPERATURE

MAX_STOPS = 16
MAX_STOP = 256  # characters
MAX_LOGPROBS = 20  # candidates of a token, as OpenAI's
_SEED = 2**63 - 1
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}  # of no effect here


def _depth(value: object) -> str:
    if isinstance(value, str):
        return "text"
    first = value[0] if isinstance(value, list) and value else None
    return "texts" if isinstance(first, str) else "prompts" if isinstance(first, list) else "ids"


def _kind(value: object) -> str:
    return "many" if isinstance(value, list) else "one"


_Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
_Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Annotated[list[str], Field(fail_fast=True)], Tag("texts")]
    | Annotated[_Ids, Tag("ids")]
    | Annotated[Annotated[list[_Ids], Field(fail_fast=True)], Tag("prompts")],
    Discriminator(_depth),
]
_StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]
_Stop = Annotated[
    Annotated[_StopText, Tag("one")]
    | Annotated[Annotated[list[_StopText], Field(fail_fast=True, max_length=MAX_STOPS)], Tag("many")],
    Discriminator(_kind),
]
_Off = Annotated[float, Field(ge=0, le=0)]  # a penalty, which is not served


def _only(wanted: bool | int) -> BeforeValidator:
    """Before a literal, for which 0 would be false, and true 1."""

    def check(value: object) -> object:
        if type(value) is not type(wanted):
            raise PydanticCustomError("literal_error", "want {expected}", {"expected": repr(wanted)})
        return value

    return BeforeValidator(check)


_False = Annotated[Literal[False], _only(False)]
_True = Annotated[Literal[True], _only(True)]
_One = Annotated[Literal[1], _only(1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Model):
    include_usage: bool = False


class SamplingBody(_Model):
    """What both endpoints have in common."""

    model: Annotated[str, Field(max_length=4096)]
    temperature: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stop: _Stop | None = None
    seed: Annotated[int, Field(ge=-_SEED, le=_SEED)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # SGLang's
    top_k: Annotated[int, Field(ge=-1, json_schema_extra={"not": {"const": 0}})] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_IDS)] = []
    ignore_eos: bool = False
    # not served
    presence_penalty: _Off = 0.0
    frequency_penalty: _Off = 0.0
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] = {}

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def sampling(self, max_new_tokens: int, more_stops: Sequence[int]) -> SamplingParams:
        """more_stops: token ids at which a sample ends too."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature if self.temperature >= MIN_TEMPERATURE else 0.0,
            top_p=self.top_p,
            min_p=self.min_p,
            top_k=self.top_k,
            stop_token_ids=(*self.stop_token_ids, *more_stops),
            sampling_seed=self.seed,
        )


class CompletionBody(SamplingBody):
    prompt: _Prompt
    max_tokens: Count = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: _False = False
    suffix: None = None
    best_of: _One = 1


class ChatBody(SamplingBody):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    max_tokens: Count | None = None  # None: up to the context length
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    tools: Annotated[list[dict[str, Any]], Field(max_length=1024, fail_fast=True)] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: _True = True
    response_format: dict[str, Any] = {"type": "text"}
    chat_template_kwargs: dict[str, Any] = {}


B = TypeVar("B", bound=SamplingBody)


def read(model: type[B], body: Mapping[str, Any]) -> B:
    """The validated body. Raises BadRequest naming the key, its value and the bound."""
    given = {k: v for k, v in body.items() if v is not None and k not in IGNORED}
    try:
        found = model.model_validate(given)
    except ValidationError as e:
        error = e.errors(include_url=False)[0]
        raise _refusal(error, model) from None
    if found.top_k == 0:
        raise BadRequest("top_k = 0, expected -1 (whole vocabulary) or at least 1", "top_k")
    if found.stream_options is not None and not found.stream:
        raise BadRequest(
            "stream_options applies to streamed replies only: send stream = true too, or remove it", "stream_options"
        )
    if isinstance(found, ChatBody):
        _check_chat(found)
    return found


def _check_chat(body: ChatBody) -> None:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise BadRequest("max_tokens and max_completion_tokens mean the same: send one of them", "max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise BadRequest(f"top_logprobs = {body.top_logprobs} without logprobs: send logprobs = true", "top_logprobs")
    if body.response_format != {"type": "text"}:
        what = reprlib.repr(body.response_format)
        raise BadRequest(f'response_format = {what} is not supported: send {{"type": "text"}}', "response_format")


_TEXTS = {
    "missing": "the request has no {key!r}",
    "greater_than_equal": "{key} = {value}, expected at least {ge}",
    "less_than_equal": "{key} = {value}, expected at most {le}",
    "greater_than": "{key} = {value}, expected more than {gt}",
    "too_long": "{key} has {actual_length} entries, expected at most {max_length}",
    "too_short": "{key} is empty, expected at least {min_length} entry",
    "string_too_long": "{key} = {value} is too long, expected at most {max_length} characters",
    "string_too_short": "{key} is an empty string: remove it",
    "literal_error": "{key} = {value} is not supported: expected {expected}",
    "none_required": "{key} = {value} is not supported: remove it",
    "int_type": "{key} = {value} is not an integer",
    "int_from_float": "{key} = {value} is not an integer",
    "float_type": "{key} = {value} is not a number",
    "finite_number": "{key} = {value} is not a finite number",
    "string_type": "{key} = {value} is not a string",
    "bool_type": "{key} = {value} is not true or false",
    "list_type": "{key} = {value} is not a list",
    "dict_type": "{key} = {value} is not an object",
    "model_type": "{key} = {value} is not an object",
}
_NOT_SERVED = {"presence_penalty", "frequency_penalty", "logit_bias"}


def _refusal(error: Mapping[str, Any], model: type[SamplingBody]) -> BadRequest:
    path = [str(p) for p in error["loc"] if p not in ("one", "many", "text", "texts", "ids", "prompts")]
    key, kind, value = path[0], error["type"], reprlib.repr(error["input"])
    if kind == "extra_forbidden" and len(path) == 1:
        known = ", ".join(k for k in model.model_fields if k not in _NOT_SERVED)
        return BadRequest(f"unknown key {key!r}; known: {known}", key)
    if key in _NOT_SERVED:
        return BadRequest(f"{key} = {value} is not supported: remove it", key)
    form = _TEXTS.get(kind, "{key} = {value} cannot be read (" + kind.replace("_", " ") + ")")
    name = ".".join(p for p in path if not p.isdecimal())
    bounds = {k: f"{v:g}" if isinstance(v, float) else v for k, v in error.get("ctx", {}).items()}
    return BadRequest(form.format(key=name, value=value, **bounds), key)
