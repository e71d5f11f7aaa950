"""A trace that is not the routes of its tokens is refused, by the name of what happened to it and where.

Why it must hold: routes of other tokens, layers or weights have the right shape and train without a word; a shift by
one row alone moves k3 to 0.2, and one bad row in a hundred is seen in no metric. Each corruption is made of a whole
trace by hand, in two ways where both can happen: rows move with their seals (a wrong index into traces) or without (a
wrong index into ids). Covered too: seals of parts (rows, layers) hold in the part, pieces add up to the whole. Gate
weights: test_gates_are_refused.py.

Not covered: routes that the engine captured wrongly before it sent them; two tokens alike, at the same position, with
the same routes, of two samples (they are interchangeable).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from routing_replay.align import place_rows, select_layers, take_rows, zigzag_index
from routing_replay.checksums import row_checksums
from routing_replay.ids import payload_line
from routing_replay.trace import RoutingTrace
from routing_replay.versions import VersionSpan, check_versions
from tests.support.refusals import refuses
from tests.support.sealed_traces import ALL, DRAWN, LAYERS, made, refused

CASES = settings(max_examples=40, deadline=None)


def with_rows(trace: RoutingTrace, index: Tensor, *, seals: bool) -> RoutingTrace:
    """Rows `index`, with their seals or under those that were there."""
    return replace(
        trace,
        experts=trace.experts[index],
        checksums=trace.checksums[index] if seals and trace.checksums is not None else trace.checksums,
    )


seeds, rows, kept = st.integers(0, 2**31), st.integers(0, 10), st.booleans()


@given(seeds, st.integers(2, 40), st.sampled_from([(16, 4), (256, 8), (384, 8), (300, 3), (8, 1)]))
@CASES
def test_what_is_whole_passes(seed: int, n: int, model: tuple[int, int]) -> None:
    """And goes through the wire unchanged, seals included."""
    tokens, trace = made(seed, tokens=n, experts=model[0], k=model[1])
    trace.check_tokens(tokens, sample="a/0")
    back = RoutingTrace.from_wire(
        trace.to_wire(num_layers=6), tokens=tokens, num_layers=6, layers=LAYERS, top_k=model[1], num_experts=model[0]
    )
    assert trace.checksums is not None and back.checksums is not None
    assert torch.equal(back.experts, trace.experts) and torch.equal(back.checksums, trace.checksums)


@given(seeds, st.sampled_from([1, -1, 2, -3, 5]), kept)
@CASES
def test_shifted_rows(seed: int, by: int, seals: bool) -> None:
    tokens, trace = made(seed)
    wrong = with_rows(trace, torch.arange(11).roll(by), seals=seals)
    refused(wrong, tokens, "shifted", layer=ALL, position=0, unrecorded=DRAWN)


def test_a_shift_says_by_how_much() -> None:
    """Rows that come one position too late are shifted by 1; here the last is lost and the first stands twice."""
    tokens, trace = made(1)
    late = torch.arange(11).roll(1)
    refused(with_rows(trace, late, seals=False), tokens, "shifted", 1, layer=ALL, position=0)
    refused(with_rows(trace, (torch.arange(11) - 1).clamp(min=0), seals=False), tokens, 1, 1, layer=ALL, position=1)
    early = (torch.arange(11) + 2 * (torch.arange(11) > 4)).clamp(max=10)
    refused(with_rows(trace, early, seals=True), tokens, layer=ALL, position=5)


@given(seeds, st.permutations(range(11)), kept)
@CASES
def test_permuted_rows(seed: int, order: list[int], seals: bool) -> None:
    tokens, trace = made(seed)
    index = torch.tensor(order)
    moved = (index != torch.arange(11)).nonzero()[:, 0]
    if len(moved):
        first = int(moved[0])
        message = refused(with_rows(trace, index, seals=seals), tokens, layer=ALL, position=first, unrecorded=DRAWN)
        assert re.search("rows are (permuted|shifted by)|rows from there on are shifted by", message), message


@given(seeds, rows, rows, kept)
@CASES
def test_a_duplicated_row(seed: int, a: int, b: int, seals: bool) -> None:
    """Row b in the place of row a."""
    if a == b:
        return
    tokens, trace = made(seed)
    index = torch.arange(11)
    index[a] = b
    wrong = with_rows(trace, index, seals=seals)
    refused(wrong, tokens, b, "duplicated", layer=ALL, position=a, unrecorded=DRAWN)


@pytest.mark.parametrize("a", range(11))
def test_a_dropped_and_an_added_row(a: int) -> None:
    tokens, trace = made(a)
    index = torch.arange(11)
    fewer = torch.cat([index[:a], index[a + 1 :]])
    more = torch.cat([index[: a + 1], index[a:]])
    refused(take_rows(trace, fewer), tokens, 10, 12, "dropped", layer=ALL, position=a)
    refused(take_rows(trace, more), tokens, 12, 12, "duplicated", layer=ALL, position=a + 1)
    with refuses(ValueError, 11, 10):
        replace(trace, experts=trace.experts[fewer])


@given(seeds, st.permutations(range(4)))
@CASES
def test_layers_exchanged(seed: int, order: list[int]) -> None:
    tokens, trace = made(seed)
    wrong = [LAYERS[i] for i, j in enumerate(order) if i != j]
    if wrong:
        kind = "swapped" if len(wrong) == 2 else "rotated"
        facts = (kind, wrong[0], LAYERS[order[LAYERS.index(wrong[0])]])
        joined = wrong in ([1, 2], [2, 3], [1, 2, 3])
        named = f"{wrong[0]}-{wrong[-1]}" if joined else ", ".join(map(str, wrong))
        moved = replace(trace, experts=trace.experts[:, order])
        refused(moved, tokens, *facts, layer=named, position=0, unrecorded=DRAWN)


def test_layers_under_other_numbers() -> None:
    """A table that counts dense layers, or does not."""
    tokens, trace = made(2)
    refused(replace(trace, layers=(0, 1, 2, 4)), tokens, layer="0, 1, 2, 4", position=0)


@given(seeds, rows, st.integers(0, 3))
@CASES
def test_one_row_of_one_layer_overwritten(seed: int, row: int, col: int) -> None:
    """Legal ids that differ from the chosen ones: an expert not chosen, or two slots exchanged."""
    tokens, trace = made(seed)
    for ids in (trace.experts[row, col].flip(0), other_expert(trace.experts[row, col])):
        experts = trace.experts.clone()
        experts[row, col] = ids
        wrong = replace(trace, experts=experts)
        facts = ("1 rows hold ids", "overwritten")
        refused(wrong, tokens, *facts, layer=LAYERS[col], position=row, unrecorded=DRAWN)


def test_every_slot_counts() -> None:
    """Eight slots are two words of a seal, sixteen-bit ids four: exchanged words are other routes."""
    for experts in (256, 300):
        tokens, trace = made(4, experts=experts, k=8)
        ids = trace.experts.clone()
        ids[6, 1] = ids[6, 1].roll(4)
        refused(replace(trace, experts=ids), tokens, 1, layer=2, position=6)


def other_expert(ids: Tensor) -> Tensor:
    out = ids.clone()
    out[0] = min(set(range(16)) - set(ids.tolist()))
    return out


@given(seeds, st.integers(0, 3), st.integers(1, 9))
@CASES
def test_rows_of_one_layer_shifted(seed: int, col: int, by: int) -> None:
    tokens, trace = made(seed)
    experts = trace.experts.clone()
    experts[:, col] = experts[:, col].roll(by, 0)
    wrong = (experts[:, col] != trace.experts[:, col]).any(-1).nonzero()[:, 0]
    moved, facts = replace(trace, experts=experts), (len(wrong), "overwritten")
    refused(moved, tokens, *facts, layer=LAYERS[col], position=int(wrong[0]), unrecorded=DRAWN)


@given(seeds, st.integers(0, 6))
@CASES
def test_routes_of_another_sample(seed: int, shared: int) -> None:
    """Of the same prompt: the tokens part at position `shared`. Whole, then its ids under these seals."""
    tokens, trace = made(seed)
    theirs = tokens.clone()
    theirs[shared:] = (theirs[shared:] + 1) % 50
    _, other = made(seed + 1)
    other = replace(other.map_rows(lambda t: t), checksums=None).with_checksums(theirs[:-1])
    refused(other, tokens, "another sample's", layer=ALL, position=shared, unrecorded=DRAWN)
    theirs_here = replace(trace, experts=other.experts)
    refused(theirs_here, tokens, "another sample's, or overwritten", layer=ALL, position=0, unrecorded=DRAWN)


def test_without_seals_nothing_is_verified() -> None:
    with refuses(ValueError, "p7/3"):
        made(5, sealed=False)[1].check_tokens(made(5)[0], sample="p7/3")


# ---- ids that no router can have chosen


def wire(ids: np.ndarray) -> str:
    return base64.b64encode(ids.astype("<i4").tobytes()).decode()


@given(
    seeds,
    st.integers(0, 10),
    st.integers(0, 3),
    st.sampled_from(["high", "minus", "twice", "zero", "zero row", "dense"]),
)
@CASES
def test_impossible_ids_name_sample_layer_and_position(seed: int, row: int, col: int, kind: str) -> None:
    """Out of the wire, in the second of two samples, which goes on from position 4."""
    tokens, trace = made(seed)
    ids = np.zeros((11, 6, 4), np.int64)
    ids[:, LAYERS] = trace.experts.numpy()
    good, layer = wire(ids), LAYERS[col]
    edit: dict[str, Callable[[], tuple[object, object]]] = {
        "high": lambda: ((row, layer, 1), 16),
        "minus": lambda: ((row, layer, 1), -1),
        "twice": lambda: ((row, layer, 1), ids[row, layer, 3]),
        "zero": lambda: ((slice(None), layer), 0),
        "zero row": lambda: ((row, layer), 0),
        "dense": lambda: ((row, 4, 2), 3),
    }
    at, value = edit[kind]()
    ids[at] = value  # type: ignore[index]
    cause = {
        "high": "not all within 0..15",
        "minus": "not all within 0..15",
        "zero": "all 11 rows are zeros",
        "dense": "in a layer without experts",
    }.get(kind, "an expert twice")
    long = torch.cat([torch.zeros(4, dtype=torch.int64), tokens])
    position = 4 + (0 if kind == "zero" else row)
    named = 4 if kind == "dense" else layer
    with refuses(ValueError, "a/1", named, position, cause, unrecorded=DRAWN):
        RoutingTrace.many_from_wire(
            [good, wire(ids)],
            tokens=[long, long],
            num_layers=6,
            layers=LAYERS,
            top_k=4,
            num_experts=16,
            start=4,
            samples=["a/0", "a/1"],
        )


def test_zeros_of_a_top_1_router() -> None:
    """Expert 0 in each row of one layer is a choice; in all layers of many rows it is no engine that captures."""
    ids = torch.zeros(20, 4, 1, dtype=torch.uint8)
    few = RoutingTrace(experts=ids[:2], layers=LAYERS, num_experts=16)
    few.check()
    with refuses(ValueError, "b/1", ALL, 0, 20):
        RoutingTrace(experts=ids, layers=LAYERS, num_experts=16).check(sample="b/1")
    ids[3, 2] = 1
    RoutingTrace(experts=ids, layers=LAYERS, num_experts=16).check()


# ---- weight versions


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 20), st.integers(1, 4))
@CASES
def test_mixed_versions(lengths: list[int], at: int, prompt: int) -> None:
    """Each token's row has the token's version; one row of another, or of an unknown one, is refused where it is."""
    total = sum(lengths)
    ends = np.cumsum(lengths).tolist()
    tokens = [VersionSpan(v, e - n, e) for v, (n, e) in enumerate(zip(lengths, ends, strict=True))]
    rows = [VersionSpan(0, 0, prompt - 1)] if prompt > 1 else []
    rows += [VersionSpan(v, prompt - 1 + a, prompt - 1 + b) for v, a, b in tokens]
    mask = torch.arange(prompt + total) >= prompt
    check_versions(rows, tokens, mask, sample="p7/3")
    bad = prompt - 1 + at % total
    for other in ([VersionSpan(9, bad, bad + 1)], []):
        cut = [VersionSpan(v, max(a, lo), min(b, hi)) for v, a, b in rows for lo, hi in ((0, bad), (bad + 1, 99))]
        mixed = sorted([s for s in cut if s.start < s.end] + other, key=lambda s: s.start)
        cause = "computed under weight version 9" if other else "recomputed under an unknown weight version"
        facts = ("p7/3", bad, cause, "publish.pause_mode")
        with refuses(ValueError, *facts, unrecorded=DRAWN):
            check_versions(mixed, tokens, mask, sample="p7/3")
    if bad >= prompt:
        mask[bad + 1] = False  # the environment's token: nothing was sampled there
        check_versions(mixed, tokens, mask, sample="p7/3")


def test_tokens_without_a_version_are_refused() -> None:
    with refuses(ValueError, "a", 2):
        check_versions(
            [VersionSpan(0, 0, 3)], [VersionSpan(0, 0, 1)], torch.tensor([False, False, True, True]), sample="a"
        )


# ---- parts


@given(seeds, st.integers(1, 10))
@CASES
def test_pieces_add_up(seed: int, cut: int) -> None:
    """Rows appended as they come are the trace in one go, seals of rows and of layers included."""
    tokens, trace = made(seed)
    spans = (VersionSpan(1, 0, 11),)

    def piece(a: int, b: int) -> RoutingTrace:
        own = RoutingTrace(experts=trace.experts[a:b], layers=LAYERS, num_experts=16)
        return replace(own.with_checksums(tokens[a:b], start=a), versions=(VersionSpan(1, 0, b - a),))

    first, rest = piece(0, cut), piece(cut, 11)
    whole = first.append(rest, cut)
    whole.check_tokens(tokens, sample="a/0")
    assert whole.layer_checksums is not None and trace.layer_checksums is not None
    assert torch.equal(whole.layer_checksums, trace.layer_checksums) and whole.versions == spans
    for field in ("versions", "layer_checksums", "checksums"):
        for a, b in ((replace(first, **{field: None}), rest), (first, replace(rest, **{field: None}))):
            with refuses(ValueError, f"1 of 2 traces have {field.replace('_', ' ')}", unrecorded=DRAWN):
                a.append(b, cut)
    for wrong in (cut + 1, cut - 1):
        kind = "missing" if wrong > cut else "duplicated"
        with refuses(ValueError, wrong, kind, f"routed_experts_start_len = {cut}", unrecorded=DRAWN):
            piece(0, cut).append(piece(cut, 11), wrong)


@given(seeds, st.integers(1, 2))
@CASES
def test_seals_of_a_part_are_of_its_rows_and_layers(seed: int, cp_rank: int) -> None:
    """A rank has some rows of a pack and some layers: its seals are those of its tokens, positions and layers, and a
    layer that was wrong before the cut is wrong after it, wherever it went."""
    tokens, trace = made(seed, tokens=9)
    index = zigzag_index(torch.tensor([0, 8]), cp_rank - 1, 2)
    part = select_layers(take_rows(trace, index), (2, 5))
    assert part.checksums is not None
    assert torch.equal(part.checksums, row_checksums(tokens[index], part.experts, (2, 5), positions=index))
    experts = trace.experts.clone()
    experts[:, 0] = experts[:, 0].flip(-1)
    spoilt = select_layers(take_rows(replace(trace, experts=experts), index), (2, 5))
    assert spoilt.checksums is not None and not torch.equal(spoilt.checksums, part.checksums)
    padded = place_rows(part, torch.tensor([0, -1, 2]))
    assert padded.checksums is not None and padded.checksums.tolist() == [
        int(part.checksums[0]),
        0,
        int(part.checksums[2]),
    ]
    assert len(select_layers(trace, ()).layers) == 0


def test_traces_with_and_without_seals_do_not_mix() -> None:
    with refuses(ValueError, 1, 2):
        RoutingTrace.concat([made(1)[1], made(1, sealed=False)[1]])


def test_the_payload_of_deepseek_v3() -> None:
    """58 of 61 layers have experts, 8 of 256 a token: 4.2 times smaller."""
    line = payload_line(num_layers=61, moe_layers=58, top_k=8, num_experts=256)
    assert line == "Routing data: 464 B/token (int32 would need 1952)"
