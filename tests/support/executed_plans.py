"""Compares a rank that was executed with the plan of it."""

from __future__ import annotations

from megatron_bridge.fake.records import ExecutedRank
from miles_like.planning.memory.activations import StepShape
from miles_like.planning.memory.gathering import gathering_bytes
from miles_like.planning.memory.parts import MIB, Part, total
from miles_like.planning.memory.ranks import RankPlans
from tests.support.plans import tensors

BOUND = 0.05
# bytes that the plan does not count, or counts for one length of a sample: rotary tables, scalars of optimizers
SMALL = 4 * MIB
STATIC: tuple[Part, ...] = ("parameters", "gradients", "masters", "moments", "rounded weights")


def step_of(record: ExecutedRank) -> StepShape:
    return StepShape(
        tokens=record["pack_tokens"], micro_batches=record["micro_batches"], longest=record["sample_tokens"]
    )


def deviations(record: ExecutedRank, plans: RankPlans, *, small: int = SMALL) -> list[str]:
    """A line for each static part and each phase's peak that is off by more than the bound."""
    stage, found = record["stage"], []
    state, peaks = plans.states[stage], tensors(plans, stage)
    pairs: dict[str, tuple[int, int]] = {
        part: (state.device.get(part, 0), record["static"].get(part, 0)) for part in STATIC
    }
    for phase, parts in record["peaks"].items():
        unexecuted = _unexecuted(plans, stage) if phase == "publishing" else 0
        pairs[f"peak while {phase}"] = (total(peaks[phase]) - unexecuted, sum(parts.values()))
    for what, (expected, executed) in pairs.items():
        least = expected - state.uncollected if what == "peak while building" else expected
        allowed = BOUND * executed + small
        if not least - allowed <= executed <= expected + allowed:
            found.append(f"{what}: planned {expected / MIB:,.0f} MiB, executed {executed / MIB:,.0f}")
    counted = (plans.stages[stage].elements(), plans.stages[stage].elements("expert"))
    if counted != (record["parameters"], record["expert_parameters"]):
        found.append(f"parameters: planned {counted}, executed {record['parameters'], record['expert_parameters']}")
    return found


def _unexecuted(plans: RankPlans, stage: int) -> int:
    """Bytes that a publication takes for chunks that an executed rank does not receive: all of its chunks are such as
    its own stage has, and an embedding or a head is not."""
    alike = [plans.chunks[stage]] * len(plans.chunks)
    return gathering_bytes(plans.chunks, stage) - gathering_bytes(alike, stage)
