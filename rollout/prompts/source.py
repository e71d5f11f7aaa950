"""One source of prompts: the rows of a file as prompts, and the position in their order."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import orjson

from miles_like.types import Json, Prompt
from rollout.prompts.config import DataConfig
from rollout.prompts.curriculum import Curriculum
from rollout.prompts.dataset import MissingColumn, Row, Rows, column, read_rows, text_column
from rollout.prompts.ids import Hashes
from rollout.prompts.order import Cursor, Order
from rollout.prompts.schema import Columns, columns, given_id, source_of
from rollout.prompts.spool import Lazy, Selected, Spool
from rollout.prompts.values import as_json


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer that are used."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> Any: ...
    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


_FIELDS = tuple(field.name for field in dataclasses.fields(Prompt))
_values = operator.attrgetter(*_FIELDS)  # pickled in a third of the time of the dataclass
_encoded = json.JSONEncoder(sort_keys=True).encode

_Placed = tuple[Any, ...]  # place of a row, and the fields of its prompt


class _Prompts(Lazy[Prompt]):
    def __init__(self, placed: Sequence[_Placed]) -> None:
        self._placed = placed

    def __len__(self) -> int:
        return len(self._placed)

    def __iter__(self) -> Iterator[Prompt]:
        return map(_prompt, self._placed)

    def _at(self, i: int) -> Prompt:
        return _prompt(self._placed[i])


def _prompt(placed: _Placed) -> Prompt:
    return Prompt(**dict(zip(_FIELDS, placed[1:], strict=True)))


class Source:
    """All prompts of one file, on disk, in an order that depends only on (seed, epoch).

    name: of the source, "" for the only one; it is the `source` of prompts whose row has none. The other arguments and
    the errors are those of `PromptSource`.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        path: str,
        *,
        name: str,
        weight: float,
        seed: int | str,
        compared_by: str | None,
        limit: int | None = None,  # read only the first rows
    ) -> None:
        self.path, self.weight, self.taken = path, weight, 0
        self.instruction = config.instruction
        rows = read_rows(path, limit)
        found = columns(config, rows)
        self.notes = found.notes
        _check_answered(config, found, rows, compared_by)
        placed, hashes = Spool[_Placed](path), array("q")

        def made() -> Iterator[Prompt]:
            for place, row in rows.placed():
                where = f"{path}, {place}"
                answer = _answer(found.answer, row, where, path, compared_by)
                given = given_id(config, found, row, where)
                prompt = row_prompt(config, tokenizer, row, answer, found, where, path, given=given, source=name)
                placed.append((place, *_values(prompt)))
                hashes.append(hash(prompt.id))
                yield prompt

        self._sha256 = _digest(made())
        self._placed: Sequence[_Placed] = placed
        self.hashes: Hashes = np.frombuffer(hashes, dtype=np.int64)  # of the ids
        self._seed, self._epochs = seed, config.epochs
        self._order = Order(len(placed), seed=seed, epochs=config.epochs)

    @property
    def prompts(self) -> Sequence[Prompt]:
        """In file order; each is read from disk when it is asked for."""
        return _Prompts(self._placed)

    def place(self, i: int) -> str:
        """Of prompt i: "line 3" or "row 3" of the file."""
        return str(self._placed[i][0])

    @property
    def ended(self) -> bool:
        return self._order.ended

    def next(self, curriculum: Curriculum) -> Prompt | None:
        """The next prompt; None at the end."""
        dealt: Prompt | None = None

        def skipped(row: int) -> bool:
            nonlocal dealt
            dealt = self.prompts[row]
            return curriculum.skips(dealt.id)

        if self._order.next(skipped) is None:
            return None
        self.taken += 1
        return dealt

    def drop(self, rows: Collection[int]) -> None:
        """Remove prompts before the first `next`. Raises ValueError if none is left."""
        assert not self.taken
        if not rows:
            return
        kept = array("I", (i for i in range(len(self._placed)) if i not in rows))
        if not kept:
            raise ValueError(f"{self.path}: all {len(self._placed)} prompts were removed: use different prompts")
        self._placed, self.hashes = Selected(self._placed, kept), self.hashes[np.frombuffer(kept, dtype=np.uint32)]
        self._sha256 = _digest(self.prompts)
        self._order = Order(len(kept), seed=self._seed, epochs=self._epochs)

    def state(self) -> dict[str, Json]:
        cursor = self._order.cursor
        return {
            "rows": len(self._placed),
            "sha256": self._sha256,
            "epoch": cursor.epoch,
            "position": cursor.position,
            "dealt": self.taken,
        }

    def check(self, state: object) -> None:
        """Raises ValueError naming the file if its prompts are not those of the state, or if the state is damaged."""
        here = self.state()
        if not isinstance(state, Mapping) or [type(state.get(k)) for k in here] != [type(v) for v in here.values()]:
            raise ValueError(f"{self.path}: its saved position is damaged: {state!r}")
        if (state["rows"], state["sha256"]) != (here["rows"], here["sha256"]):
            raise ValueError(
                f"{self.path} has {here['rows']} prompts, but had {state['rows']} when the checkpoint was saved, "
                "and they differ in id, tokens, answer, source or other columns: use the original file, columns, "
                "template and tokenizer, or start a new run"
            )
        if not (state["epoch"] >= 0 and 0 <= state["position"] < state["rows"] and state["dealt"] >= 0):
            raise ValueError(f"{self.path}: its saved position is damaged: {dict(state)!r}")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to the position of a state that passes `check`."""
        self._order.restore(Cursor(state["epoch"], state["position"]))
        self.taken = state["dealt"]


def _digest(prompts: Iterable[Prompt]) -> str:
    """SHA-256 of prompts in file order, including the other columns, which rewards may use."""
    out = hashlib.sha256()
    for p in prompts:
        meta, ids = _encoded(p.meta), orjson.dumps(p.token_ids).decode()[1:-1].replace(",", ", ")
        ids += "," * (len(p.token_ids) == 1)
        # repr of (id, answer, token_ids, source, meta), in a third of the time: checkpoints hold its hash
        out.update(f"({p.id!r}, {p.answer!r}, ({ids}), {p.source!r}, {meta!r})".encode())
    return out.hexdigest()


def _check_answered(config: DataConfig, found: Columns, rows: Rows, compared_by: str | None) -> None:
    """Raises ValueError if no row has an answer that the reward or the configuration names."""
    if found.answered or (compared_by is None and config.answer_key is None):
        return
    try:
        column(rows[0], found.answer, rows.path)
    except MissingColumn as e:
        if compared_by is None:
            raise
        raise ValueError(f"{e}, or use a reward that needs no answer, unlike {compared_by!r} (docs/rewards.md)") from e


def _answer(key: str, row: Row, where: str, path: str, compared_by: str | None) -> str:
    """The answer of a row as written in the file; "" if it has none. Raises ValueError for an answer that is not text,
    a number, a truth value or a date, and for none if a reward compares with it."""
    try:
        answer = text_column(column(row, key, path), key, where)
    except MissingColumn:
        answer = ""
    except ValueError as e:
        raise ValueError(f"{e}: set data.answer_key to the answer's column, or write it as text") from None
    if answer.strip():
        return answer
    if compared_by is not None:
        raise ValueError(
            f"{where}: the prompt has no answer ({key}), but reward {compared_by!r} compares with it: add the answer, "
            "remove the row, or use a reward that needs none (docs/rewards.md)"
        )
    return ""


def row_prompt(
    config: DataConfig,
    tokenizer: Tokenizer,
    row: Row,
    answer: str,
    found: Columns,
    where: str,
    path: str,
    *,
    given: str | None,
    source: str,
) -> Prompt:
    """One row as a prompt. answer: as text; found: the columns of the file; where: file and place of the row; given:
    its id, None for a hash of text and answer; source: of rows that name none.

    Raises ValueError, naming `where`, for a prompt that is no text or messages, one of more than max_prompt_tokens, and
    another column without a JSON form.
    """
    question = column(row, found.prompt, path)
    messages = as_messages(question)
    template = config.template or ("plain" if isinstance(question, str) else "chat")
    if not messages or (template == "plain" and not isinstance(question, str)):
        want = 'text, or with data.template = "chat" a list of messages'
        raise ValueError(f"{where}: the prompt ({found.prompt}) is {question!r:.200}, expected {want}")
    asked = messages[-1]["content"] + config.instruction
    text = asked
    if template == "plain":
        messages = []
    else:
        messages[-1]["content"] = asked
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))  # a template includes the special tokens
    if len(ids) > config.max_prompt_tokens:
        raise ValueError(
            f"{where}: the prompt has {len(ids)} tokens, but data.max_prompt_tokens = {config.max_prompt_tokens}: "
            "raise it, or remove the row"
        )
    used = {found.prompt, config.id_key, "source"}
    return Prompt(
        id=given if given is not None else hashlib.sha256(f"{text}\0{answer}".encode()).hexdigest()[:16],
        token_ids=ids,
        answer=answer,
        text=text,
        source=source_of(row, source, where),
        messages=tuple(messages),
        meta={k: _plain(v, k, where) for k, v in row.items() if k not in used and v is not None},
    )


def _plain(value: Any, key: str, where: str) -> Json:
    try:
        return as_json(value)
    except ValueError as e:
        raise ValueError(f"{where}: column {key!r} {e}: remove the column, or write it as text") from None


def as_messages(given: Any, *, role: str = "user") -> list[dict[str, str]]:
    """A prompt or an answer as chat messages: a list of messages (as in DAPO's sets) as it is, text as one message of
    `role`.

    Empty for anything else, and if a message has no text.
    """
    messages = [{"role": role, "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, list):
        return []
    out: list[dict[str, str]] = []
    for m in messages:
        values = (m.get("role"), m.get("content")) if isinstance(m, dict) else ()
        texts = [v for v in values if isinstance(v, str) and v.strip()]
        if len(texts) != 2:
            return []
        out.append({"role": texts[0], "content": texts[1]})
    return out
