"""What a teacher is asked in place of the student's prompt, by the template of its configuration."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from miles_like.types import Prompt


def privileged(name: str, template: str, tokenizer: Any, prompt: Prompt) -> Sequence[int]:
    """Tokens of a template of {prompt}, {answer} and the prompt's other columns. Raises ValueError naming a field that
    the prompt has not."""
    known = {**prompt.meta, "source": prompt.source, "answer": prompt.answer, "prompt": prompt.text}
    if not prompt.answer:
        del known["answer"]  # a teacher that is told nothing would tell the student what it says itself
    for _, field, _, _ in string.Formatter().parse(template):
        if field is not None and field not in known:
            raise ValueError(
                f"distillation.teachers.{name}.prompt has the field {field!r}, which prompt {prompt.id!r} has not (it "
                f"has {', '.join(sorted(known))}): name one of these, or add the column to data.train"
            )
    ids: list[int] = tokenizer.encode(template.format_map(known), add_special_tokens=False)
    return ids
