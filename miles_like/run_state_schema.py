"""What run_state.json may hold: types and bounds of every part of the loop that is read back from it.

The file has a checksum of itself, which is against damage: a forged file has a right one. Whatever is taken from it is
checked here first, so that no part of the loop meets a value that it does not expect. The prompts and the ledger check
their own, which depends on the run's files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, RootModel, StrictInt, ValidationError

from miles_like.driver_random import RANDOM

DEEPEST = 100
Count = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]
Name = Annotated[str, Field(max_length=4096)]
Counts = dict[Name, Count]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Word = Annotated[StrictInt, Field(ge=0, lt=1 << 32)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileFact(_Strict):
    """Of a file beside run_state.json."""

    bytes: Count
    sha256: Digest | None


class FilePosition(_Strict):
    """Of a file that only grows."""

    bytes: Count
    sha256: Digest


class RunStateFile(_Strict):
    step: Count
    weight_version: Count
    tokens_total: Count
    parts: dict[Name, Any]
    files: dict[Name, FileFact]


class TallyState(_Strict):
    waves: Count
    sampled: Count
    samples: Count
    given_up: Count
    tokens: Count
    left_out: Counts
    rewards: list[tuple[Name, list[float | int | None]]]


class TicketState(_Strict):
    ticket: Count
    prompt: Name
    version: Count
    tally: TallyState


class BufferState(_Strict):
    next_ticket: Count
    tickets: list[TicketState]
    dropped: Counts


class WaveState(_Strict):
    number: Count
    tickets: list[Count]


class ProducerState(_Strict):
    step: Count
    kept: Count
    tried: Count
    left_out: Counts
    number: Count
    held: list[Name]
    tally: TallyState
    waves: list[WaveState]


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
    """The files of a run directory that are cut back: these two, whatever else is named."""


class PromptsState(RootModel[Count | dict[Name, Any]]):
    """Rows dealt of a supervised run; of another what `PromptSource.restore` checks."""


class ConfigState(RootModel[dict[Name, Any]]):
    """`resume_differences` compares it, key by key."""


PARTS: Mapping[str, type[BaseModel]] = {
    "files": FilesState,
    "config": ConfigState,
    "keep_best": BestState,
    RANDOM: RandomState,
    "prompts": PromptsState,
    "buffer": BufferState,
    "producer": ProducerState,
    "ledger": LedgerState,
}


def check_state(found: object) -> dict[str, Any]:
    """The content of run_state.json, without its format and sum. Raises ValueError naming the first value that is not
    what a run writes."""
    _check_depth(found)
    checked = _checked(RunStateFile, found, "")
    for name, part in checked.parts.items():
        if name in PARTS:
            _checked(PARTS[name], part, f"parts.{name}.")
    assert isinstance(found, dict)
    return found


def _checked(model: type[BaseModel], value: object, where: str) -> Any:
    try:
        # as JSON, of which a list is a tuple too where everything else is strict
        return model.model_validate_json(json.dumps(value))
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        place = where + ".".join(str(p) for p in first["loc"])
        raise ValueError(f"{place.rstrip('.')[:200]}: {first['msg']}") from None


def _check_depth(value: object) -> None:
    """Raises ValueError for values nested deeper than functions that descend into them may go."""
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            raise ValueError(f"values are nested more than {DEEPEST} deep")
        inner = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level, depth = [w for found in inner for w in found], depth + 1
