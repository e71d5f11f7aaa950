"""An answer as reasoning steps: its tokens, and the last one of each step, where a process reward model has its value.

Training and scoring both use these functions, so that a step ends at the same token in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Encode = Callable[[str], Sequence[int]]


def step_tokens(encode: Encode, steps: Sequence[str], separator: str, end: int | None) -> tuple[list[int], list[int]]:
    """(token ids, index of the last token of each step). Steps are tokenized one by one, each with the separator after
    it, except the last, which `end` (the end token, None without one) closes. Raises ValueError for an empty step."""
    ids: list[int] = []
    ends: list[int] = []
    for i, step in enumerate(steps):
        last = i + 1 == len(steps)
        tokens = list(encode(step if last else step + separator))
        if not tokens:
            raise ValueError(f"step {i + 1} of {len(steps)} is empty: remove it")
        ids += [*tokens, *([end] if last and end is not None else [])]
        ends.append(len(ids) - 1)
    return ids, ends


def tokens_of_text(encode: Encode, text: str, separator: str, end: int | None) -> tuple[list[int], list[int]]:
    """As `step_tokens`, of an answer whose steps are the parts between separators; with the separator "" each token is
    a step. Empty parts are dropped; an empty answer is one step, its end token, and without one it has no step."""
    if separator:
        parts = [part for part in text.split(separator) if part]
        if parts:
            return step_tokens(encode, parts, separator, end)
        return ([], []) if end is None else ([end], [0])
    ids = list(encode(text))
    ends = list(range(len(ids)))
    if end is not None:
        ids, ends = [*ids, end], [*ends[:-1], len(ids)]
    return ids, ends
