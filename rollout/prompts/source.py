"""One source of prompts: the rows of a file as prompts, and the position in their order."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from miles_like.types import Json, Prompt
from rollout.prompts.config import DataConfig
from rollout.prompts.curriculum import Curriculum
from rollout.prompts.dataset import MissingColumn, Row, Rows, column, read_rows, text_column
from rollout.prompts.order import Cursor, Order
from rollout.prompts.schema import Columns, columns, given_ids, source_of
from rollout.prompts.values import as_json


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer that are used."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> Any: ...
    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


class Source:
    """All prompts of one file, in memory, in an order that depends only on (seed, epoch).

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
        found = columns(config, rows, path)
        self.notes = found.notes
        answers = _answers(config, found.answer, rows, path, compared_by)
        ids = given_ids(config, rows)
        self.prompts = [
            row_prompt(config, tokenizer, row, answer, found, rows.where(i), path, given=given, source=name)
            for i, (row, answer, given) in enumerate(zip(rows, answers, ids, strict=True))
        ]
        self.places = list(rows.places)  # of each prompt: "line 3" or "row 3" of the file
        self._seed, self._epochs = seed, config.epochs
        self._order = Order(len(self.prompts), seed=seed, epochs=config.epochs)

    @property
    def ended(self) -> bool:
        return self._order.ended

    def next(self, curriculum: Curriculum) -> Prompt | None:
        """The next prompt; None at the end."""
        row = self._order.next(lambda i: curriculum.skips(self.prompts[i].id))
        self.taken += row is not None
        return None if row is None else self.prompts[row]

    def drop(self, ids: Collection[str]) -> None:
        """Remove prompts before the first `next`. Raises ValueError if none is left."""
        assert not self.taken
        kept = [i for i, p in enumerate(self.prompts) if p.id not in ids]
        if not kept:
            raise ValueError(f"{self.path}: all {len(self.prompts)} prompts were removed: use different prompts")
        self.prompts, self.places = [self.prompts[i] for i in kept], [self.places[i] for i in kept]
        self._order = Order(len(kept), seed=self._seed, epochs=self._epochs)
        self.__dict__.pop("_sha256", None)

    def state(self) -> dict[str, Json]:
        cursor = self._order.cursor
        return {
            "rows": len(self.prompts),
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

    @functools.cached_property
    def _sha256(self) -> str:
        """Hash of all prompts in file order, including the other columns, which rewards may use."""
        out = hashlib.sha256()
        for p in self.prompts:
            out.update(repr((p.id, p.answer, p.token_ids, p.source, json.dumps(p.meta, sort_keys=True))).encode())
        return out.hexdigest()


def _answers(config: DataConfig, key: str, rows: Rows, path: str, compared_by: str | None) -> list[str]:
    """The answer of each row as written in the file; "" if it has none. Raises ValueError for an answer that is not
    text, a number, a truth value or a date."""
    out, missing = list[str](), list[MissingColumn]()
    for i, row in enumerate(rows):
        answer = ""
        try:
            answer = text_column(column(row, key, path), key, rows.where(i))
        except MissingColumn as e:
            missing.append(e)
        except ValueError as e:
            raise ValueError(f"{e}: set data.answer_key to the answer's column, or write it as text") from None
        out.append(answer if answer.strip() else "")
    if len(missing) == len(rows):
        if compared_by is not None:
            raise ValueError(
                f"{missing[0]}, or use a reward that needs no answer, unlike {compared_by!r} (docs/rewards.md)"
            )
        if config.answer_key is not None:
            raise missing[0]
    if compared_by is not None and "" in out:
        raise ValueError(
            f"{rows.where(out.index(''))}: the prompt has no answer ({key}), but reward {compared_by!r} compares "
            "with it: add the answer, remove the row, or use a reward that needs none (docs/rewards.md)"
        )
    return out


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
