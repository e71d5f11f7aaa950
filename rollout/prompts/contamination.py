"""Training prompts that are also in an eval set, which then no longer measures generalization.

Two prompts match if their texts are equal up to case, white space and Unicode form, or if they share 13 consecutive
words. GPT-3 was checked with n-grams of 8 to 13 words (arXiv:2005.14165, appendix C), and EleutherAI's
lm-evaluation-harness uses 13. Prompts of fewer words match only by their whole text, so two sums of the same form
are different.

Letters: N words of all prompts, W = 13.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from miles_like.types import Prompt
from rollout.prompts.config import Decontaminate
from rollout.prompts.mix import PromptSource

WORDS = 13  # consecutive
FORM = 10  # 13 words that this many prompts of one side share belong to a common template, not to the question

_AT_ONCE = 4096  # prompts that are compared at a time
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
    """The matches in the order of `train`. Compares the last messages, without the instruction at their end. `train` is
    read once, some prompts at a time; of them only those with a common row of words stay in memory."""
    sets = [(name, p) for name, prompts in held.items() for p in prompts]
    by_text: dict[str, int] = {}
    for i, (_, p) in enumerate(sets):
        by_text.setdefault(_normalized(p, instructions), i)
    if not by_text:
        return []
    shared, matches = _Shared(list(by_text)), list[tuple[int, str]]()
    prompts, first = iter(train), 0
    while texts := [_normalized(p, instructions) for p in itertools.islice(prompts, _AT_ONCE)]:
        hit = shared.add(texts)
        matches += [(first + i, text) for i, text in enumerate(texts) if text in by_text or text in hit]
        first += len(texts)
    of_text, out = shared.found(), list[Overlap]()
    for i, text in matches:
        j = by_text.get(text if text in by_text else of_text.get(text, text))
        if j is not None:
            out.append(Overlap(train[i], sets[j][1], sets[j][0], text in by_text))
    return out


def _normalized(prompt: Prompt, instructions: Collection[str]) -> str:
    text = prompt.messages[-1]["content"] if prompt.messages else prompt.text
    for instruction in sorted(instructions, key=len, reverse=True):
        if instruction and text.endswith(instruction):
            text = text[: -len(instruction)]
            break
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


class _Shared:
    """Texts that share W consecutive words with those of `held`, which are unique. Words that are a form are forgotten,
    so memory grows with the matches."""

    def __init__(self, held: Sequence[str]) -> None:
        self._held, self._vocabulary = held, dict[str, int]()
        self._words, windows = _windows(held, lambda word: self._vocabulary.setdefault(word, len(self._vocabulary)))
        keys = _keys(self._words, windows[:, 0])
        # the first occurrence of each gram: np.unique sorts stably
        self._keys, first = np.unique(keys, return_index=True)
        self._first = windows[first]  # [grams, 2]: place and text
        gram = np.searchsorted(self._keys, keys)
        self._form = _texts_of(gram, windows[:, 1], len(self._keys)) >= FORM
        self._texts = np.zeros(len(self._keys), dtype=np.int64)  # with each gram
        self._numbers: dict[str, int] = {}  # of the texts with a common gram
        self._hits: list[Ids] = []  # [hits, 2]: gram and number of a text

    def add(self, texts: Sequence[str]) -> set[str]:
        """Those of `texts` with a common gram, which may yet turn out to be a form."""
        if not len(self._keys):
            return set()
        new = [text for text in dict.fromkeys(texts) if text not in self._numbers]
        words, of = _windows(new, lambda word: self._vocabulary.get(word, -1))
        keys = _keys(words, of[:, 0])
        place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        hit = np.flatnonzero(self._keys[place] == keys)
        gram, steps = place[hit], np.arange(WORDS)
        at, at_held = of[hit, 0], self._first[gram, 0]
        # keys of 64 bits may collide
        same = (words[at[:, None] + steps] == self._words[at_held[:, None] + steps]).all(axis=1)
        gram, text = gram[same], of[hit[same], 1]
        self._texts += _texts_of(gram, text, len(self._keys))
        self._form |= self._texts >= FORM
        kept = ~self._form[gram]
        numbers = [self._numbers.setdefault(new[i], len(self._numbers)) for i in text[kept].tolist()]
        self._hits.append(np.stack([gram[kept], np.array(numbers, dtype=np.int64)], axis=1))
        return {text for text in texts if text in self._numbers}

    def found(self) -> dict[str, str]:
        """Each text with a common gram that is no form -> the first text of `held` with such a gram."""
        hits = np.concatenate([np.empty((0, 2), dtype=np.int64), *self._hits])
        hits = hits[~self._form[hits[:, 0]]]
        out: dict[int, int] = {}
        for i, j in zip(hits[:, 1].tolist(), self._first[hits[:, 0], 1].tolist(), strict=True):
            out[i] = min(out.get(i, j), j)
        return {text: self._held[out[i]] for text, i in self._numbers.items() if i in out}


def _windows(texts: Sequence[str], number: Callable[[str], int]) -> tuple[Ids, Ids]:
    """The words of all texts as numbers [N], and [windows, 2]: start and text of each W consecutive words of a text."""
    words: list[int] = []
    starts: list[Ids] = []
    owners: list[Ids] = []
    for i, text in enumerate(texts):
        start = len(words)
        words += map(number, _WORD.findall(text))
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


def _texts_of(gram: Ids, text: Ids, grams: int) -> Ids:
    """[grams]: how many texts contain each gram."""
    pairs = np.unique(np.stack([gram, text], axis=1), axis=0) if len(gram) else np.empty((0, 2), dtype=np.int64)
    return np.bincount(pairs[:, 0], minlength=grams)
