"""The choice of a run's nodes among those that could take it: arithmetic only, no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def in_fewest_racks(racks: Sequence[str | None], count: int) -> tuple[int, ...]:
    """Positions of `count` nodes, or of all where there are fewer, in as few racks as possible; ascending.

    racks: of each node, in the order in which nodes are taken. Nodes without a rack count as one more. The largest
    racks are taken whole until one has room for the rest; of those that have, the smallest is taken, so that larger
    ones are left to other runs. Between equal racks the order decides.
    """
    free, taken, left = Counter(racks), Counter[str | None](), min(count, len(racks))
    while left:
        enough = [rack for rack, has in free.items() if has >= left]
        rack = min(enough, key=free.__getitem__) if enough else max(free, key=free.__getitem__)
        taken[rack] = min(left, free.pop(rack))
        left -= taken[rack]
    positions = []
    for position, rack in enumerate(racks):
        if taken[rack]:
            taken[rack] -= 1
            positions.append(position)
    return tuple(positions)
