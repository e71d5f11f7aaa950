"""The JSON bodies of requests as pydantic models, with the type and bounds of each field.

Those of the control endpoints are in `rollout/wire/control.py`. Requests are validated with these models, and the
embedded server publishes their JSON Schema, so the two always agree. Keys and defaults are SGLang 0.5.23's. As there,
unknown top-level keys are ignored and unknown keys of `sampling_params` are rejected. The engine checks the bounds that
depend on the model (vocabulary, context length).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from typing_extensions import TypeAliasType

MAX_RID = 256  # characters
MAX_N = 4096  # samples per prompt in one request
MAX_STOP_IDS = 64
MAX_PATH = 4096  # characters
MAX_VERSION = 256  # characters
MAX_TENSORS = 1 << 20  # in one request
MIB = 1 << 20
_PROMPT_BYTES = 1024  # per prompt in a request for sampling_params and rid
_TOKEN_BYTES = 8  # per token id in JSON
_INT32 = 2**31 - 1
_SEED = 2**63 - 1

TokenId = TypeAliasType("TokenId", Annotated[int, Field(ge=0, le=_INT32)])
Count = Annotated[int, Field(ge=0, le=_INT32)]
Rid = Annotated[str, Field(min_length=1, max_length=MAX_RID)]
Version = Annotated[str, Field(max_length=MAX_VERSION)]
Name = Annotated[str, Field(min_length=1, max_length=1024)]  # of a tensor
DtypeName = Annotated[str, Field(min_length=1, max_length=32)]  # torch's
Shape = Annotated[list[Count], Field(max_length=8)]  # of a tensor
NotServed = Annotated[list[Any], Field(max_length=0)] | None  # an option that must stay off


def _kind(value: object) -> str:
    return "many" if isinstance(value, list) else "one"


def _depth(value: object) -> str:
    return "many" if isinstance(value, list) and value and isinstance(value[0], list) else "one"


# fail_fast: do not collect the errors of a list with a million wrong entries.
_Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
_Prompts = Annotated[list[_Ids], Field(fail_fast=True, min_length=1)]
_InputIds = Annotated[Annotated[_Ids, Tag("one")] | Annotated[_Prompts, Tag("many")], Discriminator(_depth)]
_Texts = Annotated[list[str], Field(fail_fast=True, min_length=1)]
_Text = Annotated[Annotated[str, Tag("one")] | Annotated[_Texts, Tag("many")], Discriminator(_kind)]
_Rids = Annotated[list[Rid], Field(fail_fast=True, min_length=1)]
_Rid = Annotated[Annotated[Rid, Tag("one")] | Annotated[_Rids, Tag("many")], Discriminator(_kind)]
_StopIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_IDS)]


def request_bytes(*, prompts: int, context_length: int) -> int:
    """Largest size of a /generate body with this many prompts of `context_length` tokens, at least 1 MiB."""
    return max(MIB, prompts * (context_length * _TOKEN_BYTES + _PROMPT_BYTES))


class Body(BaseModel):
    """A strict model: a quoted number is not a number, and 1 is not true."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class MemoryTag(StrEnum):
    """A part of a server's memory that is released and resumed for itself, under SGLang's names (srt/constants.py)."""

    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"
    CUDA_GRAPH = "cuda_graph"


class EmptyBody(Body):
    """A request without keys."""


