"""Rows of a file as what is given to learn from: answers, or pairs of a preferred one and another.

Every row becomes a group that is packed like a rollout's: one sample for an answer, two for a pair, the preferred
first. A row is tokenized in the pieces that a rollout would see: what is asked, then what is answered, so that the
tokens before an answer are those that a server is sent.

Letters: S tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from miles_like.supervised_config import PAIRS, SupervisedConfig
from miles_like.types import Finish, Prompt, Sample, SampleGroup
from rollout.data_config import DataConfig
from rollout.rows import read_rows
from rollout.schema import ANSWERS, PROMPTS
from rollout.source import Tokenizer, as_messages
from rollout.written import text_of

Messages = list[dict[str, str]]


class EndingTokenizer(Tokenizer, Protocol):
    """Also knows how an answer ends."""

    @property
    def eos_token_id(self) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleReader:
    """What `read` makes of rows depends on these alone."""

    tokenizer: EndingTokenizer
    data: DataConfig
    keys: SupervisedConfig
    algorithm: str  # "sft", "dpo" or "reward_model"
    max_tokens: int  # inputs of a micro-batch: an answer, or both of a pair, must fit with what was asked

    def read(self, path: str, limit: int | None = None) -> list[SampleGroup]:
        """All rows of a file or of a hub name, or its first `limit`, in its order.

        Raises ValueError naming file, row and column: what `read_rows` refuses, a column that is missing, an empty
        answer, two equal ones, an example that is too long, a conversation that the chat template rewrites.
        """
        rows, name = read_rows(path, limit), Path(path).stem
        out = []
        for i, row in enumerate(rows):
            try:
                out.append(self._group(row, f"{name}:{i}"))
            except ValueError as e:
                raise ValueError(f"{rows.where(i)}: {e}") from None
        return out

    def _group(self, row: Mapping[str, Any], name: str) -> SampleGroup:
        asked, answers = self._pair(row) if self.algorithm in PAIRS else self._answer(row)
        samples = tuple(self._sample(asked, said, column, name, i) for i, (column, said) in enumerate(answers.items()))
        inputs = sum(len(s.token_ids) - 1 for s in samples)
        if inputs > self.max_tokens:
            both = " together" if len(samples) > 1 else ""
            raise ValueError(
                f"{' and '.join(map(repr, answers))} with what is asked{both} are {inputs} input tokens, a micro-batch "
                f"holds {self.max_tokens}: raise train.max_tokens_per_rank, or take the row out"
            )
        before = int(samples[0].loss_mask.int().argmax())
        prompt = Prompt(id=name, token_ids=tuple(samples[0].token_ids[:before].tolist()), answer=samples[0].text)
        return SampleGroup(prompt=prompt, samples=samples)

    # what is asked and what is answered

    def _answer(self, row: Mapping[str, Any]) -> tuple[Messages, dict[str, Messages]]:
        column = self.keys.messages_key
        if row.get(column) is None:
            key = "data.prompt_key, data.answer_key or supervised.messages_key"
            said = self.data.answer_key or ANSWERS[0]
            return self._asked(row, key), {said: self._messages(row, said, key, role="assistant")}
        if self.data.template != "chat":
            raise ValueError(f"column {column!r} holds a conversation: set data.template = 'chat'")
        if self.data.instruction:
            raise ValueError(f"data.instruction is not put into the conversations of column {column!r}: remove it")
        return [], {column: self._messages(row, column, "supervised.messages_key")}

    def _pair(self, row: Mapping[str, Any]) -> tuple[Messages, dict[str, Messages]]:
        """Answers that are whole conversations, as Hugging Face's preference sets have them, begin with what is asked;
        without a column for it, that is what both begin with."""
        columns = {self.keys.chosen_key: "supervised.chosen_key", self.keys.rejected_key: "supervised.rejected_key"}
        answers = {column: self._messages(row, column, key, role="assistant") for column, key in columns.items()}
        bare = [[(m["role"], m["content"].strip()) for m in said] for said in answers.values()]
        if bare[0] == bare[1]:
            raise ValueError(f"columns {' and '.join(map(repr, answers))} are the same answer: nothing is preferred")
        talks = all(isinstance(row[column], list) for column in answers)
        if talks and row.get(self._prompt_key) is None:
            first, second = answers.values()
            same = [a == b for a, b in zip(first, second, strict=False)]
            plain = asked = first[: [*same, False].index(False)]
        else:
            plain, asked = self._asked(row, "data.prompt_key", instruction=""), self._asked(row, "data.prompt_key")
        n = len(plain)
        return asked, {c: said[n:] if talks and said[:n] == plain else said for c, said in answers.items()}

    @property
    def _prompt_key(self) -> str:
        return self.data.prompt_key or PROMPTS[0]

    def _asked(self, row: Mapping[str, Any], key: str, instruction: str | None = None) -> Messages:
        out = self._messages(row, self._prompt_key, key, role="user")
        out[-1]["content"] += self.data.instruction if instruction is None else instruction
        return out

    def _messages(self, row: Mapping[str, Any], column: str, key: str, role: str = "") -> Messages:
        """A column's text as one message of `role`, or its list of messages."""
        given = row.get(column)
        if given is None:
            have = ", ".join(sorted(k for k, v in row.items() if v is not None))
            raise ValueError(f"no column {column!r}; it has {have}: set {key}")
        try:
            text = given if isinstance(given, list) or not role else text_of(given)
        except ValueError as e:
            raise ValueError(f"column {column!r} {e}") from None
        out = as_messages(text, role=role or "user")
        if not out or (isinstance(given, list) and self.data.template != "chat"):
            want = 'text, or with data.template = "chat" a list of messages'
            raise ValueError(f"column {column!r} is {given!r:.200}, want {want}")
        return out

    # as tokens

    def _sample(self, asked: Messages, said: Messages, column: str, name: str, index: int) -> Sample:
        ids, mask = self._chat(asked, said, column) if self.data.template == "chat" else self._plain(asked, said)
        before = mask.index(True)
        if not 0 < before <= self.data.max_prompt_tokens:
            raise ValueError(
                f"{before} tokens come before the answer ({column!r}), data.max_prompt_tokens = "
                f"{self.data.max_prompt_tokens}, and one is the least: raise it, or take the row out"
            )
        if self.algorithm == "reward_model":
            # the score is of the last token that is fed, and what is fed is all but a sample's last token
            ids, mask = [*ids, ids[-1]], [False] * len(ids) + [True]
        loss_mask = torch.tensor(mask)
        return Sample(
            prompt_id=name,
            index=index,
            token_ids=torch.tensor(ids),
            loss_mask=loss_mask,
            logprobs=torch.zeros(len(ids)),
            routing=None,
            versions=(),
            finish=Finish.STOP,
            text=said[-1]["content"] if said else "",
        )

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)  # a template writes its own

    @property
    def _end(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end token (eos_token): a model would not learn where answers end")
        return int(self.tokenizer.eos_token_id)

    def _plain(self, asked: Messages, said: Messages) -> tuple[list[int], list[bool]]:
        before, after = self._encode(asked[-1]["content"]), [*self._encode(said[-1]["content"]), self._end]
        return before + after, [False] * len(before) + [True] * len(after)

    def _chat(self, asked: Messages, said: Messages, column: str) -> tuple[list[int], list[bool]]:
        """Under loss is what the assistant says in `said`, each time up to the end token that the template writes.
        Where it writes none, one is put after the last."""
        turns = [i for i, message in enumerate(said) if message["role"] == "assistant"]
        if not turns:
            raise ValueError(f"column {column!r} has no message of the assistant: there is nothing to learn")
        ids: list[int] = []
        mask: list[bool] = []
        done = ""
        for i in turns:
            before = self._written([*asked, *said[:i]], done, add_generation_prompt=True)
            through = self._written([*asked, *said[: i + 1]], before, add_generation_prompt=False)
            quiet, answer = self._encode(before[len(done) :]), self._encode(through[len(before) :])
            last = len(answer) - answer[::-1].index(self._end) if self._end in answer else None
            if i == turns[-1]:
                answer = [*answer, self._end] if last is None else answer[:last]
                last = len(answer)
            learnt = len(answer) if last is None else last
            ids += quiet + answer
            mask += [False] * len(quiet) + [True] * learnt + [False] * (len(answer) - learnt)
            done = through
        return ids, mask

    def _written(self, messages: Messages, so_far: str, *, add_generation_prompt: bool) -> str:
        text = str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        )
        if not text.startswith(so_far):
            raise ValueError(
                f"the chat template writes the first {len(messages) - 1} messages otherwise once another follows, so "
                "that no server would see these tokens: give each answer a row of its own"
            )
        return text
