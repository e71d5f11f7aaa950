"""Servers of several ranks, in this process and its children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout.embedded.engine.engine import EngineLimits
from rollout.embedded.ranks.crew import Crew
from rollout.embedded.server.service import Service
from tests.support.spawn import warm_context

LAYOUTS = {"tp2": (2, 1), "ep2": (2, 2), "tp4, ep2": (4, 2)}  # ranks, groups of them that the experts are divided over


LIMIT_S = 900.0  # beside many other processes a rank may be slow for minutes
_crews: dict[int, Crew] = {}


def crew(ranks: int) -> Crew:
    """The other ranks, for one service after the other."""
    if ranks not in _crews or _crews[ranks].failure:
        _crews[ranks] = Crew(ranks, limit_s=LIMIT_S, context=warm_context())
    return _crews[ranks]


def divided(path: Path, limits: EngineLimits, layout: str, **how: Any) -> Service:
    """how: as in `Service`. Usable until the next one of as many ranks."""
    ranks, groups = LAYOUTS[layout]
    return Service(path, limits, crew=crew(ranks), ep_size=groups, **how)
