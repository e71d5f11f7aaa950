"""What faults cost a run: seconds lost, steps trained again, and the goodput of a run of longer steps. Numbers only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

STEP_S, SHARE = 134.0, 0.1  # of a large run: seconds of a step, share of steps that a fault strikes
GOAL = 0.8
RESTARTS = ("driver", "rank")  # roles whose loss makes the run begin again at its last checkpoint


@dataclass(frozen=True)
class Struck:
    """A fault."""

    role: str
    kind: str
    at: float  # seconds
    step: int  # that had ended
    in_recovery: bool = False  # from the fault before it

    @property
    def restarts(self) -> bool:
        return self.role in RESTARTS and self.kind != "slow"


class Cost(NamedTuple):
    """Of one fault, with those that strike within its recovery."""

    lost_s: float  # between the ends of two steps, beyond an undisturbed step
    again: float  # steps trained again; the one under way counts by what was done of it

    def overhead_s(self, step_s: float) -> float:
        """What is lost beside what is trained again."""
        return max(0.0, self.lost_s - self.again * step_s)


def cost(one: Struck, struck: Sequence[Struck], seen: Sequence[tuple[float, int]], step_s: float) -> Cost | None:
    """struck: all faults. seen: (when, step) of ends of steps, also of those that were taken back. step_s: of an
    undisturbed step. None: no later step has ended."""
    before = [when for when, step in seen if when <= one.at and step == one.step]
    after = [when for when, step in seen if when > one.at and step > one.step]
    if not before or not after:
        return None
    again = 0.0
    if any(other.restarts for other in struck if one.at <= other.at <= after[0]):
        taken_back = {step for when, step in seen if one.at < when < after[0] and step <= one.step}
        again = len(taken_back) + min(1.0, (one.at - before[-1]) / step_s)
    return Cost(max(0.0, after[0] - before[-1] - step_s), again)


def goodput(costs: Sequence[Cost], step_s: float) -> float | None:
    """The share of its time in which a run of STEP_S steps, SHARE of them struck, trains what stays; None: no fault.
    The overhead of a fault is taken as it was here, what is trained again in steps."""
    if not costs:
        return None
    lost = statistics.mean(c.overhead_s(step_s) + c.again * STEP_S for c in costs)
    return STEP_S / (STEP_S + SHARE * lost)
