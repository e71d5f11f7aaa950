"""Find the columns of a prompt file under the names that verl, slime and TRL use.

    verl    prompt (messages), reward_model.ground_truth, data_source, extra_info.{split,index}
    slime   prompt, messages or input (text or messages), label, metadata
    TRL     prompt (text or messages), answer or solution
    ours    prompt (text or messages), answer, id, source

A column that the configuration names has precedence. Where another of these readers would choose a different column,
the file is rejected, or a note is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout.prompts.config import DataConfig
from rollout.prompts.dataset import Row, Rows, first_value, text_column

PROMPTS = ("prompt", "messages", "input")  # in order of preference
ANSWERS = ("answer", "reward_model.ground_truth", "label", "solution")  # only the first has precedence over others


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of one file."""

    prompt: str
    answer: str  # may be missing if no reward compares with it
    notes: tuple[str, ...]  # a message for each choice that another reader might make differently


def columns(config: DataConfig, rows: Rows, path: str) -> Columns:
    """Raises ValueError for a file of preferences or conversations, and if several columns may be the answer."""
    notes: list[str] = []
    prompt, answer = config.prompt_key, config.answer_key
    if prompt is None:
        _refuse_preferences(rows, path)
        found = [key for key in PROMPTS if _has(rows, key)]
        prompt = found[0] if found else PROMPTS[0]
        if len(found) > 1:
            notes.append(_chosen(path, "prompts", prompt, found[1:], "data.prompt_key"))
        if prompt == "messages":
            _refuse_answered(rows)
    if answer is None:
        found = [key for key in ANSWERS if _has(rows, key) and key != prompt]
        answer = found[0] if found else ANSWERS[0]
        if len(found) > 1 and answer != ANSWERS[0]:
            raise ValueError(
                f"{path}: columns {' and '.join(map(repr, found))} could each be the answer: set "
                "data.answer_key to one of them"
            )
        if len(found) > 1:
            notes.append(_chosen(path, "answers", answer, found[1:], "data.answer_key"))
    return Columns(prompt=prompt, answer=answer, notes=tuple(notes))


def _chosen(path: str, what: str, key: str, others: Sequence[str], setting: str) -> str:
    return (
        f"{path}: {what} are read from column {key!r}, not from {' or '.join(map(repr, others))}; set {setting} "
        "to change this"
    )


def _refuse_preferences(rows: Sequence[Row], path: str) -> None:
    """Raises ValueError for TRL's preference and unpaired preference files."""
    if _has(rows, "chosen") and _has(rows, "rejected"):
        raise ValueError(
            f"{path} has preference pairs (columns chosen, rejected) instead of prompts: set algorithm.name = 'dpo' or "
            "'reward_model', or set data.prompt_key to the column of prompts"
        )
    if _has(rows, "completion") and isinstance(first_value(rows, "label"), bool):
        raise ValueError(
            f"{path} has labelled answers (columns completion, label) instead of prompts: set algorithm.name = "
            "'kto' and data.answer_key = 'completion', or set data.prompt_key to the column of prompts and, if "
            "there are answers, data.answer_key to their column"
        )


def _refuse_answered(rows: Rows) -> None:
    for i, row in enumerate(rows):
        messages = row.get("messages")
        last = messages[-1] if isinstance(messages, list) and messages else None
        if isinstance(last, Mapping) and last.get("role") == "assistant":
            raise ValueError(
                f"{rows.where(i)}: column 'messages' ends with the assistant's answer, so it is a conversation for "
                "supervised training, not a prompt: set algorithm.name = 'sft', or another column as data.prompt_key"
            )


def _has(rows: Sequence[Row], key: str) -> bool:
    return first_value(rows, key) is not None


def given_ids(config: DataConfig, rows: Rows) -> list[str | None]:
    """The id of each row: its column `id_key`, or in verl's files data_source, split and index.

    verl's ids are used only if they are unique: DAPO's set repeats its rows. Raises ValueError for an id that is an
    object or a list.
    """
    own = [row.get(config.id_key) for row in rows]
    if any(name is not None for name in own):
        key = config.id_key
        return [None if name is None else text_column(name, key, rows.where(i)) for i, name in enumerate(own)]
    verl = [_verl_id(row) for row in rows]
    return verl if None not in verl and len(set(verl)) == len(verl) else [None] * len(rows)


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
