"""Memory of libraries: buffers of DeepEP against their published sizes, and what is named in a plan."""

from __future__ import annotations

import pytest

from miles_like.planning.memory.allowances import ALLOWANCES, communicators, deepep_low_latency, deepep_normal
from miles_like.planning.memory.parts import GIB, MIB
from tests.support.plans import planned, trainer_ranks


def test_low_latency_buffers_are_those_of_deepeps_readme() -> None:
    """get_low_latency_rdma_size_hint of 128 tokens, hidden size 7168, 288 experts: the README's example says that
    decoding may take about 2 GB of RDMA buffer."""
    assert 1.5 * GIB < deepep_low_latency(32, 7168, 256) < 2.2 * GIB


def test_normal_buffers_grow_with_the_ranks() -> None:
    """Inside a node a few hundred MiB; across nodes near 1 GB, DeepEP's default of `num_rdma_bytes`."""
    assert 200 * MIB < deepep_normal(8, 2 * 7168) < 600 * MIB
    assert deepep_normal(8, 2 * 7168) < deepep_normal(16, 2 * 7168) < deepep_normal(64, 2 * 7168) < 3 * GIB


def test_a_group_of_one_rank_needs_no_communicator() -> None:
    alone = trainer_ranks("qwen3_0_6b").config
    assert communicators(alone) == 0
    assert communicators(trainer_ranks("deepseek_v3_fp8").config) > communicators(trainer_ranks("qwen3_4b").config) > 0


@pytest.mark.parametrize("name", ["qwen3_4b", "deepseek_v3_fp8"])
def test_every_part_that_no_tensor_holds_is_named_with_a_source(name: str) -> None:
    named = {a.part for a in ALLOWANCES}
    assert all(a.what and a.source for a in ALLOWANCES)
    parts = {part for row in planned(name).stages for phase in row.phases.values() for part in phase}
    tensors = {"parameters", "gradients", "masters", "moments", "rounded weights", "activations", "logits"}
    assert parts - tensors - {"communication", "engine weights", "KV cache"} <= named
