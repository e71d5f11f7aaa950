"""Whether both sides speak of the same tokens.

Letters: S tokens a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_like.verify.findings import Cause

Blamed = tuple[Cause, str]
SHIFTS = (1, -1, 2, -2, 3, -3)


def compare_tokens(
    told: Sequence[Tensor], fed: Sequence[Tensor], masks: Sequence[Tensor], names: Sequence[str]
) -> Blamed | None:
    """told: [S] as the rollout had them, with its loss mask; fed: as the trainer was given them. The first sample that
    differs says what happened."""
    for a, b, mask, name in zip(told, fed, masks, names, strict=True):
        if torch.equal(a, b):
            continue
        n = int(mask.nonzero()[0]) if bool(mask.any()) else len(a)  # prompt tokens
        return _difference(a, b, n, f"sample {name}")
    return None


def _difference(told: Tensor, fed: Tensor, prompt: int, sample: str) -> Blamed:
    response = told[prompt:]
    both = f"{len(told)} tokens in the rollout, {len(fed)} in the trainer"
    short, long = sorted((told, fed), key=len)
    if len(short) < len(long) and torch.equal(long[: len(short)], short):
        return Cause.TOKENS_TRUNCATED, f"{sample} has {both}: {len(long) - len(short)} are cut off its end"
    if len(response) and len(fed) >= len(response) and torch.equal(fed[len(fed) - len(response) :], response):
        first = _first(told[:prompt], fed[: len(fed) - len(response)])
        return Cause.TEMPLATE, f"{sample} has {both}, the same response after another prompt, from position {first} on"
    if len(told) == len(fed):
        for d in SHIFTS:
            a, b = (told[d:], fed[:-d]) if d > 0 else (told[:d], fed[-d:])
            if len(a) and torch.equal(a, b):
                return Cause.TOKENS_SHIFTED, f"{sample}: the trainer's token i is the rollout's token i{d:+d}"
    return Cause.TOKENS, f"{sample} has {both}, others from position {_first(told, fed)} on"


def _first(a: Tensor, b: Tensor) -> int:
    """Where two rows of tokens begin to differ."""
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).nonzero()
    return int(different[0]) if len(different) else n


def compare_prompts(
    told: Sequence[Tensor], masks: Sequence[Tensor], wanted: Sequence[Sequence[int]], names: Sequence[str]
) -> Blamed | None:
    """wanted: what tokenizer and template make of each prompt now; told and masks [S]."""
    for tokens, mask, prompt, name in zip(told, masks, wanted, names, strict=True):
        n = int(mask.nonzero()[0]) if bool(mask.any()) else len(tokens)
        want = torch.tensor(list(prompt), dtype=tokens.dtype)
        if not torch.equal(tokens[:n], want):
            where = _first(tokens[:n], want)
            return Cause.TEMPLATE, (
                f"sample {name} was generated from {n} prompt tokens, tokenizer and template make {len(prompt)}: other "
                f"ones from position {where} on"
            )
    return None


def shifted(values: Tensor, mask: Tensor, d: int) -> Tensor:
    """[S]: at each token under loss the value of the one d further on in the response, nan where there is none."""
    at = mask.nonzero()[:, 0]
    of_response = values[at].float()
    moved = torch.full_like(of_response, torch.nan)
    if d > 0:
        moved[:-d] = of_response[d:]
    else:
        moved[-d:] = of_response[:d]
    out = torch.zeros_like(values, dtype=torch.float32)
    out[at] = moved
    return out
