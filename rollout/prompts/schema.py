"""Find the columns of a prompt file under the names that verl, slime and TRL use.

    verl    prompt (messages), reward_model.ground_truth, data_source, extra_info.{split,index}
    slime   prompt, messages or input (text or messages), label, metadata
    TRL     prompt (text or messages), answer or solution
    ours    prompt (text or messages), answer, id, source

A column that the configuration names has precedence. Where another of these readers would choose a different column,
the file is rejected, or a note is reported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rollout.prompts.config import DataConfig
from rollout.prompts.dataset import MissingColumn, Row, Rows, column, text_column, value_of

PROMPTS = ("prompt", "messages", "input")  # in order of preference
ANSWERS = ("answer", "reward_model.ground_truth", "label", "solution")  # only the first has precedence over others
_KNOWN = (*PROMPTS, *ANSWERS, "chosen", "rejected", "completion")
_DIGEST = 16  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of one file."""

    prompt: str
    answer: str  # may be missing if no reward compares with it
    answered: bool  # whether any row has that column
    ids: Literal["own", "verl", "none"]  # whether rows have the column `id_key`; else those of verl, if all differ
    notes: tuple[str, ...]  # a message for each choice that another reader might make differently


def columns(config: DataConfig, rows: Rows) -> Columns:
    """Raises ValueError for a file of preferences or conversations, and if several columns may be the answer."""
    path, notes = rows.path, list[str]()
    prompt, answer, seen = config.prompt_key, config.answer_key, _Seen(config, rows)
    if prompt is None:
        _refuse_preferences(seen, path)
        found = [key for key in PROMPTS if key in seen.valued]
        prompt = found[0] if found else PROMPTS[0]
        if len(found) > 1:
            notes.append(_chosen(path, "prompts", prompt, found[1:], "data.prompt_key"))
        if prompt == "messages" and seen.conversation is not None:
            raise ValueError(
                f"{path}, {seen.conversation}: column 'messages' ends with the assistant's answer, so it is a "
                "conversation for supervised training, not a prompt: set algorithm.name = 'sft', or another column as "
                "data.prompt_key"
            )
    if answer is None:
        found = [key for key in ANSWERS if key in seen.valued and key != prompt]
        answer = found[0] if found else ANSWERS[0]
        if len(found) > 1 and answer != ANSWERS[0]:
            raise ValueError(
                f"{path}: columns {' and '.join(map(repr, found))} could each be the answer: set "
                "data.answer_key to one of them"
            )
        if len(found) > 1:
            notes.append(_chosen(path, "answers", answer, found[1:], "data.answer_key"))
    return Columns(prompt=prompt, answer=answer, answered=answer in seen.present, ids=seen.ids, notes=tuple(notes))


class _Seen:
    """What the rows of a file have, from one pass over them."""

    def __init__(self, config: DataConfig, rows: Rows) -> None:
        answers = ANSWERS if config.answer_key is None else (config.answer_key,)
        self.present = set[str]()  # of `answers`, those that a row has
        self.valued = set[str]()  # of _KNOWN, those with a value other than None in a row
        self.label: object = None  # the first that is not None
        self.conversation: str | None = None  # place of the first row whose messages end with an answer
        self.ids: Literal["own", "verl", "none"] = "none"
        absent, empty, named = list(answers), list(_KNOWN), _VerlIds()
        for place, row in rows.placed():
            for key in [key for key in absent if _has(row, key)]:
                absent.remove(key)
                self.present.add(key)
            for key in [key for key in empty if value_of(row, key) is not None]:
                empty.remove(key)
                self.valued.add(key)
                self.label = row["label"] if key == "label" else self.label
            if self.conversation is None and _ends_with_answer(row.get("messages")):
                self.conversation = place
            if self.ids == "none":
                self.ids = "own" if row.get(config.id_key) is not None else "none"
                named.add(_verl_id(row))
        if self.ids == "none" and named.differ():
            self.ids = "verl"


class _VerlIds:
    """Whether every row has an id of verl's, and no other row the same one: 16 bytes of memory an id."""

    def __init__(self) -> None:
        self._digests, self._complete = bytearray(), True

    def add(self, name: str | None) -> None:
        if name is None:
            self._complete = False
            self._digests.clear()
        elif self._complete:
            self._digests += hashlib.blake2b(name.encode(), digest_size=_DIGEST).digest()

    def differ(self) -> bool:
        each = np.frombuffer(self._digests, dtype=f"S{_DIGEST}")
        return self._complete and len(np.unique(each)) == len(each)


def _has(row: Row, key: str) -> bool:
    try:
        column(row, key, "")
    except MissingColumn:
        return False
    return True


def _chosen(path: str, what: str, key: str, others: Sequence[str], setting: str) -> str:
    return (
        f"{path}: {what} are read from column {key!r}, not from {' or '.join(map(repr, others))}; set {setting} "
        "to change this"
    )


def _refuse_preferences(seen: _Seen, path: str) -> None:
    """Raises ValueError for TRL's preference and unpaired preference files."""
    if {"chosen", "rejected"} <= seen.valued:
        raise ValueError(
            f"{path} has preference pairs (columns chosen, rejected) instead of prompts: set algorithm.name = 'dpo' or "
            "'reward_model', or set data.prompt_key to the column of prompts"
        )
    if "completion" in seen.valued and isinstance(seen.label, bool):
        raise ValueError(
            f"{path} has labelled answers (columns completion, label) instead of prompts: set algorithm.name = "
            "'kto' and data.answer_key = 'completion', or set data.prompt_key to the column of prompts and, if "
            "there are answers, data.answer_key to their column"
        )


def _ends_with_answer(messages: object) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def given_id(config: DataConfig, found: Columns, row: Row, where: str) -> str | None:
    """The id of a row: its column `id_key`, or in verl's files data_source, split and index.

    verl's ids are used only if they are unique: DAPO's set repeats its rows. Raises ValueError for an id that is an
    object or a list.
    """
    if found.ids == "verl":
        return _verl_id(row)
    name = row.get(config.id_key)
    return None if name is None else text_column(name, config.id_key, where)


def _verl_id(row: Row) -> str | None:
    extra = row.get("extra_info")
    if not isinstance(extra, Mapping) or extra.get("index") is None:
        return None
    parts = [part for part in (row.get("data_source"), extra.get("split"), extra["index"]) if part is not None]
    return "/".join(map(str, parts)) if all(isinstance(part, str | int | float) for part in parts) else None


def source_of(row: Row, default: str, where: str) -> str:
    """The source of a row: its column "source", verl's "data_source", or `default`. Raises ValueError for an object or
    a list."""
    key = "source" if row.get("source") else "data_source"
    return text_column(row.get(key), key, where) or default
