"""Ranks of a critic and of a reference, ranks that train adapters, draft layers, and a rank with more rows of experts
than the average: the arithmetic against small models that are executed on fake tensors.

Not covered: GPUs, where the same arithmetic is held for trainers alone (test_executed_ranks.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_bridge.fake.substitutes.facts import RankCounts
from miles_like.planning.memory.activations import StepShape
from miles_like.planning.memory.parts import Part, total
from miles_like.planning.memory.ranks import RankPlans
from tests.support.chosen import chosen, later
from tests.support.executed_ranks import MODELS, PACK, ROLES, fake_ranks
from tests.support.layouts import PATIENCE
from tests.support.plans import tensors
from tests.support.spawn import run_ranks

FIRST = ("LoRA, DP2", "the busiest of EP2")
BOUND = 0.1
STATIC: tuple[Part, ...] = ("parameters", "gradients", "masters", "moments", "rounded weights")
CONSTANT = 384 << 10  # bytes that do not grow with the model: test_measured_ranks.py


@pytest.fixture(scope="module")
def executed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RankCounts]:
    where = str(tmp_path_factory.mktemp("ranks"))
    ranks = run_ranks(fake_ranks, 2, where, chosen(request, "name", ROLES), "cpu", timeout_s=PATIENCE)
    return {name: counts for found in ranks for name, counts in found.items()}


@pytest.mark.parametrize("name", later(ROLES, FIRST, beside="tests/miles_like/planning/test_executed_roles.py"))
def test_parts_and_peaks_are_those_of_the_executed_rank(
    name: str, executed: dict[str, RankCounts], tmp_path: Path
) -> None:
    """Static parts within 10 % and 4 KiB; peaks within 10 %, with the constants where little is trained: they include
    what megatron initializes a CPU rank's matrices from."""
    case, found = ROLES[name], executed[name]
    step = StepShape(tokens=PACK.tokens, micro_batches=case.micro_batches, longest=max(PACK.lengths))
    plans = RankPlans(
        case.run(tmp_path).config,
        MODELS[case.model],
        step,
        gpus=False,
        sleeps=case.colocated,
        publishes=True,
        imbalance=case.imbalance,
        data_rank=case.rank,
    )
    stage, peaks = plans.stages[found.stage], tensors(plans, found.stage)
    assert (stage.elements(), stage.elements("expert")) == (found.parameters, found.expert_parameters)
    device = plans.states[found.stage].device
    for part in STATIC:
        assert device.get(part, 0) == pytest.approx(found.static.get(part, 0), rel=BOUND, abs=1 << 12), part
    trains_all = plans.config.trains and not plans.config.lora.rank
    for phase, parts in found.peaks.items():
        executed_bytes = sum(parts.values())
        allowed = 0 if trains_all and phase in ("building", "training") else CONSTANT
        assert total(peaks[phase]) == pytest.approx(executed_bytes, abs=BOUND * executed_bytes + allowed), (
            phase,
            dict(peaks[phase]),
            parts,
        )
