"""A `Packer` gives what `pack` gives with the same settings: a setting lost on the way would train another step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch

from miles_like.batch.packer import Packer
from miles_like.batch.packing import pack
from miles_like.types import Aggregation, MicroBatch, SampleGroup, TrainBatch, VersionSpan
from tests.support.made_samples import group, sample
from tests.support.refusals import refuses


def given(n: int = 9) -> list[SampleGroup]:
    """Groups of two samples of different lengths, all tokens different."""
    out, first = [], 0
    for g in range(n):
        made = []
        for i in range(2):
            length = 2 + (3 * g + i) % 7
            made.append(sample(f"p{g}", i, prompt_len=3, response_len=length, first_token=first, version=g))
            first += 3 + length
        out.append(group(made))
    return out


def counting(groups: Sequence[SampleGroup]) -> list[list[float]]:
    return [[float(10 * g + i) for i in range(len(of.samples))] for g, of in enumerate(groups)]


def cells(batch: TrainBatch) -> list[MicroBatch]:
    return [m for row in batch.grid for m in row]


def same(one: TrainBatch, other: TrainBatch) -> bool:
    if len(cells(one)) != len(cells(other)):
        return False
    pairs = list(zip(cells(one), cells(other), strict=True))
    return (
        (one.loss_tokens, one.versions) == (other.loss_tokens, other.versions)
        and all(a.samples == b.samples for a, b in pairs)
        and all(torch.equal(a.tokens, b.tokens) and torch.equal(a.advantages, b.advantages) for a, b in pairs)
        and all((a.weights is None) == (b.weights is None) for a, b in pairs)
        and all(torch.equal(a.weights, b.weights) for a, b in pairs if a.weights is not None and b.weights is not None)
    )


SETTINGS = {
    "dp_size": 2,
    "max_tokens": 24,
    "micro_multiple": 2,
    "cost": lambda n: float(n * n),
    "replayed": False,
    "aggregation": Aggregation.CONSTANT,
    "constant": 7,
}


def test_every_setting_reaches_pack():
    """Each is needed to get this batch; `replayed` is tried below."""
    assert {*SETTINGS, "steps_per_rollout"} == {f.name for f in fields(Packer)}
    groups = given()
    want = pack(groups, counting(groups), **SETTINGS)
    assert same(Packer(**SETTINGS).batch(groups, counting(groups)), want)
    few = {"dp_size": 1, "max_tokens": 99, "micro_multiple": 1, "cost": None, "constant": 9}
    for name, value in few.items():
        assert not same(pack(groups, counting(groups), **SETTINGS | {name: value}), want), name


def test_only_a_packer_for_replay_refuses_routes_of_other_weights():
    traced = sample(response_len=4, routing=True, version=3)
    assert traced.routing is not None
    stale = traced.routing.with_checksums(traced.token_ids[:-1], versions=(VersionSpan(2, 0, len(traced.routing)),))
    groups = [group([replace(traced, routing=stale)])]
    assert Packer(dp_size=1, max_tokens=40, replayed=False).batch(groups).loss_tokens == 4
    with refuses(ValueError, "p/0"):
        Packer(dp_size=1, max_tokens=40).batch(groups)


def test_steps_are_whole_groups_in_the_order_given():
    groups, packer = given(), Packer(**SETTINGS, steps_per_rollout=3)
    advantages = counting(groups)
    for i, batch in enumerate(packer.steps(groups, advantages)):
        part = slice(3 * i, 3 * i + 3)
        assert same(batch, packer.batch(groups[part], advantages[part]))
    with refuses(ValueError, "train.steps_per_rollout"):
        Packer(dp_size=1, max_tokens=40, steps_per_rollout=4).steps(groups, advantages)


def test_no_advantages_are_zeros():
    groups, packer = given(), Packer(**SETTINGS, steps_per_rollout=3)
    zeros = [[0.0, 0.0]] * len(groups)
    assert same(packer.batch(groups), packer.batch(groups, zeros))
    assert all(same(a, b) for a, b in zip(packer.steps(groups), packer.steps(groups, zeros), strict=True))


def test_examples_of_a_group_stay_together():
    groups = given()
    batch = Packer(**SETTINGS).examples(groups)
    assert same(batch, pack(groups, [[0.0, 0.0]] * len(groups), **SETTINGS, together=True))
    pairs = {tuple(s.name for s in g.samples) for g in groups}
    found = [names[i : i + 2] for m in cells(batch) if any(names := m.samples) for i in range(0, len(names), 2)]
    assert set(found) == pairs
