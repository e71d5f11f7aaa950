"""The exact operations: what they compute, against torch's own, and that a row's bits depend on that row alone.

Letters: T rows.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quant.exact import attention, logprobs, products, routing, rows, selftest
from tests.support.refusals import refuses

ROWS = 37
DTYPES = (torch.bfloat16, torch.float32)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2 if dtype is torch.bfloat16 else 1e-5, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "parts"), [(64, 1), (64, 4), (600, 1), (1200, 3)])
def test_a_product_is_torchs_row_by_row(columns: int, parts: int, dtype: torch.dtype) -> None:
    x, w = _random(ROWS, columns).to(dtype), (_random(48, columns, seed=1) * columns**-0.5).to(dtype)
    whole = products.linear(x, w, parts)
    assert whole.dtype is dtype
    _near(whole, F.linear(x.float(), w.float()), dtype)
    for first, end in ((0, 1), (3, 5), (8, ROWS)):
        assert torch.equal(products.linear(x[first:end], w, parts), whole[first:end])
    assert torch.equal(products.linear(x, w[:16], parts), whole[:, :16])


def test_parts_are_what_ranks_compute() -> None:
    """Two ranks' shares, added by rank and rounded once; fp32 weights of bf16 values are the same weights."""
    x, w = _random(ROWS, 64).bfloat16(), _random(32, 64, seed=1).bfloat16()
    shares = [products.partial(a, b) for a, b in zip(x.chunk(2, -1), w.chunk(2, -1), strict=True)]
    assert torch.equal(products.in_rank_order(shares).bfloat16(), products.linear(x, w, 2))
    assert torch.equal(products.linear(x, w.float()), products.linear(x, w))
    with refuses(ValueError, 64, 3):
        products.linear(x, w, 3)


def test_experts_multiply_their_own_rows() -> None:
    x, w = _random(9, 16), _random(4, 8, 16, seed=1)
    got = products.grouped_linear(x, w, [2, 0, 6, 1])
    want = [products.linear(x[i : i + 1], w[e]) for i, e in enumerate([0, 0, 2, 2, 2, 2, 2, 2, 3])]
    assert torch.equal(got, torch.cat(want))
    assert products.grouped_linear(x[:0], w, [0, 0, 0, 0]).shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_torchs(dtype: torch.dtype) -> None:
    y, w = _random(ROWS, 34).to(dtype), _random(ROWS, 1, seed=1)
    gate, up = y.float().chunk(2, -1)
    _near(rows.swiglu(y), F.silu(gate) * up, dtype)
    # from exp alone, bit for bit: torch's own silu has other bits, here and there
    assert torch.equal(rows.swiglu(y), (gate / (1 + torch.exp(-gate))).to(dtype) * y.chunk(2, -1)[1])
    _near(rows.swiglu(y, w), F.silu(gate) * up * w, dtype)
    whole, sigmoids = rows.swiglu(y, w), rows.sigmoid(y.float())
    for end in range(1, ROWS):  # torch's own has another tail, wherever that comes to lie
        assert torch.equal(rows.swiglu(y[:end], w[:end]), whole[:end])
        assert torch.equal(rows.swiglu(y[:end]), rows.swiglu(y)[:end])
        assert torch.equal(rows.sigmoid(y[:end].float()), sigmoids[:end])
    _near(rows.sigmoid(y.float()), torch.sigmoid(y.float()), torch.float32)
    token = torch.tensor([1, 0, 1, 2])
    _near(rows.combine(y[:4], token, 4), torch.zeros(4, 34).index_add(0, token, y[:4].float()), dtype)
    large = torch.tensor([[-200.0, 3.0], [200.0, 3.0]])
    assert rows.swiglu(large).tolist() == [[-0.0], [600.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_torchs_query_by_query(dtype: torch.dtype) -> None:
    """Grouped heads, lengths beyond a block, and values of another width than keys."""
    q, k, v = (_random(2, 70, h, d, seed=i).to(dtype) for i, (h, d) in enumerate(((4, 24), (2, 24), (2, 40))))
    whole = attention.attention(q, k, v, 0.2)
    wide = [x.float().transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))]
    _near(whole, F.scaled_dot_product_attention(*wide, is_causal=True, scale=0.2).transpose(1, 2), dtype)
    for first, end in ((0, 1), (5, 6), (31, 33), (69, 70), (2, 70)):
        start = torch.full((2,), first)
        some = attention.attention(q[:, first:end], k[:, :end], v[:, :end], 0.2, start)
        assert torch.equal(some, whole[:, first:end])
        longer = attention.attention(q[:1, first:end], k[:1], v[:1], 0.2, start[:1])
        assert torch.equal(longer, whole[:1, first:end]), "keys that are not seen"


