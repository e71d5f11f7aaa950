"""The engine's kernels and the gather of a bucket on a CUDA device: attention over the cache in place against FP32's
over copies, draws against the distribution in FP64, bytes of a bucket. Prints the seconds of each and of the plain way.

Not covered: an engine as a whole (test_embedded_cuda.py), servers that open a bucket (test_handles_cuda.py).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from miles_like.types import NamedTensor
from quant.kernels.choice import VARIABLE
from rollout.embedded.device.transfers import Transfers
from rollout.embedded.engine.sampler import Draw, sample, stream_keys
from rollout.embedded.kernels.cache_layout import CacheLayout
from rollout.embedded.kernels.decode_attention import attend_in_place
from rollout.embedded.model import plain_ops
from rollout.publish import buffers
from rollout.wire.flat import aligned_layout, flat_bytes
from tests.gpu.test_kernels_cuda import _report, _seconds

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
CUDA = torch.device("cuda")
LAYOUTS = {
    "32 heads on 4 of 128": (CacheLayout.of_heads(4, 128), 32),
    "16 heads on 8 of 128": (CacheLayout.of_heads(8, 128), 16),
    "128 heads on a latent": (CacheLayout.of_latent(512, 64), 128),
}


def _over_copies(q: Tensor, cache: Tensor, slots: Tensor, start: Tensor, scale: float, layout: CacheLayout) -> Tensor:
    past = cache.index_select(0, slots.view(-1)).view(*slots.shape, -1)
    if layout.latent:
        k, v = past[:, :, None], past[:, :, None, : layout.value]
    else:
        k, v = past.view(*slots.shape, 2 * layout.heads, layout.key).chunk(2, 2)
    return plain_ops.attention(q[:, None], k, v, scale, start)[:, 0]


@pytest.mark.parametrize("count", [3, 64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_in_place(name: str, count: int) -> None:
    """Sequences of 1 to 4,096 tokens, so few that their keys are divided among programs, and many."""
    layout, heads = LAYOUTS[name]
    width, scale = layout.width, layout.key**-0.5
    torch.manual_seed(0)
    lengths = torch.randint(1, 4097, (count,))
    lengths[0] = 4096
    tokens = int(lengths.sum())
    cache = torch.randn(tokens, width, device=CUDA).bfloat16()
    slots = torch.zeros(count, 4096, dtype=torch.int64)
    for row, own in zip(slots, torch.randperm(tokens).split(lengths.tolist()), strict=True):
        row[: len(own)] = own
    slots, start = slots.to(CUDA), (lengths - 1).to(CUDA)
    q = torch.randn(count, heads, layout.key, device=CUDA).bfloat16()
    fused = partial(attend_in_place, q, cache, slots, start, scale, layout)
    plain = partial(_over_copies, q, cache, slots, start, scale, layout)
    found = fused()
    want = _over_copies(q[:8].float(), cache.float(), slots[:8], start[:8], scale, layout)
    torch.testing.assert_close(found[:8].float(), want, atol=1e-2, rtol=2e-2)
    assert torch.equal(found, fused()), "a batch repeats its bits"
    _report(f"{name}, {count} sequences", _seconds(fused), _seconds(plain), 2.0 * tokens * width)


def test_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each row the token that FP64's distribution has at its random number, or a neighbour by rounding."""
    rows, vocab = 512, 151_936
    logits = (3 * torch.randn(rows, vocab, device=CUDA)).bfloat16()
    draw = Draw(
        keys=stream_keys(1, np.arange(rows)),
        positions=np.arange(rows),
        temperature=np.where(np.arange(rows) % 4, 0.8, 0.0).astype(np.float32),
        top_p=np.ones(rows, np.float32),
        top_k=np.full(rows, -1),
        min_p=np.zeros(rows, np.float32),
    )
    moves = Transfers(CUDA)
    tokens, logprobs = sample(logits, draw, plain_ops, moves)
    fused = _seconds(lambda: sample(logits, draw, plain_ops, moves))
    monkeypatch.setenv(VARIABLE, "0")
    want, of_want = sample(logits, draw, plain_ops, moves)
    plain = _seconds(lambda: sample(logits, draw, plain_ops, moves))
    same = tokens == want
    assert same.float().mean() > 0.99
    torch.testing.assert_close(logprobs[same], of_want[same], atol=1e-4, rtol=1e-4)
    _report(f"{rows} draws of {vocab} tokens", fused, plain, 2.0 * rows * vocab)


def test_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator(CUDA).manual_seed(0)
    parts = [torch.randint(0, 256, (n,), generator=g, device=CUDA, dtype=torch.uint8) for n in (14_680_064, 3_584) * 36]
    named = [NamedTensor(str(i), t.view(torch.float32) if i % 2 else t) for i, t in enumerate(parts)]
    layout = aligned_layout(named)
    buffer = buffers.Buffer(flat_bytes(layout), CUDA)

    def put() -> Tensor:
        return buffers.put(buffer, layout, named).tensor

    found, fused = put().clone(), _seconds(put)
    monkeypatch.setenv(VARIABLE, "0")
    buffer.memory.zero_()
    assert torch.equal(found, put())
    _report("gather of a bucket", fused, _seconds(put), 2.0 * flat_bytes(layout))
