"""Law: the checksums of a server of several ranks are those of the whole tensors, however many of its ranks lie within
one block of a quantized weight; and bytes that two ranks hold differently are an error that names the tensor.

Why it must hold: a publication is judged by these checksums, and only they see a copy (a norm, a router's weight, a row
of scales) that is wrong on one rank alone. Ranks are threads here; processes are compared in test_ranks.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.hf.checkpoint import HFCheckpoint
from quant.formats.codec import QuantTensor
from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.embedded.families.registry import architecture_of
from rollout.embedded.model.slices import Slices
from rollout.embedded.model.weights import WeightStore
from rollout.embedded.ranks.checksums import merged, rank_checksums
from tests.support.exactly import MODELS
from tests.support.refusals import refuses
from tests.support.tiny_models import CONFIGS, random_tensors, write_checkpoint

RANKS = 8
HF = MODELS["mla"] | {"num_attention_heads": RANKS, "num_key_value_heads": RANKS, "v_head_dim": 16}
PLACES = {  # rows of a block, ranks, groups of experts
    "four ranks in a block": (32, 8, 1),
    "two ranks in a block": (16, 8, 1),
    "experts in groups of two": (32, 8, 4),
    "a block on each rank": (8, 8, 1),
    "biases": (None, 2, 1),
}


class Lines:
    """What ranks send each other, in order for each pair."""

    def __init__(self, rank: int, lines: dict[tuple[int, int], Queue[Tensor]]) -> None:
        self.rank, self._lines = rank, lines

    def send(self, x: Tensor, to: int) -> None:
        self._lines[self.rank, to].put(x.clone())

    def receive(self, x: Tensor, source: int) -> Tensor:
        got = self._lines[source, self.rank].get(timeout=30)
        assert got.shape == x.shape and got.dtype == x.dtype
        return got


def together(stores: list[WeightStore]) -> dict[str, str]:
    n = len(stores)
    lines: dict[tuple[int, int], Queue[Tensor]] = {(a, b): Queue() for a in range(n) for b in range(n)}
    with ThreadPoolExecutor(n) as pool:

        def own(rank: int) -> dict[str, str]:
            exchange: Any = Lines(rank, lines)
            return rank_checksums(stores[rank], exchange)

        return merged(list(pool.map(own, range(n))))


def stores_of(where: Path, place: str) -> tuple[WeightStore, list[WeightStore]]:
    """The store of one rank, and those of several."""
    block, tp, ep = PLACES[place]
    hf = HF if block is not None else CONFIGS["biases_tied"]
    tensors = random_tensors(hf)
    if block is None:
        path = write_checkpoint(where, hf, tensors)
    else:
        spec = QuantSpec.of(QuantFormat.FP8, block=(block, 16))
        stored = dict(quantize_stream(tensors.items(), spec))
        path = write_checkpoint(where, quantized_config(hf, spec, list(tensors)), stored)
    checkpoint, arch = HFCheckpoint(path), architecture_of(hf)
    slices = Slices(arch=arch, tp=tp, ep=ep)
    slices.check()
    return WeightStore.load(checkpoint, arch), [WeightStore.load(checkpoint, arch, slices.of(r)) for r in range(tp)]


@pytest.mark.parametrize("place", PLACES)
def test_they_are_those_of_one_rank(place: str, tmp_path: Path) -> None:
    one, several = stores_of(tmp_path, place)
    assert together(several) == one.checksums()


def test_a_copy_that_is_wrong_on_one_rank_is_named(tmp_path: Path) -> None:
    _, several = stores_of(tmp_path, "four ranks in a block")
    for rank, name in (
        (2, "model.layers.1.input_layernorm.weight"),
        (RANKS - 1, "model.layers.1.mlp.gate.weight"),
        (2, "model.layers.1.self_attn.o_proj.weight_scale_inv"),
    ):
        weight, _, leaf = name.rpartition(".")
        held = several[rank][f"{weight}.weight"]
        part = held.stored[leaf] if isinstance(held, QuantTensor) else held
        byte = part.view(torch.uint8).view(-1)[:1]
        byte ^= 1
        with refuses(ValueError, name):
            together(several)
        byte ^= 1
    together(several)
