"""What a rank is sent of a micro-batch's routes: its rows and layers alone, found by sample where they arrive.

Letters: T packed tokens, N samples in a pack, L MoE layers, K experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from routing_replay.align import ShardSpec, pack_rows
from routing_replay.checksums import row_checksums
from routing_replay.rank_routes import RankRoutes, cut_routes, fed_routes
from routing_replay.trace import RoutingTrace
from tests.support.refusals import refuses

LAYERS, K, E = (1, 2, 4), 4, 16
NAMES, LENGTHS = ("a/0", "b/0", "a/1"), (7, 5, 1)
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
TOKENS = torch.arange(sum(LENGTHS))
PARTS = [
    ShardSpec(layers=layers, cp=cp, cp_rank=rank, multiple=multiple)
    for layers in (LAYERS, (2,), ())
    for cp in (1, 2, 4)
    for rank in range(cp)
    for multiple in (1, 2, 6)
]


def trace(*, gates: bool = False) -> RoutingTrace:
    g = torch.Generator().manual_seed(1)
    ids = torch.rand(sum(LENGTHS), len(LAYERS), E, generator=g).argsort(-1)[..., :K]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    seals = row_checksums(TOKENS, ids.to(torch.uint8), LAYERS, positions=positions)
    plain = RoutingTrace(experts=ids.to(torch.uint8), layers=LAYERS, num_experts=E, checksums=seals)
    return plain.with_gates(torch.rand(ids.shape, generator=g)) if gates else plain


def cut(part: ShardSpec, *, gates: bool = False) -> RankRoutes:
    return cut_routes(trace(gates=gates), NAMES, ENDS, part)


def fed(routes: RankRoutes, part: ShardSpec, names: Sequence[str] = NAMES) -> RoutingTrace:
    return fed_routes(routes, names, TOKENS, ENDS, part)


def shuffled(routes: RankRoutes, order: Sequence[int]) -> RankRoutes:
    """The samples in another order: names, lengths and rows."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.split(routes.lengths)[i] for i in order])

    return replace(
        routes,
        samples=tuple(routes.samples[i] for i in order),
        lengths=tuple(routes.lengths[i] for i in order),
        trace=routes.trace.map_rows(moved),
        checksums=moved(routes.checksums),
    )


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_each_row_that_is_fed_has_the_routes_of_its_token(part: ShardSpec) -> None:
    """Written out: row i of a rank is token rows[i] of the pack, and gets that token's experts in the rank's layers;
    padding gets valid ids, none twice in a row."""
    got, rows = fed(cut(part), part), pack_rows(ENDS, part).rows
    assert got.layers == part.layers and len(got) == len(rows) and len(rows) % part.multiple == 0
    got.check()
    columns = [LAYERS.index(layer) for layer in part.layers]
    for i, token in enumerate(rows.tolist()):
        if token >= 0:
            assert torch.equal(got.experts[i], trace().experts[token, columns])


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_parts_hold_each_route_once(cp: int) -> None:
    """What is shipped to all context-parallel ranks and pipeline stages together is the trace, byte for byte: nothing
    twice, no padding."""
    parts = [ShardSpec(layers=layers, cp=cp, cp_rank=r, multiple=2) for layers in ((1, 2), (4,)) for r in range(cp)]
    rows, seal = sum(LENGTHS), 4
    assert sum(cut(p).trace.experts.nbytes for p in parts) == trace().experts.nbytes == rows * len(LAYERS) * K
    assert sum(cut(p).nbytes for p in parts) == rows * len(LAYERS) * K + 2 * rows * seal  # a seal for each stage
    assert all(cut(p).trace.experts.is_contiguous() and cut(p).trace.layers == p.layers for p in parts)


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_routes_are_found_by_name_and_not_by_place(part: ShardSpec) -> None:
    """A list that comes in another order must not give a sample its neighbour's experts."""
    assert torch.equal(fed(shuffled(cut(part), [2, 0, 1]), part).experts, fed(cut(part), part).experts)


