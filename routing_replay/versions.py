"""Which weights made what: spans of weight versions over tokens and over routing rows.

Letters: S tokens of a sample. Row i holds the routes of token i and produced the log-prob of token i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class VersionSpan(NamedTuple):
    """Weights `version` made [start, end): response tokens, counted from the response's start, or routing rows.

    What no span holds was not made by weights we know of: an environment's tokens, rows that the server computed anew.
    """

    version: int
    start: int
    end: int


def ordered(spans: Sequence[VersionSpan], length: int) -> bool:
    """Whether spans are not empty, ascending, do not overlap and end within `length`."""
    if len(spans) == 1:  # the usual case, at a fraction of the cost
        return 0 <= spans[0].start < spans[0].end <= length
    edges = [edge for s in spans for edge in (s.start, s.end)]
    inside = not edges or (edges[0] >= 0 and edges[-1] <= length)
    return inside and edges == sorted(edges) and all(s.start < s.end for s in spans)


def joined(spans: Sequence[VersionSpan], more: Sequence[VersionSpan], offset: int) -> tuple[VersionSpan, ...]:
    """`spans`, then `more` moved by `offset`; neighbours of one version become one span."""
    out = list(spans)
    for s in more:
        moved = VersionSpan(s.version, s.start + offset, s.end + offset)
        if out and out[-1].version == moved.version and out[-1].end == moved.start:
            moved = VersionSpan(moved.version, out.pop().start, moved.end)
        out.append(moved)
    return tuple(out)


def _spread(spans: Sequence[VersionSpan], length: int, first: int = 0) -> Tensor:
    """[length] int64: the version at each place, -1 where no span is; spans count from `first`."""
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
    """`check_versions` of each; a sample of one version and one response, as nearly all are, at a tenth of the cost.

    Raises the first's ValueError.
    """
    lengths = [m.shape[0] for m in loss_masks]
    starts = np.cumsum([0, *lengths[:-1]])
    under_loss = np.append(np.flatnonzero(torch.cat(list(loss_masks)).numpy()), sum(lengths))
    firsts = (under_loss[np.searchsorted(under_loss, starts)] - starts).tolist()  # beyond the sample where it has none
    for routed, told, mask, s, first, name in zip(rows, tokens, loss_masks, lengths, firsts, samples, strict=True):
        if routed is not None and len(routed) == len(told) == 1:
            version = told[0].version
            if routed[0] == (version, 0, s - 1) and told[0] == (version, 0, s - first):
                continue
        check_versions(routed, told, mask, sample=name)


def check_versions(
    rows: Sequence[VersionSpan] | None, tokens: Sequence[VersionSpan], loss_mask: Tensor, *, sample: str
) -> None:
    """Each token under loss was sampled by the weights that computed the row before it.

    rows: of the trace, None where it tells nothing. tokens: of the sample, from its first token under loss. loss_mask
    [S] bool. Routes that a server computed anew under later weights belong to other log-probs than those that were
    recorded: trained together they are a mismatch that nothing later would show. Raises ValueError naming sample and
    position.
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
        raise ValueError(f"{where}: no weight version is told for the token after it, which is under loss")
    if rows is None:
        raise ValueError(
            f"{where}: no weight version is told for the routes of this sample: read its replies with "
            "RoutingTrace.many_from_wire(versions=...), or do not replay them (replay.mode = 'r2' or 'off')"
        )
    computed = f"computed under weight version {r}" if r >= 0 else "computed anew under weights that nobody tells"
    raise ValueError(
        f"{where}: the routes were {computed}, the token after them was sampled under version {s} "
        f"({int(wrong.sum())} such rows): the server recomputed a retracted request under new weights; "
        "set publish.pause_mode to in_place or abort and give the server more memory, or buffer.max_staleness to 0"
    )
