"""Seconds that a fault costs, from when steps ended: what is trained again is lost; a slow process loses no step."""

from __future__ import annotations

import pytest

from tests.faults.costs import STEP_S, Cost, Struck, cost, goodput

STEPS = [(10.0 * step, step) for step in range(4)]  # of 10 s each


def test_what_is_trained_again_is_lost() -> None:
    """Step 4 is under way for 5 s, step 3 was not saved: the run begins at step 2."""
    killed = Struck("driver", "SIGKILL", 35.0, 3)
    found = cost(killed, [killed], [*STEPS, (60.0, 3), (70.0, 4)], 10.0)
    assert found == Cost(lost_s=30.0, again=1.5) and found.overhead_s(10.0) == 15.0


def test_a_server_that_is_replaced_costs_the_wait_alone() -> None:
    killed = Struck("server", "SIGKILL", 35.0, 3)
    found = cost(killed, [killed], [*STEPS, (47.0, 4)], 10.0)
    assert found == Cost(lost_s=7.0, again=0.0) and found.overhead_s(10.0) == 7.0


def test_a_fault_within_the_recovery_belongs_to_the_first() -> None:
    faults = [Struck("server", "SIGKILL", 35.0, 3), Struck("driver", "SIGKILL", 37.0, 3, in_recovery=True)]
    assert cost(faults[0], faults, [*STEPS, (80.0, 4)], 10.0) == Cost(lost_s=40.0, again=0.5)
    late = [faults[0], Struck("driver", "SIGKILL", 81.0, 4)]
    assert cost(late[0], late, [*STEPS, (80.0, 4)], 10.0) == Cost(lost_s=40.0, again=0.0)


def test_a_fault_without_a_later_step_has_no_cost() -> None:
    assert cost(Struck("rank", "SIGKILL", 35.0, 3), [], STEPS, 10.0) is None


@pytest.mark.parametrize(
    ("costs", "want"), [([], None), ([Cost(30.0, 1.0)], STEP_S / (STEP_S + 0.1 * (20.0 + STEP_S)))]
)
def test_goodput_of_long_steps_counts_overhead_in_seconds_and_the_rest_in_steps(
    costs: list[Cost], want: float | None
) -> None:
    assert goodput(costs, 10.0) == (want and pytest.approx(want))