class SamplingBody(Body):
    """`sampling_params`. An option that the embedded engine does not support accepts only its neutral value."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    max_new_tokens: Count = 128  # null, SGLang's "up to the context length", is not supported
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    # -1 and any number above the vocabulary size: the whole vocabulary
    top_k: Annotated[int, Field(ge=-1, le=_INT32, json_schema_extra={"not": {"const": 0}})] | None = -1
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    stop_token_ids: _StopIds | None = None
    sampling_seed: Annotated[int, Field(ge=-_SEED, le=_SEED)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = 1
    ignore_eos: bool | None = False
    # concern text only; a server without a tokenizer makes none
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    stream_interval: Count | None = None
    # not supported
    stop: NotServed = None
    stop_regex: NotServed = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = 0.0
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = 0.0
    repetition_penalty: Annotated[float, Field(ge=1, le=1)] | None = 1.0
    min_new_tokens: Annotated[int, Field(ge=0, le=0)] | None = 0
    json_schema: NotServed = None
    regex: NotServed = None
    ebnf: NotServed = None
    structural_tag: NotServed = None
    logit_bias: NotServed = None
    custom_params: NotServed = None
    beam_width: NotServed = None
    watermark: NotServed = None
    choice: NotServed = None


_Sampling = Annotated[
    Annotated[SamplingBody, Tag("one")]
    | Annotated[Annotated[list[SamplingBody], Field(fail_fast=True, min_length=1)], Tag("many")],
    Discriminator(_kind),
]
_NOT_SERVED = frozenset(list(SamplingBody.model_fields)[list(SamplingBody.model_fields).index("stop") :])


class GenerateBody(Body):
    """/generate: token ids, or text if the server has a tokenizer."""

    input_ids: _InputIds | None = None
    text: _Text | None = None
    sampling_params: _Sampling | None = None
    rid: _Rid | None = None
    return_logprob: bool | None = False
    logprob_start_len: Annotated[int, Field(ge=-1, le=_INT32)] | None = -1
    top_logprobs_num: Count | None = 0
    return_routed_experts: bool | None = False
    routed_experts_start_len: Count | None = 0
    return_routed_weights: bool | None = False
    return_layer_states: bool | None = False
    sample_index: Count | None = 0
    stream: Literal[False] | None = False


# Keys of SGLang's /generate that change its reply and that the embedded engine does not support: rejected if set.
NOT_SERVED = (
    *("token_ids_logprob", "return_sampling_mask", "sampling_logprobs_mode", "return_text_in_logprobs"),
    *("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", "return_hidden_states"),
    *("return_indexer_topk", "custom_logit_processor", "watermark", "max_thinking_tokens", "require_reasoning"),
    *("input_embeds", "positional_embed_overrides", "image_data", "video_data", "audio_data", "lora_path"),
    *("session_id", "session_params"),
)


B = TypeVar("B", bound=Body)


def read(model: type[B], body: Mapping[str, Any], endpoint: str) -> B:
    """The validated body. Raises ValueError naming the endpoint, the field, its value and the bound."""
    try:
        return model.model_validate(body)
    except ValidationError as e:
        error = e.errors(include_url=False)[0]
    raise ValueError(f"{endpoint}: {_sentence(error)}") from None


def _sentence(error: Mapping[str, Any]) -> str:
    path = [p for p in error["loc"] if p not in ("one", "many")]
    names = [p for p in path if isinstance(p, str)]
    key, kind, ctx = names[-1] if names else "the body", error["type"], error.get("ctx", {})
    value = reprlib.repr(error["input"])
    if kind == "missing":
        return f"the request has no {key!r}"
    if kind == "extra_forbidden":
        known = ", ".join(k for k in SamplingBody.model_fields if k not in _NOT_SERVED)
        return f"sampling_params has an unknown key {key!r}; known: {known}"
    if key in _NOT_SERVED:
        return f"sampling_params.{key} = {value} is not supported: remove it"
    if key == "stream":
        return "stream = true is not supported: remove it"
    what = f"{key} = {value}"
    if key == "input_ids":
        what = "input_ids must be a list of token ids or a list of such lists, none empty"
        return what if kind in ("too_short", "list_type") else f"{what}: {_problem(kind, ctx, value)} among them"
    return f"{what} {_problem(kind, ctx, '')}".replace(" ,", ",")


def _problem(kind: str, ctx: Mapping[str, Any], value: str) -> str:
    kinds = {"int_type": "an integer", "int_from_float": "an integer", "float_type": "a number", "string_type": "text"}
    kinds |= {"bool_type": "true or false", "list_type": "a list", "model_type": "an object"}
    if kind in kinds:
        return f"{value} is not {kinds[kind]}".strip()
    bounds = {
        "greater_than_equal": "at least {ge}",
        "less_than_equal": "at most {le}",
        "greater_than": "more than {gt}",
    }
    bounds |= {"too_long": "at most {max_length} entries", "string_too_long": "at most {max_length} characters"}
    bounds |= {"too_short": "at least {min_length} entries", "string_too_short": "at least {min_length} characters"}
    bounds |= {"literal_error": "one of {expected}", "enum": "one of {expected}", "finite_number": "a finite number"}
    if kind in bounds:
        return f"{value}, expected {bounds[kind].format(**ctx)}"
    return f"{value} cannot be read ({kind.replace('_', ' ')})".strip()
