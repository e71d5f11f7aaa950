"""What rollout workers cannot do yet is refused when the configuration is read, and not chosen by itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_like.cluster.placement import plan_placement
from miles_like.config.load import load_config
from miles_like.plugins import name_of
from miles_like.run.setup.worker_side import shares_of, worker_slots, workers_of
from tests.support.refusals import refuses

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = CONFIGS / "tiny.toml"
REFUSED = {
    "reinforce++": (("algorithm.name=reinforce_pp",), "algorithm.advantage"),
    "remax": (("algorithm.name=remax",), "algorithm.advantage"),
    "a critic": (("algorithm.name=ppo",), "algorithm.advantage"),
    "a user's advantage": (("algorithm.advantage=a:b",), "a:b"),
    "a penalty in the reward": (("algorithm.kl_in=reward", "algorithm.kl_coefficient=0.1"), "0.1"),
    "turns": (("cluster.colocate=true",), "cluster.colocate"),
    "old tokens": (
        (
            "buffer.old_tokens=mask",
            "buffer.over_sampling=2",
            "buffer.max_staleness=1",
            "alignment.deterministic=false",
        ),
        "buffer.old_tokens",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_tokens_in_the_driver_is_refused(what: str) -> None:
    settings, key = REFUSED[what]
    assert load_config(TINY, list(settings)).rollout.workers is None
    with refuses(ValueError, "rollout.workers", 2, key):
        load_config(TINY, ["rollout.workers=2", *settings])


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
    assert workers_of(planned("cluster.nodes=2", "rollout.servers=3", "algorithm.name=remax")) == 0
    assert workers_of(planned("rollout.workers=3")) == 3


def test_rewards_of_the_driver_or_of_whole_rounds_have_no_workers_by_default(tmp_path: Path) -> None:
    """Neither a function that only the process of `miles_like.train` has, nor one that gets all samples at once."""
    file = tmp_path / "rewards.py"
    file.write_text(
        "def whole(prompts, samples):\n    return [0.0] * len(prompts)\n\ndef single(prompt, sample):\n    return 0.0\n"
    )
    nodes = ("cluster.nodes=2", "rollout.servers=2")
    assert workers_of(planned(*nodes, f"reward.name={file}:single")) == 2
    assert workers_of(planned(*nodes, f"reward.name={file}:whole")) == 0
    assert workers_of(planned(*nodes, f"reward.name={name_of(lambda sample: 0.0)}")) == 0


def test_servers_are_divided_evenly_and_shared_where_there_are_too_few() -> None:
    assert shares_of([0, 0, 0, 0, 0], 2) == [[0, 1], [2, 3, 4]]
    assert shares_of([0, 1, 0, 1], 2) == [[0, 2], [1, 3]]
    assert shares_of([0, 1, 0, 1], 3) == [[0], [2, 1], [3]]
    assert shares_of([0, 0], 3) == [[0], [1], [0]]
