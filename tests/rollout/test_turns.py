"""A request of many samples does not slow one of few, and its own are none the worse for it.

Why it must hold: the time of a step grows with its rows, and all clients of a server share its steps. Without turns the
99th percentile of a small request beside large ones was 7.6 times that of a quiet server. Not covered: the wait for a
row or for cache pages, which are given in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.embedded.engine import Engine
from rollout.embedded.turns import STEP_ROWS, in_turn
from tests.rollout.embedded_fixtures import oracle, run, save, service, spec, submit

requests = st.lists(st.tuples(st.integers(1, 80), st.integers(0, 40)), min_size=1, max_size=40)


@given(requests, st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_shares_of_a_step(sizes: list[tuple[int, int]], seed: int) -> None:
    """sizes: (running, ended) samples of each request."""
    g = np.random.default_rng(seed)
    owner = g.permutation(np.repeat(np.arange(len(sizes)), [n for n, _ in sizes]))
    asked = np.array([n + ended for n, ended in sizes])[owner]
    sampled = g.integers(0, 5, len(owner))
    turn = in_turn(owner, asked, sampled)
    assert (np.diff(turn) > 0).all()
    given_ = np.bincount(owner[turn], minlength=len(sizes))
    smallest, share = int(asked.min()), max(STEP_ROWS // len(sizes), 1)
    for i, (running, _) in enumerate(sizes):
        assert given_[i] >= min(running, max(share, smallest)), "each has its part"
        mine, out = sampled[owner == i], np.setdiff1d(np.flatnonzero(owner == i), turn)
        if len(out):
            assert sampled[out].min() >= sampled[turn[owner[turn] == i]].max(), "who has fewest comes first"
            assert len(mine) > given_[i]
    if len(owner) > STEP_ROWS and len(sizes) > 1:
        assert len(turn) <= max(STEP_ROWS, len(sizes) * smallest), "and no more"
    else:
        assert len(turn) == len(owner)


def test_requests_of_one_size_run_whole() -> None:
    owner = np.repeat(np.arange(64), 8)
    owner = owner[: 64 * 8 - 5]  # the last has ended samples
    assert len(in_turn(owner, np.full(len(owner), 8), np.zeros(len(owner), np.int64))) == len(owner)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle(), tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    yield service(path, max_total_tokens=16384).engine


def test_a_small_request_beside_large_ones(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after as many steps as alone, no step has more rows than requests share, and every sample is that of its
    request alone."""
    large = [spec([5, 9, i], n=64, max_new_tokens=30, sampling_seed=i) for i in range(3)]
    small = spec([7, 8, 9, 10], n=2, max_new_tokens=12)
    alone = [run(engine, s)[0] for s in (*large, small)]
    widths: list[int] = []
    forward = type(engine.model).forward

    def counted(model, batch, cache):  # type: ignore[no-untyped-def]
        widths.append(len(batch.tokens))
        return forward(model, batch, cache)

    monkeypatch.setattr(type(engine.model), "forward", counted)
    beside = submit(engine, *large)
    for _ in range(3):
        engine.step()
    (mine,) = submit(engine, small)
    widths.clear()
    steps = 0
    while not mine:
        engine.step()
        steps += 1
    assert steps == small.sampling.max_new_tokens
    assert max(widths[1:]) <= STEP_ROWS
    while engine.step():
        pass
    for got, want in zip((*beside, mine), alone, strict=True):
        assert [c.reply.output_ids.tolist() for c in got] == [c.reply.output_ids.tolist() for c in want]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(torch.tensor(a.reply.logprobs), torch.tensor(b.reply.logprobs))


def test_prompts_and_running_samples_share_one_forward_pass(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that arrive one by one cost those who run no pass of their own."""
    passes: list[int] = []
    forward = type(engine.model).forward

    def counted(model, batch, cache):  # type: ignore[no-untyped-def]
        passes.append(len(batch.tokens))
        return forward(model, batch, cache)

    monkeypatch.setattr(type(engine.model), "forward", counted)
    out = submit(engine, spec([5, 9, 3], n=3, max_new_tokens=20))
    engine.step()
    for i in range(8):
        out += submit(engine, spec([7, 8, i, 4], max_new_tokens=20))
        engine.step()
    assert len(passes) == 9 and passes[1:] == [3 + i + 4 for i in range(8)]
    while engine.step():
        pass
    assert all(out)
