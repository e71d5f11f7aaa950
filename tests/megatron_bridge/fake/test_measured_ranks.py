"""What a rank holds on fake tensors, and what the arithmetic of the plan says it holds, is what a real CPU rank of the
same layout holds, part by part and phase by phase.

Both ranks run the trainer's own code on the same packs and routes; the real ones' storages are measured. Not covered:
GPUs, and what TransformerEngine's modules allocate.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_bridge.fake.substitutes.facts import RankCounts
from miles_like.planning.memory.activations import StepShape
from miles_like.planning.memory.parts import Bytes, Part, total
from miles_like.planning.memory.ranks import RankPlans
from tests.support.chosen import chosen, later
from tests.support.executed_ranks import CASES, MODELS, PACK, fake_ranks, real_ranks
from tests.support.layouts import PATIENCE
from tests.support.plans import tensors
from tests.support.spawn import run_ranks

FIRST = ("EP2", "TP2, QAT, recomputed", "PP2xVPP2, overlap")
EACH = pytest.mark.parametrize("name", later(CASES, FIRST, beside="tests/megatron_bridge/fake/test_measured_ranks.py"))
BOUND = 0.1
SMALL = 1 << 16  # bytes: parts below it are compared within their sum only
PHASES = ("building", "training", "asleep", "publishing")
STATIC: tuple[Part, ...] = ("parameters", "gradients", "masters", "moments", "rounded weights")
# bytes that do not grow with the model, which the arithmetic leaves out: 256 KiB of agreement.py's table of experts,
# and the masks, tables and labels of a step. The ranks hold 8 to 20 MB
CONSTANT = 384 << 10


@pytest.fixture(scope="module")
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[RankCounts, RankCounts]]:
    """Case -> (fake, real)."""
    where, names = str(tmp_path_factory.mktemp("ranks")), chosen(request, "name", CASES)
    fakes = run_ranks(fake_ranks, 2, where, names, "cpu", timeout_s=PATIENCE)
    reals = run_ranks(real_ranks, 2, where, names, {}, timeout_s=PATIENCE)
    fake = {name: counts for found in fakes for name, counts in found.items()}
    return {name: (fake[name], reals[CASES[name].rank][name]) for name in names}


@EACH
def test_parameters_are_equal(name: str, both: dict[str, tuple[RankCounts, RankCounts]]) -> None:
    fake, real = both[name]
    assert (fake.parameters, fake.expert_parameters) == (real.parameters, real.expert_parameters)
    assert fake.stage == real.stage


@EACH
@pytest.mark.parametrize("phase", PHASES)
def test_each_part_of_each_peak_is_what_was_measured(
    name: str, phase: str, both: dict[str, tuple[RankCounts, RankCounts]]
) -> None:
    fake, real = both[name]
    assert fake.peaks.keys() == real.peaks.keys()
    if phase not in real.peaks:
        assert phase == "asleep" and not CASES[name].colocated
        return
    for found, measured in ((fake.peaks[phase], real.peaks[phase]), (fake.host[phase], real.host[phase])):
        assert sum(found.values()) == pytest.approx(sum(measured.values()), rel=BOUND, abs=SMALL), (found, measured)
        for part in found.keys() | measured.keys():
            assert found.get(part, 0) == pytest.approx(measured.get(part, 0), rel=BOUND, abs=SMALL), (part, found)


# ---- the arithmetic


def planned(name: str, where: Path) -> RankPlans:
    case = CASES[name]
    step = StepShape(tokens=PACK.tokens, micro_batches=case.micro_batches, longest=max(PACK.lengths))
    return RankPlans(
        case.run(where).config,
        MODELS[case.model],
        step,
        gpus=False,
        sleeps=case.colocated,
        publishes=True,
        imbalance=1.0,
        data_rank=case.rank,
    )


@EACH
def test_planned_parts_are_what_was_measured(
    name: str, both: dict[str, tuple[RankCounts, RankCounts]], tmp_path: Path
) -> None:
    """Each static part within 10 %, with no allowance but 4 KiB for scalars."""
    _, real = both[name]
    found: Bytes = planned(name, tmp_path).states[real.stage].device
    for part in STATIC:
        assert found.get(part, 0) == pytest.approx(real.static.get(part, 0), rel=BOUND, abs=1 << 12), part


@EACH
def test_planned_peaks_are_what_was_measured(
    name: str, both: dict[str, tuple[RankCounts, RankCounts]], tmp_path: Path
) -> None:
    """Within 10 %; while a rank sleeps or publishes, and has little else, also the constants."""
    _, real = both[name]
    peaks = tensors(planned(name, tmp_path), real.stage)
    assert real.peaks.keys() <= peaks.keys()
    for phase, parts in real.peaks.items():
        allowed = 0 if phase in ("building", "training") else CONSTANT
        measured = sum(parts.values())
        assert total(peaks[phase]) == pytest.approx(measured, abs=BOUND * measured + allowed), phase
    assert sum(real.peaks["training"].values()) > 16 * CONSTANT
