"""One source of prompts: a file's rows as prompts, and how far they are dealt."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from miles_like.types import Json, Prompt
from rollout.curriculum import Curriculum
from rollout.data_config import DataConfig
from rollout.order import Cursor, Order
from rollout.rows import NoColumn, Row, Rows, column, read_rows, text_column
from rollout.schema import Columns, columns, given_ids, source_of
from rollout.written import as_json


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> Any: ...
    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


class Source:
    """All prompts of one file, in memory, in an order that depends on (seed, epoch) only.

    name: of the source, "" for the only one; a prompt whose row does not say where it is from is from there. The other
    arguments, and what is raised, are as of `PromptSource`.
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
        limit: int | None = None,  # rows that are read, the first ones
    ) -> None:
        self.path, self.weight, self.dealt = path, weight, 0
        self.instruction = config.instruction
        rows = read_rows(path, limit)
        found = columns(config, rows, path)
        self.said = found.said
        answers = _answers(config, found.answer, rows, path, compared_by)
        ids = given_ids(config, rows)
        self.prompts = [
            _prompt(config, tokenizer, row, answer, found, rows.where(i), path, given=given, source=name)
            for i, (row, answer, given) in enumerate(zip(rows, answers, ids, strict=True))
        ]
        self.places = list(rows.places)  # of each prompt: "line 3" or "row 3" of the file
        self._seed, self._epochs = seed, config.epochs
        self._order = Order(len(self.prompts), seed=seed, epochs=config.epochs)

    @property
    def ended(self) -> bool:
        return self._order.ended

    def next(self, curriculum: Curriculum) -> Prompt | None:
        """None: it has ended."""
        row = self._order.next(lambda i: curriculum.passes_over(self.prompts[i].id))
        self.dealt += row is not None
        return None if row is None else self.prompts[row]

    def drop(self, ids: Collection[str]) -> None:
        """Before anything is dealt: as if these rows were not there. Raises ValueError when none is left."""
        assert not self.dealt, "prompts are left out before any is dealt"
        kept = [i for i, p in enumerate(self.prompts) if p.id not in ids]
        if not kept:
            raise ValueError(f"{self.path}: none of its {len(self.prompts)} prompts is left: take other prompts")
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
            "dealt": self.dealt,
        }

    def check(self, state: object) -> None:
        """Raises ValueError naming the file when its prompts are not those of the state, or for a state that no
        `state` gave."""
        here = self.state()
        if not isinstance(state, Mapping) or [type(state.get(k)) for k in here] != [type(v) for v in here.values()]:
            raise ValueError(f"{self.path}: its saved position is damaged: {state!r}")
        if (state["rows"], state["sha256"]) != (here["rows"], here["sha256"]):
            raise ValueError(
                f"{self.path} gives {here['rows']} prompts now and gave {state['rows']} when the checkpoint was made, "
                "and they are not the same in id, tokens, answer, source and other columns: give the run the file, "
                "columns, template and tokenizer that it had, or start a new one"
            )
        if not (state["epoch"] >= 0 and 0 <= state["position"] < state["rows"] and state["dealt"] >= 0):
            raise ValueError(f"{self.path}: its saved position is damaged: {dict(state)!r}")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where a state is that `check` does not refuse."""
        self._order.restore(Cursor(state["epoch"], state["position"]))
        self.dealt = state["dealt"]

    @functools.cached_property
    def _sha256(self) -> str:
        """Of all that a prompt is, in the order of the file: rewards read its other columns too."""
        out = hashlib.sha256()
        for p in self.prompts:
            out.update(repr((p.id, p.answer, p.token_ids, p.source, json.dumps(p.meta, sort_keys=True))).encode())
        return out.hexdigest()


def _answers(config: DataConfig, key: str, rows: Rows, path: str, compared_by: str | None) -> list[str]:
    """Of each row, as it is written in the file; "" where it has none. Raises ValueError for one that is not text, a
    number, a truth value or a date."""
    out, missing = list[str](), list[NoColumn]()
    for i, row in enumerate(rows):
        answer = ""
        try:
            answer = text_column(column(row, key, path), key, rows.where(i))
        except NoColumn as e:
            missing.append(e)
        except ValueError as e:
            raise ValueError(f"{e}: name the answer's column by data.answer_key, or write it as text") from None
        out.append(answer if answer.strip() else "")
    if len(missing) == len(rows):
        if compared_by is not None:
            raise ValueError(
                f"{missing[0]}, or name another reward than {compared_by!r}, which compares with the answer "
                "(docs/rewards.md)"
            )
        if config.answer_key is not None:
            raise missing[0]
    if compared_by is not None and "" in out:
        raise ValueError(
            f"{rows.where(out.index(''))}: the prompt has no answer ({key}), and reward {compared_by!r} compares with "
            "it: add it, take the row out, or name a reward that needs none (docs/rewards.md)"
        )
    return out


def _prompt(
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
    question = column(row, found.prompt, path)
    messages = as_messages(question)
    template = config.template or ("plain" if isinstance(question, str) else "chat")
    if not messages or (template == "plain" and not isinstance(question, str)):
        want = 'text, or with data.template = "chat" a list of messages'
        raise ValueError(f"{where}: the prompt ({found.prompt}) is {question!r:.200}, want {want}")
    asked = messages[-1]["content"] + config.instruction
    text = asked
    if template == "plain":
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
        raise ValueError(f"{where}: column {key!r} {e}: take the column out, or write it as text") from None


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
