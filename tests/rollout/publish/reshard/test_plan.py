"""Law: what the plan has trainer ranks send and server ranks receive are, bit for bit, the encoder's slices, and the
hashes of both sides agree; for every format, division of the trainer and layout of the server, over all families.

Without processes: messages are handed over in memory. Over gloo and HTTP: test_resharded_weights.py.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.embedded.families.registry import architecture_of
from rollout.embedded.model.slices import Slices
from rollout.embedded.model.weights import WeightStore
from rollout.embedded.ranks.slice_plans import layout_of, rank_plans
from rollout.embedded.updates.slices import SliceReceiver
from rollout.publish.reshard.plan import Encoding, make_plan
from rollout.publish.reshard.publisher import body_of
from rollout.publish.reshard.source import Source, largest, of_bundles
from tests.support.published import FAMILIES
from tests.support.resharded import HandShards
from tests.support.tiny_models import random_tensors

FORMATS: dict[str, QuantSpec | None] = {
    "bf16": None,
    "fp8": QuantSpec.of(QuantFormat.FP8, block=(8, 8)),
    "fp8, blocks that no half ends at": QuantSpec.of(QuantFormat.FP8, block=(24, 24)),
    "int4": QuantSpec.of(QuantFormat.INT4, "all"),
    "mxfp8": QuantSpec.of(QuantFormat.MXFP8),
    "mxfp4": QuantSpec.of(QuantFormat.MXFP4),
    "nvfp4": QuantSpec.of(QuantFormat.NVFP4),
}
SERVERS = {"one": (1, 1), "tp2": (2, 1), "ep2": (2, 2)}


class _Group:
    """Hands over messages; one for each server rank."""

    def __init__(self) -> None:
        self.waiting: defaultdict[int, deque[Tensor]] = defaultdict(deque)

    def recv(self, buffers: list[Tensor], source: int, tag: int) -> Any:
        message = self.waiting[source].popleft()
        assert message.nbytes == buffers[0].nbytes
        buffers[0].copy_(message)
        return SimpleNamespace(wait=lambda: None)


CASES = [  # the families take turns
    (list(FAMILIES)[i % len(FAMILIES)], *case)
    for i, case in enumerate(itertools.product(FORMATS, ("tp", "ep", "stages"), SERVERS))
]


@pytest.mark.parametrize(("family", "format", "division", "server"), CASES)
def test_ranks_are_sent_the_encoders_slices(family: str, format: str, division: str, server: str) -> None:
    spec, (tp, ep) = FORMATS[format], SERVERS[server]
    arch = architecture_of(FAMILIES[family], eos_ids=())
    if ep > 1 and arch.moe is None:
        ep = 1
    if format == "fp8, blocks that no half ends at":
        tp = ep = 1  # a server's slices begin at blocks
    ranks = [Slices(arch=arch, rank=rank, tp=tp, ep=ep) for rank in range(tp)]
    store = WeightStore(arch, spec, ranks[0])
    tensors = random_tensors(FAMILIES[family], 1)
    shards = [HandShards(tensors, division, rank, 2) for rank in range(2)]
    encoding, layout = Encoding(spec), layout_of(store, ranks, 1 << 30)
    plan = make_plan([s.regions for s in shards], shards[0].names, [layout], encoding, 8_000)
    amax = of_bundles([largest(s, encoding) for s in shards], encoding)  # type: ignore[arg-type]
    groups, hashes = [_Group() for _ in ranks], []
    for number, (own, part) in enumerate(zip(shards, plan.sources, strict=True)):
        names = {name for piece in part.gathered for name in piece}
        source = Source(own, encoding, part, own.gathered(names), amax)  # type: ignore[arg-type]
        for piece in range(plan.pieces):
            for member, message in source.prepare(piece).messages:
                groups[member - 2].waiting[number].append(message)
        hashes.append(source.hashes)
    encoded = dict(quantize_stream(tensors.items(), spec))
    for rank, planned in enumerate(rank_plans(store, body_of(plan, 0), ranks, 1 << 30)):
        receiver = SliceReceiver()
        receiver.plan(planned)
        receiver._group, receiver._name, held, received = groups[rank], "g", {}, 0  # type: ignore[assignment]
        for piece in range(plan.pieces):
            received += receiver.receive("g", piece)
            held |= receiver.take()
        for name, dtype, shape in store.whole_stored():
            whole = encoded[name]
            assert whole.dtype is (dtype or whole.dtype) and tuple(whole.shape) == shape
            rows = store.rows_of(name, whole, [ranks[rank]])[0]
            want = None if rows is None else whole[rows.start : rows.stop] if whole.dim() else whole
            assert (want is None) == (name not in held), name
            if want is not None:
                assert held[name].dtype is want.dtype and _bytes(held[name]).equal(_bytes(want)), name
        assert received == sum(t.nbytes for t in held.values())
        assert not any(queue for queue in groups[rank].waiting.values())
        sent = {str(i): own[str(2 + rank)] for i, own in enumerate(hashes) if str(2 + rank) in own}
        assert receiver.hashes(held.__getitem__) == sent


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)
