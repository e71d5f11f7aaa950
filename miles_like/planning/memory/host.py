"""Host memory of a node: what its processes hold beside their GPUs.

Copies of a sleeping trainer are kept while it trains (megatron_bridge/step/asleep.py). Gradients of an offloaded
optimizer are allocated by megatron: PyTorch rounds each of its pinned blocks up to a power of two
(ATen/core/CachingHostAllocator.h).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_bridge.config import TrainerConfig
from miles_like.planning.memory.parts import GIB
from miles_like.planning.memory.state import RankState, data_ranks
from miles_like.planning.memory.weights import StageWeights

PROCESS = 4 * GIB  # assumption: Python, torch, CUDA's host part, communication buffers of one GPU process
DRIVER = 8 * GIB  # assumption: the run's driver and Ray's services on its node
_TEXT = 4 / 3  # base64
_CHECKPOINT_BYTES = 14  # of an asynchronous save's copy: BF16 parameters, FP32 masters and moments
_PER_TOKEN = 64  # bytes of a token of a sample without its routes: ids, masks, log-probabilities


def pinned(nbytes: int) -> int:
    """Bytes that a pinned block of `nbytes` takes."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 1 else nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of one step, which the driver holds."""

    count: int
    tokens: int  # of the longest
    layers: int  # with experts, whose routes come with each token; 0: no routes
    top_k: int
    experts: int

    @property
    def nbytes(self) -> int:
        route = self.layers * self.top_k * (1 if self.experts <= 256 else 2)
        return self.count * self.tokens * (route + _PER_TOKEN)


def rank_host(
    weights: StageWeights,
    state: RankState,
    config: TrainerConfig,
    *,
    sleeps: bool,
    copies: int,
    saves_aside: bool,
    published: int = 0,
) -> Counter[str]:
    """Bytes by part on the host of one trainer, critic or reference rank. copies: further sets of weights (a reference,
    teachers); saves_aside: a checkpoint is written from a copy while training continues; published: bytes of this
    rank's share of the encoded weights, which it keeps for differences to them."""
    out = Counter({"processes": PROCESS})
    each = list(_shards(weights, config))
    on_host, on_device = state.host.moments, state.device.get("moments", 0)
    share = on_host / max(on_host + on_device, 1)
    if state.host.total:
        out["offloaded optimizer"] = state.host.masters + state.host.moments + int(share * _pinned(each, 4))
    if sleeps:
        kept = on_device + state.device.get("masters", 0)
        fixed = sum(2 * h.count * h.elements for h in weights.held if not h.trained)
        out["sleeping copies"] = sum(state.buffers) + kept + fixed
    if copies:
        out["copies of weights"] = copies * sum(2 * h.count * h.elements for h in weights.held)
    if published:
        out["published weights"] = published
    if saves_aside:
        out["checkpoint copy"] = 2 * weights.elements() + (_CHECKPOINT_BYTES - 2) * sum(n * e for n, e in each)
    return out


def _shards(weights: StageWeights, config: TrainerConfig) -> Iterable[tuple[int, int]]:
    """(number, elements) of the parameters' shards that this rank's optimizer updates."""
    for held in weights.held:
        if held.trained:
            ranks = data_ranks(config.parallel, held.kind) if config.distributed_optimizer else 1
            # a buffer is cut into equal runs: of many parameters a rank has some whole, of few a part of each
            if held.count >= ranks:
                yield math.ceil(held.count / ranks), held.elements
            else:
                yield held.count, math.ceil(held.elements / ranks)


def _pinned(shards: Iterable[tuple[int, int]], width: int) -> int:
    return sum(n * pinned(width * elements) for n, elements in shards)


def engine_host(gpus: int, tokens: int, layers: int, top_k: int) -> Counter[str]:
    """Bytes by part on the host of a node's server processes. tokens: that the cache of one GPU holds; the server keeps
    an int32 on the host for each route of a cached token (state_capturer/routed_experts.py)."""
    return Counter({"processes": gpus * PROCESS, "routes of servers": gpus * tokens * layers * top_k * 4})


def driver_host(samples: Samples, *, held: int, bucket: int, copies: int, hashes: bool) -> Counter[str]:
    """Bytes by part on the host of the node with the driver and the rank that sends weights. held: bytes of tensors
    that are encoded before a pause; bucket: in a request, of whose base64 text `copies` exist at the same time. hashes:
    the tensors are in memory too, to be hashed."""
    sends = _TEXT * (held + bucket * (1 + copies)) + (held + 2 * bucket if hashes else 0)
    # once in the driver, once in Ray's object store on the way to the ranks
    return Counter({"processes": DRIVER, "samples": 2 * samples.nbytes, "publication": int(sends)})


def summed(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    out = Counter[str]()
    for one in several:
        out.update(one)
    return dict(out)
