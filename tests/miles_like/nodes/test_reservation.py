"""The time limit of a reservation, by a clock that the test moves. No Ray is started; its part is in
tests/miles_like/run/setup/test_run_cluster.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from miles_like.nodes import members, reservation
from miles_like.nodes.members import Node

BEGAN, LIMIT_S, NEVER_S = 1000.0, 100.0, 1e6
NODES = tuple(Node(id=a, address=a, host="h", gpus=8, cores=64) for a in ("10.0.0.1", "10.0.0.2"))


class Cluster:
    """Ray and the clock. Late nodes, the placement group and a node's report take so many seconds; for `busy_s` seconds
    after the nodes have come another job has their GPUs."""

    def __init__(self, nodes_s: float, group_s: float, report_s: float, busy_s: float) -> None:
        self.now, self.nodes_s, self.group_s, self.report_s = BEGAN, nodes_s, group_s, report_s
        self.free_s = nodes_s + busy_s

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def _took(self, seconds: float, most: float) -> bool:
        self.now += min(seconds, most)
        return seconds <= most

    def get(self, ref: object, timeout: float) -> str:
        if not self._took(self.report_s, timeout):
            raise GetTimeoutError("late")
        return "facts"

    def remote(self, _: object) -> Any:
        actor = SimpleNamespace(facts=SimpleNamespace(remote=lambda *_: "ref"))
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: actor))

    def group(self, *_: object, **__: object) -> Any:
        return SimpleNamespace(wait=lambda most: self._took(self.group_s, most))

    def living(self) -> tuple[Node, ...]:
        return NODES if self.now >= BEGAN + self.nodes_s else NODES[:1]

    def free(self) -> dict[str, int]:
        return {n.id: 8 for n in NODES if self.now >= BEGAN + self.free_s}


WAITS = [(40, 25, 15), (90, 0, NEVER_S), (0, 25, NEVER_S), (NEVER_S, 0, 0)]


@pytest.mark.parametrize(
    ("nodes_s", "group_s", "report_s", "busy_s"),
    [(*waits, busy_s) for waits in WAITS for busy_s in (0, 300)]
    + [(90, NEVER_S, 0, 0)],  # a run that queues goes on with it: other jobs take the GPUs
)
def test_one_limit_is_for_all_waits_together(
    monkeypatch: pytest.MonkeyPatch, nodes_s: float, group_s: float, report_s: float, busy_s: float
) -> None:
    """Queueing for another job alone has no limit, and does not shorten the other waits."""
    cluster = Cluster(nodes_s, group_s, report_s, busy_s)
    for name, value in {
        "time": cluster,
        "ray": cluster,
        "free_gpus": cluster.free,
        "placement_group": cluster.group,
        "remove_placement_group": lambda _: None,
        "PlacementGroupSchedulingStrategy": lambda *_, **__: None,
        "_other_runs": dict,
        "cluster_gist": lambda: "",
    }.items():
        monkeypatch.setattr(reservation, name, value)
    monkeypatch.setattr(members, "time", cluster)
    monkeypatch.setattr(members, "living_nodes", cluster.living)
    fits = nodes_s + group_s + 2 * report_s <= LIMIT_S
    try:
        how: Any = "queue" if busy_s else "refuse"
        held = reservation.reserve(2, 8, run="a", when_busy=how, timeout_s=LIMIT_S, say=lambda _: None)
        assert fits and held.facts == ("facts", "facts")
    except (ValueError, RuntimeError):
        assert not fits
    assert cluster.now - BEGAN <= LIMIT_S + busy_s * (nodes_s < LIMIT_S) + 1.5  # a look is a second after the last