def test_attention_divides_once_after_its_sums() -> None:
    """Where all scores are equal and values are whole numbers every sum is exact in fp32, so that the quotient alone is
    rounded: shares of each block, normalised before they are added, would be rounded before."""
    v = torch.randint(-50, 50, (1, 70, 2, 24), generator=torch.Generator().manual_seed(0)).float()
    got = attention.attention(torch.zeros(1, 70, 4, 8), torch.zeros(1, 70, 2, 8), v, 0.2)
    means = v.cumsum(1) / torch.arange(1, 71).view(1, 70, 1, 1)
    assert torch.equal(got, means.repeat_interleave(2, 2))


def test_equal_scores_are_ordered_by_id() -> None:
    assert routing.choose(torch.zeros(2, 8), 3).tolist() == [[0, 1, 2]] * 2
    by = torch.tensor([[0.1, 0.9, 0.9, 0.2, 0.3, 0.3, 0.1, 0.8]])
    assert routing.choose(by, 3).tolist() == [[1, 2, 7]]
    # groups (0, 1), (2, 3), (4, 5), (6, 7) are worth 1.0, 1.1, 0.6, 0.9
    assert routing.choose(by, 3, groups=4, group_topk=2).tolist() == [[1, 2, 3]]


def test_gates_are_of_the_choice_in_any_order() -> None:
    logits = _random(ROWS, 16)
    for score, want in (("sigmoid", logits.sigmoid()), ("softmax", logits.softmax(-1))):
        scores = routing.scores(logits, score)  # type: ignore[arg-type]
        _near(scores, want, torch.float32)
        ids = routing.choose(scores, 4)
        picked = want.gather(1, ids)
        gates = routing.gates(scores, ids, scale=2.5)
        _near(gates, 2.5 * picked / picked.sum(-1, keepdim=True), torch.float32)
        assert torch.equal(routing.gates(scores, ids.flip(-1), scale=2.5), gates.flip(-1))
        _near(routing.gates(scores, ids, renormalize=False), picked, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocabulary", "parts"), [(96, 1), (9000, 1), (9000, 2), (96, 4)])
def test_log_probabilities_are_torchs_row_by_row(vocabulary: int, parts: int, dtype: torch.dtype) -> None:
    logits = (5 * _random(ROWS, vocabulary)).to(dtype)
    labels = torch.arange(ROWS) * (vocabulary // ROWS)
    whole = logprobs.logprob(logits, labels, parts)
    _near(whole, torch.log_softmax(logits.float(), -1).gather(1, labels[:, None])[:, 0], torch.float32)
    assert torch.equal(logprobs.logprob(logits[4:5], labels[4:5], parts), whole[4:5])


def test_any_number_of_threads_has_one_fingerprint() -> None:
    """More than there are processors too: no sum may depend on how rows or columns are shared out."""
    before = torch.get_num_threads()
    try:
        found = set()
        for threads in (1, 2, 3, 4, 8):
            torch.set_num_threads(threads)
            found.add(selftest.fingerprint())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_the_fingerprint_sees_other_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on one machine, another where one operation gives other bits, and none where rows depend on company."""
    own = selftest.fingerprint()
    assert own == selftest.fingerprint()
    with monkeypatch.context() as m:
        swiglu = rows.swiglu
        m.setattr(rows, "swiglu", lambda y, w: swiglu(y, w * 1.001))
        assert selftest.fingerprint() != own
    with monkeypatch.context() as m:
        m.setattr(rows, "swiglu", lambda y, w: swiglu(y, w) * (1 + 1e-3 * (len(y) == 1)))
        with refuses(ValueError, "alignment.deterministic", "torch.float32"):
            selftest.fingerprint()
