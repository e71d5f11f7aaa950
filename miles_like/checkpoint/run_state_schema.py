"""Schema of run_state.json: types and bounds of the state of every component of the loop.

The file's checksum detects damage, not forgery. Every value is therefore validated here before a component of the loop
reads it. The prompt source and the ledger make further checks, which depend on the run's files. Field names are the
keys on disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict, cast

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, RootModel, StrictInt, ValidationError

from miles_like.checkpoint.random_state import RANDOM
from miles_like.storage.checkpoint_files import SavedFile
from miles_like.types import Json

DEEPEST = 100
Count = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]
Name = Annotated[str, Field(max_length=4096)]
Counts = dict[Name, Count]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Word = Annotated[StrictInt, Field(ge=0, lt=1 << 32)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileEntry(_Strict):
    """A file beside run_state.json."""

    bytes: Count
    sha256: Digest | None


class FilePosition(_Strict):
    """The length of an append-only file."""

    bytes: Count
    sha256: Digest


class RunStateFile(_Strict):
    step: Count
    weight_version: Count
    tokens_total: Count
    parts: dict[Name, Any]
    files: dict[Name, FileEntry]
    epoch: Annotated[StrictInt, Field(ge=1, lt=1 << 63)] | None = None


class RolloutStatsState(_Strict):
    waves: Count
    sampled: Count
    samples: Count
    given_up: Count
    tokens: Count
    left_out: Counts
    rewards: list[tuple[Name, list[float | int | None]]]


class GroupState(_Strict):
    ticket: Count  # group id
    prompt: Name
    version: Count
    tally: RolloutStatsState


class BufferState(_Strict):
    next_ticket: Count
    tickets: list[GroupState]
    dropped: Counts


class RoundState(_Strict):
    number: Count
    tickets: list[Count]  # group ids


class ProducerState(_Strict):
    step: Count
    kept: Count
    tried: Count
    left_out: Counts
    number: Count
    held: list[Name]
    tally: RolloutStatsState
    waves: list[RoundState]


class LedgerState(_Strict):
    next: Count
    issued: Count
    trained: Count
    discarded: Counts
    open: list[tuple[Count, Name, Count]]


class BestState(_Strict):
    metric: Name | None
    step: Count | None
    value: FiniteFloat | None


class KnownAnswerState(_Strict):
    settings: Name
    gaps: list[Annotated[FiniteFloat, Field(ge=0)]]


class RandomState(_Strict):
    python: tuple[Literal[3], Annotated[list[Word], Field(min_length=625, max_length=625)], FiniteFloat | None]
    numpy: tuple[
        Literal["MT19937"],
        Annotated[list[Word], Field(min_length=624, max_length=624)],
        Annotated[StrictInt, Field(ge=0, le=624)],
        Annotated[StrictInt, Field(ge=0, le=1)],
        FiniteFloat,
    ]
    torch: Annotated[str, Field(pattern=r"^[0-9a-f]*$", min_length=2 * 5056, max_length=2 * 5056)]


class FilesState(RootModel[dict[Literal["metrics.jsonl", "ledger.jsonl"], FilePosition]]):
    """The append-only files of a run directory; no others are truncated on resume."""


class PromptsState(RootModel[Count | dict[Name, Any]]):
    """The number of rows used by a supervised run; otherwise an object that `PromptSource.restore` checks."""


class ConfigState(RootModel[dict[Name, Any]]):
    """Compared key by key by `resume_differences`."""


class HeldState(RootModel[dict[Name, Digest]]):
    """The files of the rollout workers, with the SHA-256 that each worker checks before it reads its file."""


PARTS: Mapping[str, type[BaseModel]] = {
    "files": FilesState,
    "config": ConfigState,
    "keep_best": BestState,
    RANDOM: RandomState,
    "prompts": PromptsState,
    "buffer": BufferState,
    "producer": ProducerState,
    "ledger": LedgerState,
    "known_answer": KnownAnswerState,
    "held_groups": HeldState,
}


class RunStateKeys(TypedDict):
    """The keys of run_state.json as parsed JSON (`RunStateFile`). The state of each component is checked by that
    component."""

    step: int
    weight_version: int
    tokens_total: int
    parts: dict[str, Json]
    files: dict[str, SavedFile]
    epoch: NotRequired[int]


def check_state(found: object) -> RunStateKeys:
    """The content of run_state.json, without its format and sum. Raises ValueError naming the first invalid value."""
    _check_depth(found)
    checked = _checked(RunStateFile, found, "")
    for name, part in checked.parts.items():
        if name in PARTS:
            _checked(PARTS[name], part, f"parts.{name}.")
    return cast("RunStateKeys", found)


def _checked(model: type[BaseModel], value: object, where: str) -> Any:
    try:
        # from JSON: strict mode then accepts a list for a tuple
        return model.model_validate_json(json.dumps(value))
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        place = where + ".".join(str(p) for p in first["loc"])
        raise ValueError(f"{place.rstrip('.')[:200]}: {first['msg']}") from None


def _check_depth(value: object) -> None:
    """Raises ValueError for values nested so deep that recursive functions would fail on them."""
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            raise ValueError(f"values are nested more than {DEEPEST} deep")
        inner = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level, depth = [w for found in inner for w in found], depth + 1
