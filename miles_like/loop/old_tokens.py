"""Masks the tokens of a group that are too old to train (buffer.old_tokens = "mask").

Letters: S tokens a sample.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from miles_like.types import Sample, SampleGroup, VersionSpan


def mask_old(group: SampleGroup, *, version: int, max_staleness: int) -> SampleGroup | None:
    """`group` for a step that trains weights `version`, without loss on tokens sampled by weights older than
    `version - max_staleness`. None: no loss token is left.

    Tokens, streams and routes do not change, so later tokens are computed and replayed after the same prefix.
    `versions` cover the remaining loss tokens, counted from the first of them as everywhere: `oldest_version` is then
    the oldest version that is trained on. A sample may be left without loss tokens: it trains nothing, its reward still
    counts in its group's baseline, and the ledger counts it as trained with its group.
    """
    oldest = version - max_staleness
    samples = tuple(_masked(s, oldest) for s in group.samples)
    if not any(s.response_len for s in samples):
        return None
    return replace(group, samples=samples)


def _masked(sample: Sample, oldest: int) -> Sample:
    if all(v.version >= oldest for v in sample.versions):
        return sample
    mask = sample.loss_mask.clone()  # [S]
    under_loss = mask.nonzero()[:, 0]
    first = int(under_loss[0]) if len(under_loss) else len(mask)
    for v in sample.versions:
        if v.version < oldest:
            mask[first + v.start : first + v.end] = False
    left = mask.nonzero()[:, 0]
    moved = int(left[0]) - first if len(left) else len(mask)
    young = [VersionSpan(v.version, max(v.start - moved, 0), v.end - moved) for v in sample.versions]
    kept = tuple(new for v, new in zip(sample.versions, young, strict=True) if v.version >= oldest and new.end > 0)
    return replace(sample, loss_mask=mask, logprobs=torch.where(mask, sample.logprobs, 0.0), versions=kept)
