"""Chunks of weights that are gathered while a run publishes."""

from __future__ import annotations

import pytest

from miles_like.planning.memory import gathering
from miles_like.planning.memory.gathering import Gathered, Gathering, gathering_bytes
from miles_like.planning.memory.parts import MIB
from tests.support.plans import trainer_ranks


@pytest.mark.slow
def test_a_chunk_is_as_large_as_the_trainer_and_the_driver_make_it() -> None:
    from megatron_bridge.weights.export import BUCKET_BYTES
    from miles_like.cluster import pacing

    assert gathering.CHUNK_BYTES == BUCKET_BYTES == pacing.CHUNK_BYTES


def test_the_largest_chunk_is_one_expert_of_every_rank() -> None:
    """DeepSeek-V3's middle stages: gate and up of 16 experts; its first stage has the embedding too."""
    plans = trainer_ranks("deepseek_v3_fp8")
    of_stage = [gathering.gathering(plans.weights, plans.config.parallel, stage) for stage in plans.stages]
    assert of_stage[4].chunk == 16 * 2 * 2048 * 7168 * 2
    assert of_stage[4].owned == 2 * of_stage[4].chunk  # gathered, and flat for the other stages
    assert of_stage[0].chunk == 129280 * 7168 * 2


def test_a_rank_receives_chunks_of_other_stages() -> None:
    """While it still holds the chunk before."""
    small = Gathering(largest=(Gathered(chunk=2, owned=3, kept=2), Gathered(chunk=1, owned=2, kept=1)))
    large = Gathering(largest=(Gathered(chunk=10, owned=20, kept=10), Gathered(chunk=5, owned=6, kept=5)))
    assert [gathering_bytes([small, large], stage) for stage in (0, 1)] == [15, 25]
    assert gathering_bytes([small], 0) == 4


def test_small_parameters_fill_a_chunk_together() -> None:
    """Qwen3-0.6B on one rank: nothing is gathered; the rows of queries, keys and values are copied, no embedding is."""
    plans = trainer_ranks("qwen3_0_6b")
    found = gathering.gathering(plans.weights, plans.config.parallel, plans.stages[0])
    assert found.chunk == 151936 * 1024 * 2 > 256 * MIB
    assert found.largest[0].owned == 0 < found.largest[1].owned < 100 * MIB
