"""Host memory of a node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miles_like.planning.memory.host import pinned
from miles_like.planning.memory.parts import GIB
from miles_like.planning.plan import HostPlan
from tests.support.plans import planned


def _host(name: str, *overrides: str) -> HostPlan:
    return planned(name, *overrides).host


def test_pinned_blocks_are_powers_of_two() -> None:
    """ATen/core/CachingHostAllocator.h rounds every size up."""
    assert [pinned(n) for n in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]


def test_a_sleeping_rank_copies_its_parameters_and_state() -> None:
    """Of Qwen3-4B on 8 GPUs: BF16 parameters of TP2, and 12 bytes of each that a rank updates."""
    asleep, awake = _host("qwen3_4b"), _host("qwen3_4b", "cluster.colocate=false", "cluster.nodes=2")
    copies = asleep.parts["sleeping copies"]
    least = 8 * (2 * 4.0e9 / 2 + 12 * 4.0e9 / 8)
    assert least < copies < 2.2 * least  # rounded up
    assert "sleeping copies" not in awake.parts


def test_an_offloaded_optimizer_stays_on_the_host() -> None:
    """DeepSeek-V3's 16 nodes: 12 bytes of masters and moments and 4 of gradients for each parameter of a rank."""
    host = _host("deepseek_v3_fp8")
    optimizer = host.parts["offloaded optimizer"]
    assert optimizer == pytest.approx(8 * 5.81e9 * 16, rel=0.06)
    assert host.total < host.memory
    assert _host("deepseek_v3_fp8", "kernels.offload_optimizer=0.0").parts["sleeping copies"] > 0.7 * optimizer


def test_an_asynchronous_checkpoint_is_written_from_a_copy() -> None:
    base = "checkpoint.asynchronous"
    with_, without = _host("qwen3_4b", f"{base}=true"), _host("qwen3_4b", f"{base}=false")
    assert with_.total - without.total == with_.parts["checkpoint copy"] > 14 * 4.0e9 / 2


def test_a_reference_is_kept_on_the_host() -> None:
    """The trainer's ranks swap it in: BF16 weights of each."""
    host = _host("qwen3_4b", "algorithm.kl_coefficient=0.01")
    assert host.parts["copies of weights"] == pytest.approx(8 * 2 * 4.0e9 / 2, rel=0.4)  # rounded up
    assert "copies of weights" not in _host("qwen3_4b").parts


def test_a_node_with_too_little_memory_is_named() -> None:
    plan = planned("qwen3_4b")
    small = replace(plan, host=replace(plan.host, memory=100 * GIB))
    assert plan.fits and not small.fits
    [sentence] = small.problems()
    assert "of host memory, but has 100.0" in sentence and "sleeping copies" in sentence
