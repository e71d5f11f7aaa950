"""Weight versions of tokens and routing rows, as spans.

Letters: S tokens of a sample. Row i holds the routes of token i and produced the log-prob of token i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LIFE = 10**9  # weight versions of one life of the trainer's ranks


def version_of(step: int, life: int) -> int:
    """The number under which servers have the weights after `step` steps. life: how often the trainer's ranks were
    rebuilt in this process: a step that is trained again has another number than before, and a greater one."""
    return life * LIFE + step


def step_of(version: int) -> int:
    """The inverse of `version_of`, whatever the life."""
    return version % LIFE


class VersionSpan(NamedTuple):
    """Weight version `version` produced [start, end): response tokens, counted from the response's start, or routing
    rows.

    The weight version of anything outside all spans is unknown: tokens of an environment, rows that the server
    recomputed.
    """

    version: int
    start: int
    end: int


def ordered(spans: Sequence[VersionSpan], length: int) -> bool:
    """Whether the spans are non-empty, ascending, disjoint and within `length`."""
    if len(spans) == 1:  # the usual case: much faster
        return 0 <= spans[0].start < spans[0].end <= length
    edges = [edge for s in spans for edge in (s.start, s.end)]
    inside = not edges or (edges[0] >= 0 and edges[-1] <= length)
    return inside and edges == sorted(edges) and all(s.start < s.end for s in spans)


def joined(spans: Sequence[VersionSpan], more: Sequence[VersionSpan], offset: int) -> tuple[VersionSpan, ...]:
    """`spans`, then `more` shifted by `offset`; adjacent spans of one version are merged."""
    out = list(spans)
    for s in more:
        moved = VersionSpan(s.version, s.start + offset, s.end + offset)
        if out and out[-1].version == moved.version and out[-1].end == moved.start:
            moved = VersionSpan(moved.version, out.pop().start, moved.end)
        out.append(moved)
    return tuple(out)


def _spread(spans: Sequence[VersionSpan], length: int, first: int = 0) -> Tensor:
    """[length] int64: the version at each place, -1 outside of spans; spans count from `first`."""
    out = torch.full((length,), -1)
    for s in spans:
        out[first + s.start : first + s.end] = s.version
    return out


def check_all_versions(
    rows: Sequence[Sequence[VersionSpan] | None],
    tokens: Sequence[Sequence[VersionSpan]],
    loss_masks: Sequence[Tensor],
    *,
    samples: Sequence[str],
) -> None:
    """`check_versions` of each sample. A sample with a single version and response, the usual case, takes a tenth of
    the time of other samples.

    Raises the ValueError of the first that fails.
    """
    lengths = [m.shape[0] for m in loss_masks]
    starts = np.cumsum([0, *lengths[:-1]])
    loss_tokens = np.append(np.flatnonzero(torch.cat(list(loss_masks)).numpy()), sum(lengths))
    firsts = (loss_tokens[np.searchsorted(loss_tokens, starts)] - starts).tolist()  # past the sample where it has none
    for routed, sampled, mask, s, first, name in zip(rows, tokens, loss_masks, lengths, firsts, samples, strict=True):
        if routed is not None and len(routed) == len(sampled) == 1:
            version = sampled[0].version
            if routed[0] == (version, 0, s - 1) and sampled[0] == (version, 0, s - first):
                continue
        check_versions(routed, sampled, mask, sample=name)


def check_versions(
    rows: Sequence[VersionSpan] | None, tokens: Sequence[VersionSpan], loss_mask: Tensor, *, sample: str
) -> None:
    """Checks that each loss token was sampled under the weights that computed the row before it.

    rows: versions of the trace, None if unknown. tokens: versions of the sample, counted from its first loss token.
    loss_mask [S] bool. Routes that a server recomputed under later weights do not belong to the recorded log-probs: a
    mismatch that no later check would detect. Raises ValueError naming sample and position.
    """
    at = loss_mask.nonzero()[:, 0]
    if not len(at):
        return
    sampled = _spread(tokens, len(loss_mask), int(at[0]))[at]
    routed = _spread(rows or (), len(loss_mask) - 1)[at - 1]
    wrong = (sampled != routed) | (sampled < 0)
    if not bool(wrong.any()):
        return
    i = int(wrong.nonzero()[0, 0])
    position, s, r = int(at[i]), int(sampled[i]), int(routed[i])
    where = f"sample {sample}, all layers, position {position - 1}"
    if s < 0:
        raise ValueError(f"{where}: the weight version of the next token, a loss token, is unknown")
    if rows is None:
        raise ValueError(
            f"{where}: the weight version of the routes of this sample is unknown: read its replies with "
            "RoutingTrace.many_from_wire(versions=...), or do not replay them (replay.mode = 'r2' or 'off')"
        )
    computed = f"computed under weight version {r}" if r >= 0 else "recomputed under an unknown weight version"
    raise ValueError(
        f"{where}: the routes were {computed}, the next token was sampled under version {s} "
        f"({int(wrong.sum())} such rows): the server recomputed a retracted request under new weights; "
        "set publish.pause_mode to in_place or abort and give the server more memory, or buffer.max_staleness to 0"
    )