def test_what_does_not_belong_is_refused_by_name() -> None:
    """Each would train a sample on another's experts, or on another rank's rows."""
    part = ShardSpec(layers=LAYERS, cp=2, cp_rank=0)
    other = replace(part, cp_rank=1)
    with refuses(ValueError, "cp_rank", 1, "cp_rank", 0):
        fed(cut(other), part)
    with refuses(ValueError, "(2,)"):
        fed(cut(replace(part, layers=(2,))), part)
    with refuses(ValueError, "['a/1']", "['c/0']"):
        fed(cut(part), part, ("a/0", "b/0", "c/0"))
    with refuses(ValueError, "['a/1']"):
        fed_routes(cut(part), NAMES[:2], TOKENS[:12], ENDS[:3], part)
    short = replace(cut(part), lengths=(2, 3, 1))  # of 3, 2 and 1
    with refuses(ValueError, "a/0", 2, 3):
        fed(short, part)
    with refuses(ValueError, "a/0", "b/0", 13, 12):
        cut_routes(trace(), NAMES[:2], ENDS[:3], part)
    with refuses(ValueError, "a/0", "b/0", "a/1"):
        cut_routes(replace(trace(), checksums=None), NAMES, ENDS, part)
    with refuses(ValueError, "a/0", "b/0", "a/1", "(2,)", 6):
        replace(cut(part), checksums=torch.zeros(2, dtype=torch.int32))
    with refuses(ValueError, "[3]"):
        cut(replace(part, layers=(2, 3)))


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("layers", [LAYERS, (2, 4)])
def test_a_row_that_was_sealed_with_another_token_is_refused(cp: int, layers: tuple[int, ...]) -> None:
    """On the rank, for what arrived: shapes and names fit, and yet a row is another one's. Sample, layers and position
    of the first are named. Also where the tokens, not the routes, have moved."""
    part = ShardSpec(layers=layers, cp=cp, cp_rank=0)
    good = cut(part)

    def wrong(ids: torch.Tensor) -> RankRoutes:
        return replace(good, trace=replace(good.trace, experts=ids))

    ids, n = good.trace.experts, good.lengths[0]
    faults = {
        "one row shifted": (wrong(ids.roll(1, 0)), ("a/0", 0)),
        "the neighbour's rows": (wrong(torch.cat([ids[n : 2 * n], ids[:n], ids[2 * n :]])), ("a/0", 0)),
        "rotated layers": (wrong(ids.roll(1, 1)), ("a/0", 0)),
        "one id": (wrong(torch.cat([ids[:n], (ids[n : n + 1] + 1) % E, ids[n + 1 :]])), ("b/0", 0)),
    }
    for routes, facts in faults.values():
        with refuses(ValueError, *facts):
            fed(routes, part)
    with refuses(ValueError, "a/0", 1):
        fed_routes(good, NAMES, TOKENS.clone().index_fill(0, torch.tensor([1]), 99), ENDS, part)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("layers", [LAYERS, (2, 4)])
def test_gates_that_are_not_of_their_row_are_refused(cp: int, layers: tuple[int, ...]) -> None:
    """They travel beside the ids under the same seals: right experts with another row's weights, or with none, stop."""
    part = ShardSpec(layers=layers, cp=cp, cp_rank=0)
    good = cut(part, gates=True)
    gates, n = good.trace.weights, good.lengths[0]
    assert gates is not None and torch.equal(fed(good, part).experts, fed(cut(part), part).experts)

    def wrong(other: torch.Tensor | None) -> RankRoutes:
        return replace(good, trace=replace(good.trace, weights=other))

    late, bit = gates.clone(), gates.clone()
    late[n:] = gates[n:].roll(1, 0)
    bit.view(torch.int32)[n, 0, 1] ^= 1
    faults = [(gates.roll(1, 0), "a/0"), (gates.roll(1, 1), "a/0"), (late, "b/0"), (bit, "b/0"), (None, "a/0")]
    for other, name in faults:
        with refuses(ValueError, name, 0):
            fed(wrong(other), part)
