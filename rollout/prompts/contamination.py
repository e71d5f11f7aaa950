"""Training prompts that are also in an eval set, which then no longer measures generalization.

Two prompts match if their texts are equal up to case, white space and Unicode form, or if they share 13 consecutive
words. GPT-3 was checked with n-grams of 8 to 13 words (arXiv:2005.14165, appendix C), and EleutherAI's
lm-evaluation-harness uses 13. Prompts of fewer words match only by their whole text, so two sums of the same form
are different.

Letters: N words of all prompts, W = 13.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from miles_like.types import Prompt
from rollout.prompts.config import Decontaminate
from rollout.prompts.mix import PromptSource

WORDS = 13  # consecutive
FORM = 10  # 13 words that this many prompts of one side share belong to a common template, not to the question

_WORD = re.compile(r"\w+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that the product is invertible modulo 2^64

Ids = NDArray[np.int64]


class Overlap(NamedTuple):
    """A training prompt and the first eval prompt that matches it."""

    prompt: Prompt
    held: Prompt  # of the eval set
    eval_set: str
    same_text: bool  # else 13 consecutive words


def decontaminate(train: PromptSource, held: Mapping[str, Sequence[Prompt]], how: Decontaminate) -> tuple[str, ...]:
    """Compare the training prompts with the eval sets (name -> prompts); with "drop" remove matches from `train`.

    Returns a message if there are matches. Raises ValueError with "refuse" if there are matches, and with "drop" if no
    prompt would be left.
    """
    if how == "off":
        return ()
    found = overlaps(train.all(), held, instructions=train.instructions)
    if not found:
        return ()
    same, (first, other, name, _) = sum(o.same_text for o in found), found[0]
    summary = (
        f"{len(found)} of {len(train)} training prompts are also in eval sets ({same} with the same text, "
        f"{len(found) - same} with {WORDS} consecutive words), the first is {first.id!r} ({other.id!r} of {name})"
    )
    if how == "refuse":
        raise ValueError(f"{summary}: remove them from one of the files, or set data.decontaminate = 'drop'")
    if how == "drop":
        train.drop({o.prompt.id for o in found})
        return (f"{summary}: removed, {len(train)} remain",)
    return (f"{summary}: data.decontaminate = 'drop' removes them",)


def overlaps(
    train: Sequence[Prompt], held: Mapping[str, Sequence[Prompt]], *, instructions: Collection[str] = ()
) -> list[Overlap]:
    """The matches in the order of `train`. Compares the last messages, without the instruction at their end."""
    sets = [(name, p) for name, prompts in held.items() for p in prompts]
    train_texts = [_normalized(p, instructions) for p in train]
    by_text: dict[str, int] = {}
    for i, (_, p) in enumerate(sets):
        by_text.setdefault(_normalized(p, instructions), i)
    shared = _shared_words(list(dict.fromkeys(train_texts)), list(by_text))
    out = []
    for p, text in zip(train, train_texts, strict=True):
        j = by_text.get(text if text in by_text else shared.get(text, text))
        if j is not None:
            out.append(Overlap(p, sets[j][1], sets[j][0], text in by_text))
    return out


def _normalized(prompt: Prompt, instructions: Collection[str]) -> str:
    text = prompt.messages[-1]["content"] if prompt.messages else prompt.text
    for instruction in sorted(instructions, key=len, reverse=True):
        if instruction and text.endswith(instruction):
            text = text[: -len(instruction)]
            break
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _shared_words(train: Sequence[str], held: Sequence[str]) -> dict[str, str]:
    """Text of `train` -> the first text of `held` with which it shares W consecutive words. Texts are unique."""
    vocabulary: dict[str, int] = {}
    (a, a_of), (b, b_of) = _windows(train, vocabulary), _windows(held, vocabulary)
    if not len(a_of) or not len(b_of):
        return {}
    keys_a, keys_b = _keys(a, a_of[:, 0]), _keys(b, b_of[:, 0])
    # the first occurrence of each gram of `held`: np.unique sorts stably
    keys, first = np.unique(keys_b, return_index=True)
    place = np.minimum(np.searchsorted(keys, keys_a), len(keys) - 1)
    hit = np.flatnonzero(keys[place] == keys_a)
    gram = place[hit]
    at_a, at_b = a_of[hit, 0], b_of[first[gram], 0]
    steps = np.arange(WORDS)
    same = (a[at_a[:, None] + steps] == b[at_b[:, None] + steps]).all(axis=1)  # keys of 64 bits may collide
    hit, gram = hit[same], gram[same]
    form = _forms(gram, a_of[hit, 1], len(keys)) | _forms(np.searchsorted(keys, keys_b), b_of[:, 1], len(keys))
    out: dict[int, int] = {}
    for i, j in zip(a_of[hit, 1][~form[gram]].tolist(), b_of[first[gram], 1][~form[gram]].tolist(), strict=True):
        out[i] = min(out.get(i, j), j)
    return {train[i]: held[j] for i, j in out.items()}


def _windows(texts: Sequence[str], vocabulary: dict[str, int]) -> tuple[Ids, Ids]:
    """The words of all texts as numbers [N], and [windows, 2]: start and text of each W consecutive words of a text."""
    words: list[int] = []
    starts: list[Ids] = []
    owners: list[Ids] = []
    for i, text in enumerate(texts):
        start = len(words)
        words += [vocabulary.setdefault(word, len(vocabulary)) for word in _WORD.findall(text)]
        if (n := len(words) - start - WORDS + 1) > 0:
            starts.append(np.arange(start, start + n))
            owners.append(np.full(n, i))
    if not starts:
        return np.array(words, dtype=np.int64), np.empty((0, 2), dtype=np.int64)
    return np.array(words, dtype=np.int64), np.stack([np.concatenate(starts), np.concatenate(owners)], axis=1)


def _keys(words: Ids, starts: Ids) -> NDArray[np.uint64]:
    """A hash of each W consecutive words: a polynomial of their numbers modulo 2^64."""
    out = np.zeros(len(starts), dtype=np.uint64)
    mixed = (words.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1342543DE82EF95)
    mixed ^= mixed >> np.uint64(32)
    for step in range(WORDS):
        out = out * _FACTOR + mixed[starts + step]
    return out


def _forms(gram: Ids, text: Ids, grams: int) -> NDArray[np.bool_]:
    """For each gram, whether at least FORM texts contain it."""
    pairs = np.unique(np.stack([gram, text], axis=1), axis=0)
    return np.bincount(pairs[:, 0], minlength=grams) >= FORM
