"""Prompts that stand in an eval set too: what a model learns of them is not what the set is to measure.

Two prompts are the same when their texts are, but for case, white space and form of Unicode, or when they share 13
words in a row. N-grams of 8 to 13 words are what GPT-3 was checked by (arXiv:2005.14165, appendix C), 13 alone what
EleutherAI's lm-evaluation-harness took over from it. Short prompts have no 13 words, so that two sums of the same form
are not taken for one.

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
from rollout.data_config import Decontaminate
from rollout.prompts import PromptSource

WORDS = 13  # in a row
FORM = 10  # 13 words that so many prompts of one side share are a form that they are put in, not what is asked

_WORD = re.compile(r"\w+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no word is lost in the product

Ids = NDArray[np.int64]


class Overlap(NamedTuple):
    """One prompt to train on and the first of an eval set that it is too."""

    prompt: Prompt
    held: Prompt
    eval_set: str
    same_text: bool  # else 13 words in a row


def decontaminated(train: PromptSource, held: Mapping[str, Sequence[Prompt]], how: Decontaminate) -> tuple[str, ...]:
    """Compare all prompts of `train` with those of the eval sets, by name; with "drop" leave the former's out.

    Returns what there is to say: one line, or none. Raises ValueError with "refuse" where there is one, and with "drop"
    where none would be left.
    """
    if how == "off":
        return ()
    found = overlaps(train.all(), held, instructions=train.instructions)
    if not found:
        return ()
    same, (first, other, name, _) = sum(o.same_text for o in found), found[0]
    said = (
        f"{len(found)} of {len(train)} prompts to train on are in eval sets too ({same} with the same text, "
        f"{len(found) - same} with {WORDS} words in a row): first {first.id!r} as {other.id!r} of {name}"
    )
    if how == "refuse":
        raise ValueError(f"{said}: take them out of either file, or set data.decontaminate = 'drop'")
    if how == "drop":
        train.drop({o.prompt.id for o in found})
        return (f"{said}: left out, {len(train)} remain",)
    return (f"{said}: data.decontaminate = 'drop' leaves them out",)


def overlaps(
    train: Sequence[Prompt], held: Mapping[str, Sequence[Prompt]], *, instructions: Collection[str] = ()
) -> list[Overlap]:
    """In the order of `train`. What is compared is the last message, without the instruction that was put after it."""
    sets = [(name, p) for name, prompts in held.items() for p in prompts]
    asked = [_asked(p, instructions) for p in train]
    examined = [_asked(p, instructions) for _, p in sets]
    by_text: dict[str, int] = {}
    for i, text in enumerate(examined):
        by_text.setdefault(text, i)
    shared = _shared_words(list(dict.fromkeys(asked)), list(by_text))
    out = []
    for p, text in zip(train, asked, strict=True):
        j = by_text.get(text if text in by_text else shared.get(text, text))
        if j is not None:
            out.append(Overlap(p, sets[j][1], sets[j][0], text in by_text))
    return out


def _asked(prompt: Prompt, instructions: Collection[str]) -> str:
    text = prompt.messages[-1]["content"] if prompt.messages else prompt.text
    for instruction in sorted(instructions, key=len, reverse=True):
        if instruction and text.endswith(instruction):
            text = text[: -len(instruction)]
            break
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _shared_words(train: Sequence[str], held: Sequence[str]) -> dict[str, str]:
    """Text of `train` -> the first of `held` with which it has W words in a row. No text is there twice."""
    vocabulary: dict[str, int] = {}
    (a, a_of), (b, b_of) = _windows(train, vocabulary), _windows(held, vocabulary)
    if not len(a_of) or not len(b_of):
        return {}
    keys_a, keys_b = _keys(a, a_of[:, 0]), _keys(b, b_of[:, 0])
    # each gram of `held` once, where it stands first: np.unique sorts stably
    keys, first = np.unique(keys_b, return_index=True)
    place = np.minimum(np.searchsorted(keys, keys_a), len(keys) - 1)
    hit = np.flatnonzero(keys[place] == keys_a)
    gram = place[hit]
    at_a, at_b = a_of[hit, 0], b_of[first[gram], 0]
    steps = np.arange(WORDS)
    same = (a[at_a[:, None] + steps] == b[at_b[:, None] + steps]).all(axis=1)  # a key is 64 bits, not the words
    hit, gram = hit[same], gram[same]
    form = _forms(gram, a_of[hit, 1], len(keys)) | _forms(np.searchsorted(keys, keys_b), b_of[:, 1], len(keys))
    out: dict[int, int] = {}
    for i, j in zip(a_of[hit, 1][~form[gram]].tolist(), b_of[first[gram], 1][~form[gram]].tolist(), strict=True):
        out[i] = min(out.get(i, j), j)
    return {train[i]: held[j] for i, j in out.items()}


def _windows(texts: Sequence[str], vocabulary: dict[str, int]) -> tuple[Ids, Ids]:
    """Words of all texts as numbers [N], and of each W words in a row within one text [windows, 2]: where they begin,
    and in which text."""
    words: list[int] = []
    begins: list[Ids] = []
    owners: list[Ids] = []
    for i, text in enumerate(texts):
        start = len(words)
        words += [vocabulary.setdefault(word, len(vocabulary)) for word in _WORD.findall(text)]
        if (n := len(words) - start - WORDS + 1) > 0:
            begins.append(np.arange(start, start + n))
            owners.append(np.full(n, i))
    if not begins:
        return np.array(words, dtype=np.int64), np.empty((0, 2), dtype=np.int64)
    return np.array(words, dtype=np.int64), np.stack([np.concatenate(begins), np.concatenate(owners)], axis=1)


def _keys(words: Ids, begins: Ids) -> NDArray[np.uint64]:
    """Of each W words in a row, a polynomial of their numbers modulo 2^64."""
    out = np.zeros(len(begins), dtype=np.uint64)
    mixed = (words.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1342543DE82EF95)
    mixed ^= mixed >> np.uint64(32)
    for step in range(WORDS):
        out = out * _FACTOR + mixed[begins + step]
    return out


def _forms(gram: Ids, text: Ids, grams: int) -> NDArray[np.bool_]:
    """Of each gram, whether FORM texts or more have it."""
    pairs = np.unique(np.stack([gram, text], axis=1), axis=0)
    return np.bincount(pairs[:, 0], minlength=grams) >= FORM
