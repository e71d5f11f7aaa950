"""Law: what stock vLLM servers lack is refused when the configuration is read, in one sentence with its remedy.

Why it must hold: each of these would be found out in training, or not at all. Not covered: models that vLLM serves
wrongly (tests/miles_like/run/setup/test_vllm_support.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_like.cluster.placement import plan_placement
from miles_like.config.load import load_config
from tests.support.refusals import Facts, refuses

CONFIG = Path(__file__).parents[4] / "configs" / "tiny_vllm.toml"
APART = ("cluster.gpus_per_node=4", "cluster.nodes=4", "cluster.colocate=false", "parallel.dp=2")


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (["publish.path=tensor"], ("publish.path", "tensor", "disk")),
        (["publish.pause_mode=in_place"], ("publish.pause_mode", "in_place", "retract")),
        (["publish.answer_tokens=0"], ("publish.answer_tokens", 0)),
        (["alignment.deterministic=true"], ("alignment.deterministic", "vLLM")),
        (["replay.mode=r3", "replay.gates=true"], ("replay.gates", "replay.mode", "rollout.engine")),
        (["rollout.top_k=5"], ("rollout.top_k", 5, "rollout.top_p")),
        (["rollout.top_p=0.9"], ("rollout.top_p", 0.9, "rollout.top_k")),
        (["cluster.colocate=true"], ("rollout.engine", "cluster.colocate", "vllm")),
        (["rollout.vllm.tensor_parallel_size=2"], ("rollout.vllm.tensor_parallel_size", 2, "cluster.gpus_per_node", 0)),
        ([*APART, "rollout.vllm.tensor_parallel_size=8"], ("rollout.vllm.tensor_parallel_size", 8, 4)),
        (["rollout.vllm.python=python3"], ("rollout.vllm.python", "python3")),
        (["rollout.sglang.python=/x/python"], ("rollout.sglang.python", "rollout.engine", "vllm")),
    ],
)
def test_what_it_lacks_is_refused(overrides: list[str], facts: Facts) -> None:
    with refuses(ValueError, *facts) as e:
        load_config(CONFIG, overrides)
    assert "\n" not in str(e.value)


def test_an_interpreter_of_another_engine_is_refused() -> None:
    with refuses(ValueError, "rollout.vllm.python", "/x/python", "rollout.engine", "embedded"):
        load_config(CONFIG.with_name("tiny.toml"), ["rollout.vllm.python=/x/python"])


def test_servers_on_gpus_are_placed_by_their_width() -> None:
    config = load_config(CONFIG, [*APART, "rollout.vllm.tensor_parallel_size=2"])
    (slot,) = plan_placement(config.cluster, config.parallel, config.servers).of("rollout")
    assert (slot.node, slot.gpus, slot.nnodes) == (1, (0, 1), 1)
