"""Agreement of routings is of sets: the order within a row carries nothing.

Letters: K experts a token.
"""

from __future__ import annotations

import torch

from routing_replay.agreement import RouteCounts, count_routes, topk_agreement
from tests.support.refusals import refuses


def test_by_hand() -> None:
    """Same, permuted, one different, all different; uint8 against int64 where 200 would be negative as int8."""
    a = torch.tensor([[1, 2, 3], [1, 2, 200], [1, 2, 3], [1, 2, 3]], dtype=torch.uint8)
    b = torch.tensor([[1, 2, 3], [200, 1, 2], [1, 2, 4], [4, 5, 6]])
    assert topk_agreement(a, b).tolist() == [True, True, False, False]


def test_equals_python_sets() -> None:
    """Python's own sets over random rows, about half of them permutations."""
    g = torch.Generator().manual_seed(0)
    a = torch.rand(500, 6, generator=g).argsort(-1)[:, :4]
    b = torch.rand(500, 6, generator=g).argsort(-1)[:, :4]
    b[::2] = a[::2].flip(-1)
    want = [set(x) == set(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert topk_agreement(a, b).tolist() == want
    assert 250 < sum(want) < 500


def test_other_shapes_are_refused() -> None:
    """Broadcasting would compare a row with all of the others."""
    with refuses(ValueError, "(3, 2)", "(1, 2)"):
        topk_agreement(torch.zeros(3, 2), torch.zeros(1, 2))


def test_a_row_that_has_an_expert_twice_is_another_row() -> None:
    """Sets in which one stands for two are not equal, as sorted lists would say; ids up to the largest there can be."""
    a = torch.tensor([[1, 1, 2], [1, 1, 2], [32767, 0, 5]], dtype=torch.int16)
    b = torch.tensor([[1, 2, 2], [2, 1, 1], [5, 32767, 0]])
    assert topk_agreement(a, b).tolist() == [False, True, True]


def counted(chosen: list[list[int]], recorded: list[list[int]], real: list[bool]) -> RouteCounts:
    counts, shared = count_routes(torch.tensor(chosen), torch.tensor(recorded), torch.tensor(real), 8)
    of_rows = [len({*a} & {*b}) if r else 0 for a, b, r in zip(chosen, recorded, real, strict=True)]
    assert shared.tolist() == of_rows
    return RouteCounts(*counts.tolist())


def test_counts_of_a_layer() -> None:
    """Rows, equal sets, experts in common, and the same with the rows before and after; in any order of ids."""
    own = [[0, 1], [1, 2], [2, 3]]
    found = counted(own, [[1, 0], [2, 5], [6, 7]], [True] * 3)
    assert (found.rows, found.same_sets, found.shared) == (3, 1, 3)
    # before: {1,2} & {1,0}, {2,3} & {2,5}; after: {0,1} & {2,5}, {1,2} & {6,7}
    assert (found.pairs, found.shared_with_neighbour) == (4, 2)


def test_padding_counts_nowhere() -> None:
    own = [[0, 1], [1, 2], [2, 3]]
    found = counted(own, own, [True, True, False])
    assert found == RouteCounts(rows=2, same_sets=2, shared=4, pairs=2, shared_with_neighbour=2)
    assert counted(own[:1], own[:1], [True]) == RouteCounts(1, 1, 2, 0, 0), "a row alone has no neighbours"


def test_shifted_rows_agree_with_a_neighbour() -> None:
    ids = torch.rand(400, 16, generator=torch.Generator().manual_seed(0)).topk(4).indices
    every = torch.ones(400, dtype=torch.bool)
    for by in (1, -1):
        found = RouteCounts(*count_routes(ids, ids.roll(by, 0), every, 16)[0].tolist())
        assert abs(found.shared / (4 * found.rows) - 4 / 16) < 0.05
        assert found.shared_with_neighbour / (4 * found.pairs) > 0.6
