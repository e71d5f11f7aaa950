"""The engine's Triton kernels, interpreted on a CPU in fp32, against the plain operations: sizes that are no powers of
two, strides, sequences of one token and of several splits, slots past a sequence's end, draws at the edges of the
distribution, values that are no numbers; and an engine as a whole. Not covered: BF16's rounding, and a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.embedded.kernels.cache_layout import CacheLayout
from tests.rollout.embedded.device.test_device_discipline import MODELS, SPECS, alike, engine_of
from tests.support.chosen import later
from tests.support.embedded_fixtures import run
from tests.support.interpreted import interpreter
from tests.support.tiny_models import felt_tensors, write_checkpoint

pytestmark = pytest.mark.slow
HERE = "tests/rollout/embedded/kernels/test_interpreted_engine_kernels.py"


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    with interpreter(megatron=False) as called:
        yield called


# ---- attention


def _attention(layout: CacheLayout, heads: int, lengths: list[int], bad: int | None) -> tuple[Tensor, Tensor]:
    """[B, H, V] of the kernel, and of the plain attention over copies. bad: of this sequence the last key is NaN; of
    all, slots that no sequence has are."""
    from rollout.embedded.kernels.decode_attention import attend_in_place
    from rollout.embedded.model import plain_ops

    torch.manual_seed(len(lengths))
    count, longest = sum(lengths), max(lengths)
    cache = torch.randn(count + 5, layout.width)
    cache[count:] = torch.nan
    places = torch.randperm(count)
    slots = torch.full((len(lengths), longest), count)  # past the end: a slot with NaN
    for row, own in zip(slots, places.split(lengths), strict=True):
        row[: len(own)] = own
    if bad is not None:
        cache[slots[bad, lengths[bad] - 1]] = torch.nan
    q = torch.randn(len(lengths), heads, 2 * layout.key)[..., : layout.key]  # strided
    start = torch.tensor(lengths) - 1
    found = attend_in_place(q, cache, slots, start, 0.3, layout)
    past = torch.where(slots[..., None] < count, cache[slots], 0.0)  # the plain one reads masked values
    if layout.latent:
        k, v = past[:, :, None], past[:, :, None, : layout.value]
    else:
        k, v = past.view(*past.shape[:2], 2 * layout.heads, layout.key).chunk(2, 2)
    return found, plain_ops.attention(q[:, None].contiguous(), k, v, 0.3, start)[:, 0]


LAYOUTS = {
    "grouped": (CacheLayout.of_heads(2, 24), 6),
    "a head a key": (CacheLayout.of_heads(3, 16), 3),
    "many queries a key": (CacheLayout.of_heads(1, 8), 20),
    "latent": (CacheLayout.of_latent(40, 12), 5),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_in_place_is_that_over_copies(interpreted: Callable[..., Any], name: str) -> None:
    found, want = interpreted(_attention, *LAYOUTS[name], [33, 1, 32, 600], None)
    torch.testing.assert_close(found, want, atol=2e-5, rtol=2e-5)


def test_a_key_that_is_no_number_stays_in_its_sequence(interpreted: Callable[..., Any]) -> None:
    found, want = interpreted(_attention, *LAYOUTS["grouped"], [5, 40, 9], 1)
    assert found.isnan().flatten(1).any(1).tolist() == [False, True, False]
    torch.testing.assert_close(found, want, atol=2e-5, rtol=2e-5, equal_nan=True)


# ---- draws


def _drawn(logits: Tensor, divisors: Tensor, u: Tensor, block: int) -> tuple[Tensor, Tensor]:
    from rollout.embedded.kernels import drawing

    with patch.object(drawing, "BLOCK", block):
        return drawing.draw_tokens(logits, divisors, u)


def _wanted(logits: Tensor, divisors: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """By the definition, in fp64: the first token whose cumulated probability exceeds u."""
    x = logits.double() / divisors.double()[:, None]
    cumulated = x.softmax(-1).cumsum(-1)
    drawn = torch.searchsorted(cumulated, u[:, None] * cumulated[:, -1:], right=True)[:, 0]
    tokens = torch.where(u < 0, x.argmax(-1), drawn)
    return tokens, x.log_softmax(-1).gather(1, tokens[:, None])[:, 0].float()


@pytest.mark.parametrize(("vocab", "block"), [(1, 4096), (37, 4096), (37, 16), (300, 64)])
def test_each_token_is_drawn_in_its_part_of_the_distribution(
    interpreted: Callable[..., Any], vocab: int, block: int
) -> None:
    """A row for each of some tokens, with u in the middle of its part; the likeliest; and both ends."""
    g = torch.Generator().manual_seed(vocab)
    row, t = torch.randn(vocab, generator=g), 0.7
    row[1::7] = -torch.inf  # never drawn
    p = (row.double() / t).softmax(-1)
    middles = (p.cumsum(-1) - p / 2)[p > 0][:: 1 + vocab // 32]
    u = torch.cat([middles, torch.tensor([-1.0, 0.0, 1 - 2.0**-53], dtype=torch.float64)])
    logits, divisors = row.expand(len(u), -1), torch.full((len(u),), t)
    tokens, logprobs = interpreted(_drawn, logits, divisors, u, block)
    want, of_want = _wanted(logits, divisors, u)
    assert tokens.tolist() == want.tolist() and len(set(tokens[:-3].tolist())) == len(middles)
    torch.testing.assert_close(logprobs, of_want, atol=1e-5, rtol=1e-5)


def test_equal_logits_and_rows_without_numbers(interpreted: Callable[..., Any]) -> None:
    """The first of equal tokens is the likeliest; a row with NaN has a token of the vocabulary and no log-probability,
    and leaves the others alone."""
    logits = torch.zeros(4, 50)
    logits[1, [20, 40]] = 5.0
    logits[2, 33] = torch.nan
    u = torch.tensor([-1.0, -1.0, 0.5, 0.5], dtype=torch.float64)
    tokens, logprobs = interpreted(_drawn, logits, torch.ones(4), u, 16)
    assert tokens[[0, 1, 3]].tolist() == [0, 20, 25] and 0 <= int(tokens[2]) < 50
    assert logprobs.isnan().tolist() == [False, False, True, False]


# ---- an engine


def _answers(path: Path, fused: bool) -> Any:
    from rollout.embedded.engine import sampler
    from rollout.embedded.kernels import decode_attention, drawing
    from rollout.embedded.model import attention

    with (
        patch.object(attention, "by_triton", lambda t: fused),
        patch.object(sampler, "by_triton", lambda t: fused),
        patch.object(decode_attention, "attend_in_place", wraps=decode_attention.attend_in_place) as attended,
        patch.object(drawing, "draw_tokens", wraps=drawing.draw_tokens) as drawn,
    ):
        found = run(engine_of(path, "cpu"), *SPECS)
    assert (attended.called, drawn.called) == (fused, fused)
    return found


@pytest.mark.parametrize("model", later(MODELS, ["deepseek"], beside=HERE))
def test_an_engine_answers_as_by_plain_operations(interpreted: Callable[..., Any], model: str, tmp_path: Path) -> None:
    """Tokens, routes and log-probs, with shared prefixes and all kinds of draws."""
    path = write_checkpoint(tmp_path, MODELS[model], felt_tensors(MODELS[model]))
    fused, plain = (interpreted(_answers, path, by) for by in (True, False))
    alike(fused, plain)
    assert len({tuple(np.asarray(c.reply.output_ids)) for group in plain for c in group}) > 3
