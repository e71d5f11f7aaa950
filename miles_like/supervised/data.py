"""Read examples for supervised training: answers, answers with a label or a label for each step, or pairs of a chosen
and a rejected answer.

Every row becomes a group that is packed like a rollout's: one sample for an answer, two for a pair, the chosen first.
Prompt and answer are tokenized separately, so that the tokens before an answer are those that a server would get.

Letters: S tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from miles_like.config.sections.supervised import PAIRS, SupervisedConfig
from miles_like.hf.steps import step_tokens
from miles_like.types import ANSWER, DESIRABLE, STEP_LABEL, Finish, Prompt, Sample, SampleGroup
from rollout.prompts.config import DataConfig
from rollout.prompts.dataset import read_rows
from rollout.prompts.schema import ANSWERS, PROMPTS
from rollout.prompts.source import Tokenizer, as_messages
from rollout.prompts.values import text_of

Messages = list[dict[str, str]]


class EndingTokenizer(Tokenizer, Protocol):
    """A tokenizer with an end token."""

    @property
    def eos_token_id(self) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleReader:
    """Reads rows as groups; the result depends only on the fields and the file."""

    tokenizer: EndingTokenizer
    data: DataConfig
    keys: SupervisedConfig
    algorithm: str  # one of SUPERVISED
    max_tokens: int  # input tokens of a micro-batch, which must hold the prompt with its answer, twice for a pair

    def read(self, path: str, limit: int | None = None) -> list[SampleGroup]:
        """All rows of a file or hub name, or the first `limit`, in order.

        Raises ValueError naming file, row and column for what `read_rows` refuses, a missing column, an empty answer,
        two equal answers, an example that is too long, and a conversation that the chat template rewrites.
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
        if self.algorithm == "process_reward":
            samples: tuple[Sample, ...]
            columns: list[str]
            samples, columns = (self._of_steps(row, name),), [self.keys.steps_key]
        else:
            samples, columns = self._answers(row, name)
        inputs = sum(len(s.token_ids) - 1 for s in samples)
        if inputs > self.max_tokens:
            both = " together" if len(samples) > 1 else ""
            raise ValueError(
                f"{' and '.join(map(repr, columns))} and the prompt{both} have {inputs} input tokens, but a "
                f"micro-batch holds only {self.max_tokens}: raise train.max_tokens_per_rank, or remove the row"
            )
        answer = samples[0].streams.get(ANSWER, samples[0].loss_mask)
        ids = samples[0].token_ids[: int(answer.int().argmax())]
        return SampleGroup(
            prompt=Prompt(id=name, token_ids=tuple(ids.tolist()), answer=samples[0].text), samples=samples
        )

    def _answers(self, row: Mapping[str, Any], name: str) -> tuple[tuple[Sample, ...], list[str]]:
        """(a sample for each answer, their columns)."""
        desirable = self._label(row) if self.algorithm == "kto" else None
        paired = self.algorithm in PAIRS or (self.algorithm == "kto" and desirable is None)
        prompt, answers = self._pair(row) if paired else self._answer(row)
        samples = tuple(self._sample(prompt, text, column, name, i) for i, (column, text) in enumerate(answers.items()))
        if self.algorithm == "kto":
            samples = tuple(_marked(s, i == 0 if desirable is None else desirable) for i, s in enumerate(samples))
        elif self.algorithm == "orpo":
            samples = tuple(_with_text(s, self.keys.nll_of == "text" and i == 0) for i, s in enumerate(samples))
        return samples, list(answers)

    # prompt and answers of a row, as messages

    def _answer(self, row: Mapping[str, Any]) -> tuple[Messages, dict[str, Messages]]:
        column = self.keys.messages_key
        if row.get(column) is None:
            key = "data.prompt_key, data.answer_key or supervised.messages_key"
            answer = self.data.answer_key or ANSWERS[0]
            return self._prompt(row, key), {answer: self._messages(row, answer, key, role="assistant")}
        if self.data.template != "chat":
            raise ValueError(f"column {column!r} contains a conversation: set data.template = 'chat'")
        if self.data.instruction:
            raise ValueError(f"data.instruction does not apply to conversations (column {column!r}): remove it")
        return [], {column: self._messages(row, column, "supervised.messages_key")}

    def _label(self, row: Mapping[str, Any]) -> bool | None:
        """Whether the row's answer is desirable; None: the row has no label, but a pair. Raises ValueError for a label
        that is neither true nor false, and for a row with neither."""
        column, chosen = self.keys.label_key, self.keys.chosen_key
        given = row.get(column)
        if given is None:
            if row.get(chosen) is not None:
                return None
            raise ValueError(
                f"no column {column!r} and no pair in {chosen!r} and {self.keys.rejected_key!r}: set "
                "supervised.label_key, or supervised.chosen_key and supervised.rejected_key"
            )
        if given not in (True, False):
            raise ValueError(f"column {column!r} is {given!r:.200}, expected true (desirable) or false")
        return bool(given)

    def _pair(self, row: Mapping[str, Any]) -> tuple[Messages, dict[str, Messages]]:
        """Answers that are whole conversations, as in Hugging Face's preference sets, begin with the prompt. Without a
        prompt column, the prompt is their common beginning."""
        columns = {self.keys.chosen_key: "supervised.chosen_key", self.keys.rejected_key: "supervised.rejected_key"}
        answers = {column: self._messages(row, column, key, role="assistant") for column, key in columns.items()}
        bare = [[(m["role"], m["content"].strip()) for m in answer] for answer in answers.values()]
        if bare[0] == bare[1]:
            raise ValueError(
                f"columns {' and '.join(map(repr, answers))} are equal, so neither answer is preferred: correct "
                "or remove the row"
            )
        whole = all(isinstance(row[column], list) for column in answers)
        if whole and row.get(self._prompt_key) is None:
            first, second = answers.values()
            same = [a == b for a, b in zip(first, second, strict=False)]
            plain = prompt = first[: [*same, False].index(False)]
        else:
            plain, prompt = self._prompt(row, "data.prompt_key", instruction=""), self._prompt(row, "data.prompt_key")
        n = len(plain)
        return prompt, {c: answer[n:] if whole and answer[:n] == plain else answer for c, answer in answers.items()}

    @property
    def _prompt_key(self) -> str:
        return self.data.prompt_key or PROMPTS[0]

    def _prompt(self, row: Mapping[str, Any], key: str, instruction: str | None = None) -> Messages:
        out = self._messages(row, self._prompt_key, key, role="user")
        out[-1]["content"] += self.data.instruction if instruction is None else instruction
        return out

    def _messages(self, row: Mapping[str, Any], column: str, key: str, role: str = "") -> Messages:
        """A column's text as one message of `role`, or its list of messages. key: the setting to name in errors."""
        given = row.get(column)
        if given is None:
            have = ", ".join(sorted(k for k, v in row.items() if v is not None))
            raise ValueError(f"no column {column!r}; columns found: {have}: set {key}")
        try:
            text = given if isinstance(given, list) or not role else text_of(given)
        except ValueError as e:
            raise ValueError(f"column {column!r} {e}") from None
        out = as_messages(text, role=role or "user")
        if not out or (isinstance(given, list) and self.data.template != "chat"):
            want = 'text, or with data.template = "chat" a list of messages'
            raise ValueError(f"column {column!r} is {given!r:.200}, expected {want}")
        return out

    # tokens

    def _of_steps(self, row: Mapping[str, Any], name: str) -> Sample:
        """The score of a step belongs to its last token, so the loss token is the one after it; after the last step a
        token is appended, as for a reward model."""
        steps, labels = (self._list(row, key) for key in ("steps_key", "step_labels_key"))
        if len(steps) != len(labels) or not steps:
            raise ValueError(
                f"it has {len(steps)} steps and {len(labels)} labels: provide at least one step, and one label per step"
            )
        if not all(isinstance(x, bool | int | float) and 0 <= x <= 1 for x in labels):
            raise ValueError(f"labels {labels!r:.200}, expected true, false, or numbers from 0 to 1")
        prompt = self._prompt(row, "data.prompt_key")
        before = self._encode(
            self._render(prompt, "", add_generation_prompt=True)
            if self.data.template == "chat"
            else prompt[-1]["content"]
        )
        if not 0 < len(before) <= self.data.max_prompt_tokens:
            raise ValueError(
                f"the prompt has {len(before)} tokens, but must have 1 to data.max_prompt_tokens = "
                f"{self.data.max_prompt_tokens}: raise data.max_prompt_tokens, or remove the row"
            )
        texts = [str(step) for step in steps]
        ids, ends = step_tokens(self._encode, texts, self.keys.step_separator, self._end)
        tokens = torch.tensor([*before, *ids, ids[-1]])
        mask, stream = torch.zeros(len(tokens), dtype=torch.bool), torch.zeros(len(tokens))
        at = torch.tensor(ends) + len(before) + 1
        mask[at], stream[at] = True, torch.tensor([float(x) for x in labels])
        return Sample(
            prompt_id=name,
            index=0,
            token_ids=tokens,
            loss_mask=mask,
            logprobs=torch.zeros(len(tokens)),
            routing=None,
            versions=(),
            finish=Finish.STOP,
            text=self.keys.step_separator.join(texts),
            streams={STEP_LABEL: stream},
        )

    def _list(self, row: Mapping[str, Any], key: str) -> list[Any]:
        column = getattr(self.keys, key)
        given = row.get(column)
        if not isinstance(given, list):
            raise ValueError(
                f"column {column!r} is {given!r:.100}, expected a list with one entry per step: set supervised.{key}"
            )
        return given

    def _sample(self, prompt: Messages, answer: Messages, column: str, name: str, index: int) -> Sample:
        ids, mask = self._chat(prompt, answer, column) if self.data.template == "chat" else self._plain(prompt, answer)
        before = mask.index(True)
        if not 0 < before <= self.data.max_prompt_tokens:
            raise ValueError(
                f"the prompt before the answer ({column!r}) has {before} tokens, but must have 1 to "
                f"data.max_prompt_tokens = {self.data.max_prompt_tokens}: raise data.max_prompt_tokens, or remove "
                "the row"
            )
        if self.algorithm == "reward_model":
            # the score belongs to the last input token, and a sample's last token is no input
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
            text=answer[-1]["content"] if answer else "",
        )

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)  # templates contain special tokens

    @property
    def _end(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no end-of-sequence token, so a model would not learn where answers end: set "
                "eos_token in its config"
            )
        return int(self.tokenizer.eos_token_id)

    def _plain(self, prompt: Messages, answer: Messages) -> tuple[list[int], list[bool]]:
        before, after = self._encode(prompt[-1]["content"]), [*self._encode(answer[-1]["content"]), self._end]
        return before + after, [False] * len(before) + [True] * len(after)

    def _chat(self, prompt: Messages, answer: Messages, column: str) -> tuple[list[int], list[bool]]:
        """(ids, loss mask). The loss mask covers every assistant message of `answer` up to the end token that the
        template writes; where it writes none, one is appended to the last."""
        turns = [i for i, message in enumerate(answer) if message["role"] == "assistant"]
        if not turns:
            raise ValueError(f"column {column!r} has no assistant message to learn from: add one, or remove the row")
        ids: list[int] = []
        mask: list[bool] = []
        done = ""
        for i in turns:
            before = self._render([*prompt, *answer[:i]], done, add_generation_prompt=True)
            through = self._render([*prompt, *answer[: i + 1]], before, add_generation_prompt=False)
            context, turn = self._encode(before[len(done) :]), self._encode(through[len(before) :])
            last = len(turn) - turn[::-1].index(self._end) if self._end in turn else None
            if i == turns[-1]:
                turn = [*turn, self._end] if last is None else turn[:last]
                last = len(turn)
            learnt = len(turn) if last is None else last
            ids += context + turn
            mask += [False] * len(context) + [True] * learnt + [False] * (len(turn) - learnt)
            done = through
        return ids, mask

    def _render(self, messages: Messages, so_far: str, *, add_generation_prompt: bool) -> str:
        text = str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        )
        if not text.startswith(so_far):
            raise ValueError(
                f"the chat template renders the first {len(messages) - 1} messages differently when another "
                "follows, so a server would never see these tokens: put each answer into its own row"
            )
        return text


def _marked(sample: Sample, desirable: bool) -> Sample:
    return replace(sample, streams={DESIRABLE: torch.full((len(sample.token_ids),), float(desirable))})


def _with_text(sample: Sample, text: bool) -> Sample:
    """The sample with the stream ANSWER. text: with loss on all tokens that have a predecessor."""
    mask = torch.arange(len(sample.token_ids)) > 0 if text else sample.loss_mask
    return replace(sample, loss_mask=mask, streams={ANSWER: sample.loss_mask.float()})
