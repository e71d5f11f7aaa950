"""Fault tests of other projects, as rows of the matrix. Names and figures are from their sources at these commits."""

from __future__ import annotations

from typing import NamedTuple

MILES = "miles 31f1ca961"
NEMO = "NeMo-RL 7ea279abf"


class Peer(NamedTuple):
    """A test, what it requires, and what is played here for it."""

    where: str
    test: str
    requires: str
    here: str


PEERS = (
    Peer(
        MILES,
        "tests/e2e/ft/conftest_ft/scenario_with_failure.py: a rank exits before the all-reduce, the step is retried by "
        "the other replicas, a replica is stopped and started",
        "gradients within 0.85 % of the run without a fault",
        "rank / mid-step / SIGKILL: ranks are rebuilt, bitwise. No replica of the trainer goes on alone",
    ),
    Peer(
        MILES,
        "scenario_deterministic.py: a replica is stopped and healed from another",
        "bitwise, also after a resume from the checkpoint after it",
        "rank / * / SIGKILL, rank / resuming / SIGKILL: bitwise",
    ),
    Peer(
        MILES,
        "scenario_ft_random.py: SIGKILL, exit or segmentation fault of a random replica, about every 120 s",
        "30 steps without a hang, two recoveries or more",
        "the soak: one random fault every 120 s, of all roles",
    ),
    Peer(
        MILES,
        "scenario_realistic_gsm8k.py: the same for 250 rollouts",
        "the accuracy bound of the run without faults",
        "the soak: its steps are those of the undisturbed run",
    ),
    Peer(
        MILES,
        "scenario_no_failure.py: two layouts without a fault",
        "tensors within 0.85 %",
        "the undisturbed run, to which every cell is compared bit for bit",
    ),
    Peer(
        NEMO,
        "tests/functional/grpo_dp_single_controller_chaos.sh: SIGKILL of the only generation worker, idle or serving",
        "the job ends within 600 s with an error that names the cause",
        "server head / idle and generating / SIGKILL: the run goes on",
    ),
    Peer(
        NEMO,
        "tests/functional/grpo_sc_gym_router_failover.sh: SIGKILL of one of two generation workers",
        "it is no longer asked (quarantine), or the run completes (survival)",
        "server head / generating / SIGKILL: the run goes on with the same samples",
    ),
    Peer(
        NEMO,
        "tests/unit/single_controller/test_watchdog_pump.py: no progress, a dead worker, a wedged environment",
        "an error, or a warning, within the time limit",
        "rank / * / SIGSTOP, reward / * / SIGSTOP, on processes",
    ),
)
