"""Read prompts from json, jsonl, parquet or a hub name, tokenize each once, deal them out in a reproducible order."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import datasets

from miles_like.types import Json, Prompt
from rollout.config import DataConfig
from rollout.order import Cursor, Order

_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> Any: ...
    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


class PromptSource:
    """All prompts of one file, in memory, in an order that depends on (seed, epoch) only.

    path: a file (.json, .jsonl, .parquet) or a hub name, optionally NAME:SPLIT (split "train" when left out).
    compared_by: the reward that compares with the answers; None: a prompt may be without one, and its answer is "".
    Raises ValueError saying which file, row and column is at fault: a missing file or column, no rows, a prompt without
    text or without the answer that it needs, the same id twice, a prompt of more than max_prompt_tokens.
    """

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, path: str, *, seed: int = 0, compared_by: str | None = None
    ) -> None:
        rows = read_rows(path)
        answers = _answers(config, rows, path, compared_by)
        self._prompts = [
            _prompt(config, tokenizer, row, answer, f"{path}, row {i}", path)
            for i, (row, answer) in enumerate(zip(rows, answers, strict=True))
        ]
        _check_ids(self._prompts, path)
        self._order = Order(len(self._prompts), seed=seed)

    def __len__(self) -> int:
        return len(self._prompts)

    def all(self) -> Sequence[Prompt]:
        """Every prompt in file order, whatever was dealt."""
        return tuple(self._prompts)

    def take(self, k: int) -> list[Prompt]:
        """The next k, in the order of `Order.take`."""
        return [self._prompts[i] for i in self._order.take(k)]

    def state(self) -> Cursor:
        return self._order.cursor

    def restore(self, cursor: Cursor) -> None:
        """Go to where `state` was taken; the same file and seed then deal the same prompts."""
        self._order.restore(cursor)


def read_rows(path: str) -> Sequence[Mapping[str, Any]]:
    """Rows of a file or of a hub name. Raises ValueError when there is no such file, it is damaged or has no rows."""
    file = Path(path)
    reader = _READERS.get(file.suffix)
    if reader is None and (file.exists() or file.suffix in {".csv", ".txt", ".gz"}):
        raise ValueError(f"{path}: prompts are read from {', '.join(_READERS)} files or a hub name, not from this")
    if reader is not None:
        if not file.is_file():
            raise ValueError(f"{path}: no such file: check data.train and data.eval")
        if file.stat().st_size == 0:
            raise ValueError(f"{path} is empty: it has no prompts")
        # The cache of a local file is of no use after this: nothing is left in the user's home.
        with tempfile.TemporaryDirectory(prefix="prompts_") as cache:
            rows = _load(path, reader, data_files=str(file), split="train", cache_dir=cache)
    else:
        name, _, split = path.partition(":")
        rows = _load(path, name, split=split or "train")
    if not rows:
        raise ValueError(f"{path} has no rows: it has no prompts")
    return rows


def _load(path: str, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    datasets.disable_progress_bars()
    try:
        return list(datasets.load_dataset(*args, **kwargs).to_list())
    except (datasets.exceptions.DatasetGenerationError, datasets.exceptions.DatasetsError, OSError, ValueError) as e:
        reason = e.__cause__ or e
        raise ValueError(f"{path} cannot be read as prompts: {str(reason).strip().splitlines()[0]}") from e


def _answers(config: DataConfig, rows: Sequence[Mapping[str, Any]], path: str, compared_by: str | None) -> list[str]:
    """Of each row; "" where it has none."""
    key, out, missing = config.answer_key, list[str](), list[_NoColumn]()
    for row in rows:
        answer = None
        try:
            answer = _column(row, key, path)
        except _NoColumn as e:
            missing.append(e)
        out.append(str(answer) if answer is not None and str(answer).strip() else "")
    if len(missing) == len(rows):
        if compared_by is not None:
            raise ValueError(
                f"{missing[0]}, or name another reward than {compared_by!r}, which compares with the answer "
                "(docs/rewards.md)"
            )
        if key != DataConfig.model_fields["answer_key"].default:
            raise missing[0]
    if compared_by is not None and "" in out:
        raise ValueError(
            f"{path}, row {out.index('')}: the prompt has no answer ({key}), and reward {compared_by!r} compares with "
            "it: add it, take the row out, or name a reward that needs none (docs/rewards.md)"
        )
    return out


def _prompt(
    config: DataConfig, tokenizer: Tokenizer, row: Mapping[str, Any], answer: str, where: str, path: str
) -> Prompt:
    question = _column(row, config.prompt_key, path)
    messages = as_messages(question)
    if not messages or (config.template == "plain" and not isinstance(question, str)):
        want = 'text, or with data.template = "chat" a list of messages'
        raise ValueError(f"{where}: the prompt ({config.prompt_key}) is {question!r}, want {want}")
    asked = messages[-1]["content"] + config.instruction
    text = asked
    if config.template == "plain":
        messages = []
    else:
        messages[-1]["content"] = asked
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))  # a template writes its own special tokens
    if len(ids) > config.max_prompt_tokens:
        raise ValueError(
            f"{where}: the prompt has {len(ids)} tokens, data.max_prompt_tokens = {config.max_prompt_tokens}: "
            "raise it, or take the row out"
        )
    given = row.get(config.id_key)
    name = str(given) if given is not None else hashlib.sha256(f"{text}\0{answer}".encode()).hexdigest()[:16]
    used = {config.prompt_key, config.id_key, "source"}
    return Prompt(
        id=name,
        token_ids=ids,
        answer=answer,
        text=text,
        source=str(row.get("source") or ""),
        messages=tuple(messages),
        meta={k: _plain(v) for k, v in row.items() if k not in used and v is not None},
    )


class _NoColumn(ValueError):
    pass


def _column(row: Mapping[str, Any], key: str, path: str) -> Any:
    """A column, or with dots what is in one: verl's files have their answer in "reward_model.ground_truth"."""
    if key in row:
        return row[key]
    found: Any = row
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            have = ", ".join(sorted(found if isinstance(found, Mapping) else row))
            raise _NoColumn(f"{path} has no column {key!r}; it has {have}: set data.prompt_key and data.answer_key")
        found = found[part]
    return found


def _plain(value: Any) -> Json:
    """As JSON would have it; what it has no form for, as text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def as_messages(given: Any, *, role: str = "user") -> list[dict[str, str]]:
    """A prompt or an answer as chat messages: itself when it is a list of them (DAPO's sets), one of `role` when it is
    text.

    Empty when it is neither, or without text.
    """
    found = [{"role": role, "content": given}] if isinstance(given, str) else given
    if not isinstance(found, list):
        return []
    out = [{"role": m.get("role"), "content": m.get("content")} for m in found if isinstance(m, dict)]
    whole = len(out) == len(found) and all(isinstance(v, str) and v.strip() for m in out for v in m.values())
    return out if whole else []


def _check_ids(prompts: Sequence[Prompt], path: str) -> None:
    rows: dict[str, int] = {}
    for i, p in enumerate(prompts):
        if p.id in rows:
            raise ValueError(
                f"{path}: rows {rows[p.id]} and {i} are the same prompt ({p.id!r}): give each row its own id"
            )
        rows[p.id] = i
