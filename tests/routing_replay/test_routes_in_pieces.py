"""Routes that are decoded in pieces are those that are decoded at once, wherever a piece ends."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routing_replay import checksums, wire
from routing_replay.trace import RoutingTrace

NUM_LAYERS = 5
Draw = st.DrawFn


@st.composite
def shapes(draw: Draw) -> dict[str, Any]:
    layers = draw(st.lists(st.integers(0, NUM_LAYERS - 1), min_size=1, max_size=NUM_LAYERS, unique=True).map(sorted))
    return {"layers": layers, "top_k": draw(st.integers(2, 4)), "num_experts": draw(st.sampled_from([5, 256, 300]))}


def payload(rng: np.random.Generator, rows: int, layers: list[int], top_k: int, num_experts: int) -> bytes:
    ids = np.zeros((rows, NUM_LAYERS, top_k), "<i4")
    ids[:, layers] = rng.random((rows, len(layers), num_experts)).argsort(-1)[..., :top_k]
    return base64.b64encode(ids.tobytes())


def read(payloads: list[wire.Base64], rows: list[int], shape: dict[str, Any]) -> np.ndarray[Any, Any]:
    names = [f"s{i}" for i in range(len(rows))]
    found = wire.read_wire(payloads, rows, num_layers=NUM_LAYERS, start=0, samples=names, **shape)
    return found.numpy()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_piece_gives_the_same_ids(data: st.DataObject) -> None:
    shape, rng = data.draw(shapes()), np.random.default_rng(data.draw(st.integers(0, 99)))
    rows = data.draw(st.lists(st.integers(0, 17), min_size=1, max_size=5))
    texts = [payload(rng, n, **shape) for n in rows]
    want = [
        np.frombuffer(base64.b64decode(text), "<i4").reshape(-1, NUM_LAYERS, shape["top_k"])[:, shape["layers"]]
        for text in texts
    ]
    kinds = (lambda b: b, lambda b: b.decode(), lambda b: memoryview(b"before" + b)[6:])
    given = [data.draw(st.sampled_from(kinds))(text) for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_PIECE", data.draw(st.integers(1, 600)))
        np.testing.assert_array_equal(read(given, rows, shape), np.concatenate(want))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_wrong_character_or_id_in_any_piece_is_refused_with_its_sample(data: st.DataObject) -> None:
    shape, rng = data.draw(shapes()), np.random.default_rng(data.draw(st.integers(0, 99)))
    rows = data.draw(st.lists(st.integers(1, 17), min_size=1, max_size=4))
    texts = [payload(rng, n, **shape) for n in rows]
    which = data.draw(st.integers(0, len(rows) - 1))
    if data.draw(st.booleans()):
        raw = np.frombuffer(base64.b64decode(texts[which]), "<i4").reshape(rows[which], NUM_LAYERS, -1).copy()
        at = data.draw(st.integers(0, rows[which] - 1)), data.draw(st.integers(0, NUM_LAYERS - 1))
        raw[at] = data.draw(st.sampled_from([-1, shape["num_experts"], 1 << 20, 1]))
        texts[which] = base64.b64encode(raw.tobytes())
    else:
        at_byte = data.draw(st.integers(0, len(texts[which]) - 3))
        spoilt = bytearray(texts[which])
        spoilt[at_byte] = data.draw(st.sampled_from(b"=#\n \xff"))
        texts[which] = bytes(spoilt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_PIECE", data.draw(st.integers(1, 600)))
        with pytest.raises(ValueError, match=f"sample s{which}"):
            read(list(texts), rows, shape)


def constant(index: int, offset: int) -> int:
    """Of the stream of splitmix64 (Steele, Lea, Flood 2014), made odd."""
    z = (index + (offset << 40)) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) | 1


def signed(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_checksums_of_any_pieces_are_those_of_their_formula(data: st.DataObject) -> None:
    shape, rng = data.draw(shapes()), np.random.default_rng(data.draw(st.integers(0, 99)))
    layers, k, start = shape["layers"], shape["top_k"], data.draw(st.integers(0, 3))
    rows = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    tokens = [torch.from_numpy(rng.integers(0, 500, n + start + 1)) for n in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "_WORDS", data.draw(st.integers(1, 60)))
        texts = [payload(rng, n, **shape) for n in rows]
        given = {"num_layers": NUM_LAYERS, "start": start, **shape}
        traces = RoutingTrace.many_from_wire(texts, tokens=tokens, **given)
    for own, trace in zip(tokens, traces, strict=True):
        width = -(-k * trace.experts.element_size() // 4)
        seals, by_layer = [0] * len(trace), [constant(layer, 2) for layer in layers]
        for row, at in enumerate(range(start, start + len(trace))):
            seals[row] = int(own[at]) * constant(0, 5) + at * constant(1, 5)
            for i, layer in enumerate(layers):
                held = trace.experts[row, i].numpy().tobytes().ljust(4 * width, b"\0")
                for w, word in enumerate(np.frombuffer(held, "<i4").tolist()):
                    seals[row] += word * constant(layer * 4096 + w, 1)
                    by_layer[i] += word * constant(at, 3) * constant(w, 4)
        assert trace.checksums is not None and trace.layer_checksums is not None
        assert trace.checksums.tolist() == list(map(signed, seals))
        assert trace.layer_checksums.tolist() == list(map(signed, by_layer))
