"""Train time follows the packing of the project, and decoding its sum step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.batch.bins import spread
from miles_like.simulation.inputs.assumptions import EngineAssumptions, TrainAssumptions
from miles_like.simulation.inputs.settings import busiest_shard, decode_seconds, padded_tokens, train_seconds

INPUTS = st.lists(st.integers(1, 400), min_size=1, max_size=60)


@settings(max_examples=80, deadline=None)
@given(inputs=INPUTS, shards=st.integers(1, 8))
def test_the_busiest_shard_is_the_packer_s(inputs: list[int], shards: int) -> None:
    rows = spread(np.arange(len(inputs)), np.array(inputs, np.float64), bins=shards)
    assert sum(busiest_shard(inputs, shards)) == max(sum(inputs[i] for i in row) for row in rows)


@settings(max_examples=80, deadline=None)
@given(inputs=INPUTS, most=st.integers(400, 2000))
def test_padding_never_has_fewer_tokens_and_equal_lengths_have_no_padding(inputs: list[int], most: int) -> None:
    assert padded_tokens(inputs, most) >= sum(inputs)
    assert padded_tokens([inputs[0]] * len(inputs), most) == inputs[0] * len(inputs)


def test_a_step_waits_for_the_shard_with_most_tokens() -> None:
    train = TrainAssumptions(fixed_s=1.0, token_s=0.1)
    assert train_seconds(train, [5, 4, 3, 3, 3], shards=2, micro_batch_tokens=99) == pytest.approx(1 + 0.1 * 10)
    padded = TrainAssumptions(token_s=0.1, packing="padded")
    assert train_seconds(padded, [5, 1, 2, 2], shards=2, micro_batch_tokens=99) == pytest.approx(0.1 * 10)
    assert train_seconds(padded, [5, 1, 2, 2], shards=1, micro_batch_tokens=12) == pytest.approx(0.1 * (10 + 4))


@settings(max_examples=50, deadline=None)
@given(steps=st.integers(1, 50), running=st.integers(0, 30), context=st.integers(0, 10**5))
def test_steps_together_are_the_sum_of_each(steps: int, running: int, context: int) -> None:
    engine = EngineAssumptions(step_s=0.01, token_s=2e-4, context_s=3e-7)
    each = [0.01 + 2e-4 * running + 3e-7 * (context + i * running) for i in range(steps)]
    assert decode_seconds(engine, steps=steps, running=running, context=context) == pytest.approx(sum(each))
