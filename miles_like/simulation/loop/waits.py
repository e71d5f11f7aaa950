"""Why a step waited for its samples."""

from __future__ import annotations

from collections.abc import Sequence

from miles_like.simulation.servers.samples import SimGroup

CAUSES = ("prompts", "queue", "sampling", "tail", "reward", "order")
TAIL = 0.9  # share of the step's samples after whose ends the wait is for its longest ones


def causes(groups: Sequence[SimGroup], began: float, taken: float) -> dict[str, float]:
    """Seconds between `began` and `taken` by cause, along the group that was scored last:

    prompts   until it was admitted
    queue     until its last sample to end was started by a server
    sampling  until 90 % of all samples of the step's groups had ended
    tail      until this last sample ended
    reward    until the group was scored
    order     until the step could take it: groups of its round, older groups
    """
    last = max(groups, key=lambda g: (g.scored or 0.0, _end(g)))
    sample = max(last.complete, key=lambda s: s.ended or 0.0)
    ends = sorted(s.ended or 0.0 for g in groups for s in g.complete)
    most = ends[min(int(TAIL * len(ends)), len(ends) - 1)]
    started, ended = sample.started or 0.0, sample.ended or 0.0
    marks = [last.admitted, started, min(most, ended), ended, last.scored or 0.0, taken]
    out, since = dict.fromkeys(CAUSES, 0.0), began
    for cause, mark in zip(CAUSES, marks, strict=True):
        until = min(max(mark, since), taken)
        out[cause], since = until - since, until
    return out


def _end(group: SimGroup) -> float:
    return max(s.ended or 0.0 for s in group.complete)
