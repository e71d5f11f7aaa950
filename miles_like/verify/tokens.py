"""Whether both sides speak of the same tokens.

Letters: S tokens a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_like.verify.findings import Blamed, Cause
from miles_like.verify.sides import Fed

SHIFTS = (1, -1, 2, -2, 3, -3)
_SPECIAL = 2  # tokens that a template may put before a prompt: where no more are missing it is the template's doing


def compare_tokens(told: Fed, fed: Fed, names: Sequence[str]) -> list[Blamed]:
    """told: as the rollout had them; fed: as the trainer's ranks were. Each cause once, with the first sample of it."""
    found: dict[Cause, str] = {}
    for a, b, mask, name in zip(told.tokens, fed.tokens, told.masks, names, strict=True):
        if not torch.equal(a, b):
            found.setdefault(*_difference(a, b, _prompt(a, mask), f"sample {name}"))
    for a, b, name in zip(told.masks, fed.masks, names, strict=True):
        if not found and not torch.equal(a, b):
            what = f"sample {name}: the trainer has {int(b.sum())} tokens under loss from position {_first_set(b)} on"
            what += f", the rollout sampled {int(a.sum())} from position {_first_set(a)} on"
            found[Cause.TOKENS_SHIFTED if int(a.sum()) == int(b.sum()) else Cause.TOKENS] = what
    return list(found.items())


def _prompt(tokens: Tensor, mask: Tensor) -> int:
    """Tokens before the first that was sampled."""
    return _first_set(mask) if bool(mask.any()) else len(tokens)


def _first_set(mask: Tensor) -> int:
    return int(mask.nonzero()[0]) if bool(mask.any()) else -1


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


def compare_prompts(told: Fed, wanted: Sequence[Sequence[int]], names: Sequence[str]) -> Blamed | None:
    """wanted: what tokenizer and template make of each prompt now. The first sample that differs says what happened."""
    for tokens, mask, prompt, name in zip(told.tokens, told.masks, wanted, names, strict=True):
        n = _prompt(tokens, mask)
        want = torch.tensor(list(prompt), dtype=tokens.dtype)
        if torch.equal(tokens[:n], want):
            continue
        said = f"sample {name} was generated from {n} prompt tokens, tokenizer and template make {len(prompt)}"
        gone = len(want) - n
        if gone > _SPECIAL and torch.equal(want[gone:], tokens[:n]):
            return Cause.TOKENS_TRUNCATED, f"{said}: the first {gone} are cut off"
        return Cause.TEMPLATE, f"{said}: other ones from position {_first(tokens[:n], want)} on"
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
