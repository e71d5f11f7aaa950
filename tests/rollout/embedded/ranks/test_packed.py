"""Law: what a rank receives of a forward pass is what rank 0 computes with, for every slot that is not masked, and for
a token that is decoded it is some hundred bytes, whatever the length of its sequence in slots.

Not covered: the results of both (test_ranks.py).
"""

from __future__ import annotations

import pickle
import random

import torch

from rollout.embedded.model.batch import ForwardBatch
from rollout.embedded.model.layout import SequenceRows, joined, lay_out, lay_out_decode
from rollout.embedded.ranks.packed import pack, unpack

PAGE = 16


def slots(r: random.Random, positions: int) -> torch.Tensor:
    """Of pages in no order."""
    pages = torch.tensor(r.sample(range(4000), -(-positions // PAGE)))
    return (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()


def batch(r: random.Random, lengths: list[int]) -> tuple[ForwardBatch, list[int]]:
    """Prompts that are fed from some position on, and decoded tokens; the last position of each sequence."""
    fed = []
    for n in (40, 7, 100):
        start = r.choice([0, 5, 32])
        tokens = torch.tensor(r.choices(range(100), k=n))
        fed.append(SequenceRows(tokens=tokens, start=start, slots=slots(r, start + n)))
    table = torch.zeros(len(lengths), 2048, dtype=torch.int64)
    for i, n in enumerate(lengths):
        own = slots(r, n)
        table[i, : len(own)] = own
    size = {"width_bytes": 1 << 20, "token_bytes": 64}
    positions = torch.tensor(lengths).sub(1).numpy()
    tokens = torch.tensor(r.choices(range(100), k=len(lengths)))
    decoded = lay_out_decode(tokens, positions, table, torch.arange(len(lengths)), **size)
    return joined([lay_out(fed, **size), decoded]), [*(s.start + len(s.tokens) for s in fed), *lengths]


def test_what_is_sent_is_what_is_computed() -> None:
    r = random.Random(0)
    for _ in range(20):
        lengths = sorted(r.choices(range(1, 2000), k=9))
        sent, ends = batch(r, lengths)
        got = unpack(pickle.loads(pickle.dumps(pack(sent, PAGE))), PAGE)
        for name in ("tokens", "positions", "slots"):
            assert torch.equal(getattr(got, name), getattr(sent, name)), name
        left = iter(ends)
        assert len(got.chunks) == len(sent.chunks) > 1
        for a, b in zip(sent.chunks, got.chunks, strict=True):
            assert a.rows == b.rows and torch.equal(a.q_start, b.q_start) and a.key_slots.shape == b.key_slots.shape
            assert (a.pad is None) == (b.pad is None)
            if a.pad is not None and b.pad is not None and a.unpad is not None and b.unpad is not None:
                assert torch.equal(a.pad, b.pad) and torch.equal(a.unpad, b.unpad)
            for row, other in zip(a.key_slots, b.key_slots, strict=True):
                end = next(left)
                assert torch.equal(row[:end], other[:end])
        assert next(left, None) is None


def test_a_decoded_token_is_some_hundred_bytes() -> None:
    sizes = []
    for samples in (8, 72):
        r = random.Random(1)
        table = torch.stack([slots(r, 1024) for _ in range(samples)])
        tokens, rows = torch.arange(samples), torch.arange(samples)
        positions = torch.full((samples,), 1023).numpy()
        decoded = lay_out_decode(tokens, positions, table, rows, width_bytes=1 << 30, token_bytes=64)
        sizes.append(len(pickle.dumps(pack(decoded, PAGE))))
    assert (sizes[1] - sizes[0]) / 64 < 300  # of which 256 name the pages of 1,024 positions
