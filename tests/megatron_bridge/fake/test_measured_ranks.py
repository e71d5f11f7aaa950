"""What a rank holds on fake tensors is what a real CPU rank of the same layout holds, part by part and phase by phase.

Both run the trainer's own code on the same packs and routes; the real ranks' storages are measured. Not covered: GPUs,
and what TransformerEngine's modules allocate.
"""

from __future__ import annotations

import pytest

from megatron_bridge.fake.facts import RankCounts
from tests.support.executed_ranks import CASES, fake_ranks, real_ranks
from tests.support.layouts import PATIENCE
from tests.support.spawn import run_ranks

BOUND = 0.1
SMALL = 1 << 16  # bytes: parts below it are compared within their sum only
PHASES = ("building", "training", "asleep", "publishing")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RankCounts, RankCounts]]:
    """Case -> (fake, real)."""
    where, names = str(tmp_path_factory.mktemp("ranks")), list(CASES)
    fakes = run_ranks(fake_ranks, 2, where, names, "cpu", timeout_s=PATIENCE)
    reals = run_ranks(real_ranks, 2, where, names, {}, timeout_s=PATIENCE)
    fake = {name: counts for found in fakes for name, counts in found.items()}
    return {name: (fake[name], reals[CASES[name].rank][name]) for name in names}


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_equal(name: str, both: dict[str, tuple[RankCounts, RankCounts]]) -> None:
    fake, real = both[name]
    assert (fake.parameters, fake.expert_parameters) == (real.parameters, real.expert_parameters)
    assert fake.stage == real.stage


@pytest.mark.parametrize("name", CASES)
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
