"""The number of rollout workers, and the servers of each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from miles_like.cluster.placement import plan_placement
from miles_like.config.load import load_config
from miles_like.plugins import name_of
from miles_like.run.setup.worker_side import shares_of, worker_slots, workers_of

CONFIGS = Path(__file__).parents[4] / "configs"
TINY = CONFIGS / "tiny.toml"


def planned(*settings: str) -> Any:
    config = load_config(TINY, list(settings))
    placement = plan_placement(config.cluster, config.parallel, config.servers)
    return SimpleNamespace(config=config, placement=placement)


def test_a_worker_for_each_node_with_servers_where_there_are_several() -> None:
    assert workers_of(planned()) == 0 and workers_of(planned("rollout.servers=4")) == 0
    plan = planned("cluster.nodes=2", "rollout.servers=3")
    assert workers_of(plan) == 2
    assert [(slot.node, servers) for slot, servers in worker_slots(plan.placement, 2)] == [(0, [0, 2]), (1, [1])]
    assert workers_of(planned("cluster.nodes=2", "rollout.servers=3", "rollout.workers=0")) == 0
    assert workers_of(planned("rollout.workers=3")) == 3


def test_a_reward_of_the_driver_has_no_workers_by_default(tmp_path: Path) -> None:
    """A function that only the process of `miles_like.train` has; one that gets all samples at once has them."""
    file = tmp_path / "rewards.py"
    file.write_text(
        "def whole(prompts, samples):\n    return [0.0] * len(prompts)\n\ndef single(prompt, sample):\n    return 0.0\n"
    )
    nodes = ("cluster.nodes=2", "rollout.servers=2")
    assert workers_of(planned(*nodes, f"reward.name={file}:single")) == 2
    assert workers_of(planned(*nodes, f"reward.name={file}:whole")) == 2
    assert workers_of(planned(*nodes, f"reward.name={name_of(lambda sample: 0.0)}")) == 0


def test_servers_are_divided_evenly_and_shared_where_there_are_too_few() -> None:
    assert shares_of([0, 0, 0, 0, 0], 2) == [[0, 1], [2, 3, 4]]
    assert shares_of([0, 1, 0, 1], 2) == [[0, 2], [1, 3]]
    assert shares_of([0, 1, 0, 1], 3) == [[0], [2, 1], [3]]
    assert shares_of([0, 0], 3) == [[0], [1], [0]]
