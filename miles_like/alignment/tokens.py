"""Compare the tokens of both sides: ids, loss masks, prompts.

Letters: S tokens a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_like.alignment.evidence import SampleTokens
from miles_like.alignment.report import Cause, CauseDetail

SHIFTS = (1, -1, 2, -2, 3, -3)
_SPECIAL = 2  # special tokens a template may put before a prompt; more missing tokens are a truncation


def compare_tokens(rollout: SampleTokens, trainer: SampleTokens, names: Sequence[str]) -> list[CauseDetail]:
    """Each cause once, with the first sample that shows it."""
    found: dict[Cause, str] = {}
    for a, b, mask, name in zip(rollout.ids, trainer.ids, rollout.masks, names, strict=True):
        if not torch.equal(a, b):
            found.setdefault(*_difference(a, b, _prompt_length(a, mask), f"sample {name}"))
    for a, b, name in zip(rollout.masks, trainer.masks, names, strict=True):
        if not found and not torch.equal(a, b):
            what = f"sample {name}: the trainer has {int(b.sum())} loss tokens from position {_first_set(b)} on"
            what += f", but the rollout sampled {int(a.sum())} from position {_first_set(a)} on"
            found[Cause.TOKENS_SHIFTED if int(a.sum()) == int(b.sum()) else Cause.TOKENS] = what
    return list(found.items())


def _prompt_length(tokens: Tensor, mask: Tensor) -> int:
    """The number of tokens before the first sampled one."""
    return _first_set(mask) if bool(mask.any()) else len(tokens)


def _first_set(mask: Tensor) -> int:
    return int(mask.nonzero()[0]) if bool(mask.any()) else -1


def _difference(rollout: Tensor, trainer: Tensor, prompt: int, sample: str) -> CauseDetail:
    response = rollout[prompt:]
    both = f"{len(rollout)} tokens in the rollout, {len(trainer)} in the trainer"
    short, long = sorted((rollout, trainer), key=len)
    if len(short) < len(long) and torch.equal(long[: len(short)], short):
        return Cause.TOKENS_TRUNCATED, f"{sample} has {both}: {len(long) - len(short)} are cut off at the end"
    before = len(trainer) - len(response)
    if len(response) and before >= 0 and torch.equal(trainer[before:], response):
        first = _first_difference(rollout[:prompt], trainer[:before])
        return (
            Cause.TEMPLATE,
            f"{sample} has {both}, the same response after a prompt that differs from position {first} on",
        )
    if len(rollout) == len(trainer):
        for d in SHIFTS:
            a, b = (rollout[d:], trainer[:-d]) if d > 0 else (rollout[:d], trainer[-d:])
            if len(a) and torch.equal(a, b):
                return Cause.TOKENS_SHIFTED, f"{sample}: the trainer's token i is the rollout's token i{d:+d}"
    return Cause.TOKENS, f"{sample} has {both}, which differ from position {_first_difference(rollout, trainer)} on"


def _first_difference(a: Tensor, b: Tensor) -> int:
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).nonzero()
    return int(different[0]) if len(different) else n


def compare_prompts(
    rollout: SampleTokens, expected: Sequence[Sequence[int]], names: Sequence[str]
) -> CauseDetail | None:
    """expected: each prompt as the tokenizer and template encode it now. The cause is that of the first sample whose
    prompt differs."""
    for ids, mask, prompt, name in zip(rollout.ids, rollout.masks, expected, names, strict=True):
        n = _prompt_length(ids, mask)
        want = torch.tensor(list(prompt), dtype=ids.dtype)
        if torch.equal(ids[:n], want):
            continue
        what = f"sample {name} was generated from {n} prompt tokens, but tokenizer and template produce {len(prompt)}"
        gone = len(want) - n
        if gone > _SPECIAL and torch.equal(want[gone:], ids[:n]):
            return Cause.TOKENS_TRUNCATED, f"{what}: the first {gone} are cut off"
        return Cause.TEMPLATE, f"{what}: they differ from position {_first_difference(ids[:n], want)} on"
    return None


def shifted(values: Tensor, mask: Tensor, d: int) -> Tensor:
    """[S]: at each loss token the value of the response token d positions later, nan where there is none."""
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
