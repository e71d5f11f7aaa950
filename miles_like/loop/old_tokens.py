"""Masks the tokens of a group that are too old to train (buffer.old_tokens = "mask").

Letters: S tokens a sample.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from miles_like.records import SampleRecord, SpanLoss
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
    samples = tuple(
        _record_masked(s, oldest) if isinstance(s, SampleRecord) else masked(s, oldest) for s in group.samples
    )
    if not any(s.response_len for s in samples):
        return None
    return replace(group, samples=samples)


def masked(sample: Sample, oldest: int) -> Sample:
    """Without loss on tokens of versions older than `oldest`."""
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
    young = [_moved(v, moved) for v in sample.versions]
    kept = tuple(v for v in young if v.version >= oldest and v.end > 0)
    return replace(sample, loss_mask=mask, logprobs=torch.where(mask, sample.logprobs, 0.0), versions=kept)


def _moved(v: VersionSpan, by: int) -> VersionSpan:
    return VersionSpan(v.version, max(v.start - by, 0), v.end - by)


def losses_of(sample: Sample) -> tuple[SpanLoss, ...]:
    """Of each of its version spans."""
    if len(sample.versions) == 1:
        return (SpanLoss(0, sample.response_len, sample.turns, False),)
    under_loss = sample.loss_mask.nonzero()[:, 0]
    first = int(under_loss[0]) if len(under_loss) else sample.length
    out = []
    for v in sample.versions:
        span = sample.loss_mask[first + v.start : first + v.end].int()
        begins = torch.cat([span[:1], span.diff().clamp(min=0)]).nonzero()[:, 0].tolist()
        joins = bool(v.start) and begins[:1] == [0] and bool(sample.loss_mask[first + v.start - 1])
        out.append(SpanLoss(v.start + begins[0] if begins else v.end, int(span.sum()), len(begins), joins))
    return tuple(out)


def _record_masked(record: SampleRecord, oldest: int) -> SampleRecord:
    """As `masked`, for the numbers of a record."""
    if all(v.version >= oldest for v in record.versions):
        return record
    young = [v.version >= oldest for v in record.versions]
    left = [of.first for of, kept in zip(record.losses, young, strict=True) if kept and of.tokens]
    moved = min(left, default=record.length)
    versions, losses = list[VersionSpan](), list[SpanLoss]()
    before = False  # whether the span before is kept
    for v, of, kept in zip(record.versions, record.losses, young, strict=True):
        now = _moved(v, moved)
        if kept and now.end > 0:
            versions.append(now)
            losses.append(of._replace(first=of.first - moved, joins=of.joins and before))
        before = kept
    return replace(
        record,
        response_len=sum(of.tokens for of in losses),
        turns=sum(of.turns - of.joins for of in losses),
        versions=tuple(versions),
        losses=tuple(losses),
        oldest=oldest,
    )
