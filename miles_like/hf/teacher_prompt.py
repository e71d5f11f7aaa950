"""A teacher's separate prompt, filled in from its configured template and used in place of the student's prompt."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Protocol

from miles_like.types import Prompt


class Encoder(Protocol):
    """The part of a tokenizer that this module uses."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def privileged(name: str, template: str, tokenizer: Encoder, prompt: Prompt) -> Sequence[int]:
    """Tokens of the filled-in template of teacher `name`; its fields are {prompt}, {answer}, {source} and the prompt's
    other columns. Raises ValueError for a field that the prompt does not have."""
    known = {**prompt.meta, "source": prompt.source, "answer": prompt.answer, "prompt": prompt.text}
    if not prompt.answer:
        del known["answer"]  # with an empty answer, a teacher of the student's weights would equal the student
    for _, field, _, _ in string.Formatter().parse(template):
        if field is not None and field not in known:
            raise ValueError(
                f"distillation.teachers.{name}.prompt has the field {field!r}, which prompt {prompt.id!r} lacks (it "
                f"has {', '.join(sorted(known))}): use one of these, or add the column to data.train"
            )
    return tokenizer.encode(template.format_map(known), add_special_tokens=False)
