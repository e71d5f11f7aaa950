"""Why an actor has died, and the end of processes that remain. The words of Ray 2.60 are those of its table of actors.
Not covered: several nodes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest

from miles_like.cluster.lost.processes import _end, why_died

DIED = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: ..."
GONE = (
    "The actor is not schedulable: The node specified via NodeAffinitySchedulingStrategy doesn't exist any more or is "
    "infeasible, and soft=False was specified."
)
NODE = "The actor is dead because its node has died. Node Id: 1f"


def test_a_lost_node_is_told_from_a_dead_process() -> None:
    assert why_died(NODE) == why_died(GONE) == "its node is lost" and "process died" in why_died(DIED)


@pytest.fixture
def stopped() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that a signal has stopped: an actor's by its title, and another."""
    words = [["bash", "-c", f"exec -a {name} sleep 100"] for name in ("ray::_Rank.train", "another")]
    made = [subprocess.Popen(one) for one in words]
    for process in made:
        process.send_signal(signal.SIGSTOP)
    yield made
    for process in made:
        process.kill()
        process.wait()


def test_an_actor_s_process_ends_also_where_it_is_stopped_and_no_other_process_does(
    stopped: list[subprocess.Popen[bytes]],
) -> None:
    actor, other = stopped
    assert _end([actor.pid, other.pid]) == []
    assert actor.wait(10) == -signal.SIGKILL and other.poll() is None
