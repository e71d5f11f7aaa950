"""Seconds of one pass of one layer on one rank of the trainer.

Letters: t tokens of a micro-batch, of which a tensor- and context-parallel rank keeps r = t / (tp cp) between attention
and experts; H hidden size; K experts per token; 2 bytes an activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_bridge.config import ParallelConfig
from miles_like.device_table import Device
from miles_like.timing.rates.calibration import (
    HOST_ADAPTERS,
    HOST_DENSE_LAYER,
    HOST_MOE_LAYER,
    HOST_SEPARATE_LAYER,
    IMBALANCE,
)
from miles_like.timing.rates.links import all_gather, all_to_all, group_of, send
from miles_like.timing.rates.roofline import attention, moved, padded, product
from miles_like.timing.separate import Separate, layer_bytes
from miles_like.timing.shape import ModelShape

Recompute = Literal["none", "selective", "full"]
Dispatcher = Literal["alltoall", "allgather", "flex"]
Terms = dict[str, float]

BF16 = 2
# A backward pass of attention has five products of queries by keys where the forward has two (FlashAttention-2,
# arXiv:2307.08691, section 3.1): its scores are computed again.
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSetup:
    """Settings that determine a layer's time, in addition to the model's shape and the number of tokens."""

    device: Device
    parallel: ParallelConfig
    recompute: Recompute = "none"
    again: frozenset[str] = frozenset()
    """Modules that "selective" recomputes, under megatron's names."""
    fp8: bool = False
    dispatcher: Dispatcher = "alltoall"
    adapters: bool = False
    """Only adapters have gradients: the products for weights' gradients are not executed."""
    imbalance: float = IMBALANCE
    mtp: int = 0
    """Depths of multi-token prediction that are trained: layers after the last one."""
    separate: Separate | None = None
    """Operations between products run as separate kernels, adapters beside each matrix included; None: fused."""
    attention_rate: float = 1.0
    """Rate of the attention kernel relative to that of `ATTENTION`."""

    def __post_init__(self) -> None:
        p = self.parallel
        if self.separate and (p.tp * p.ep * p.etp > 1 or self.recompute == "selective"):
            raise ValueError("separate kernels with ranks that divide a layer, or with selective recomputation")


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of a layer: forward, and backward with what it recomputes."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]


def layer_time(shape: ModelShape, setup: LayerSetup, tokens: float, squares: float, *, moe: bool) -> LayerTime:
    """tokens, squares: of a micro-batch over all ranks that share it, and the sum of its samples' squared lengths."""
    modules = _attention_block(shape, setup, tokens, squares)
    modules |= _experts(shape, setup, tokens) if moe else _dense(shape, setup, tokens)
    host = _host(setup, moe=moe)
    forward = _sum(modules.values())
    again = _again(modules, setup)
    backward = _scaled(modules, setup.adapters)
    if setup.separate:
        nbytes = layer_bytes(shape, setup.separate, moe=moe, adapters=setup.adapters)
        nbytes = nbytes.times(tokens / setup.parallel.cp)
        for terms, count in ((forward, nbytes.forward), (again, nbytes.forward), (backward, nbytes.backward)):
            terms |= {"activations": moved(count, setup.device)} if terms else {}
    passes = [(forward, host), (backward, host)]
    if again:
        passes.append((again, host if setup.recompute == "full" else 0.0))
    waited = [_with_host(terms, seconds) for terms, seconds in passes]
    return LayerTime(waited[0], _sum(waited[1:]))


def _host(setup: LayerSetup, *, moe: bool) -> float:
    """Seconds of the host in a pass of a layer."""
    if not setup.separate:
        return HOST_MOE_LAYER if moe else HOST_DENSE_LAYER
    return (HOST_MOE_LAYER if moe else HOST_SEPARATE_LAYER) + setup.adapters * HOST_ADAPTERS


def _attention_block(shape: ModelShape, setup: LayerSetup, tokens: float, squares: float) -> dict[str, Terms]:
    """Projections with their collectives, and core attention."""
    p, device = setup.parallel, setup.device
    mine = tokens / p.cp
    up = shape.up / p.tp
    weights = (shape.attention - shape.latent) / p.tp + shape.latent - up
    # latents are computed for a rank's own tokens only, by whole matrices
    flops = 2 * mine * (shape.attention / p.tp - up)
    width = shape.core / p.tp + 4 * shape.hidden / p.tp  # norms and residuals are sharded by tokens
    core = attention(squares * shape.core / (p.tp * p.cp), device) / setup.attention_rate
    return {
        "projections": {
            "products": product(flops, BF16 * weights, device, fp8=setup.fp8),
            "activations": moved(BF16 * mine * 4 * width, device),
            "tensor-parallel collectives": _sequence_collectives(shape, setup, mine),
        },
        "mla_up_proj": {"products": product(2 * mine * up, BF16 * up, device, fp8=setup.fp8)},
        "core_attn": {"attention": core, "context-parallel exchange": _ring(shape, setup, mine, core)},
    }


def _sequence_collectives(shape: ModelShape, setup: LayerSetup, tokens: float) -> float:
    """An all-gather before a column-parallel linear and a reduce-scatter after the row-parallel one (Korthikanti et
    al., arXiv:2205.05198, section 4.2.2)."""
    group = group_of(setup.parallel.tp, 1, setup.device)
    return 2 * all_gather(BF16 * tokens * shape.hidden, group, setup.device)


def _ring(shape: ModelShape, setup: LayerSetup, tokens: float, core: float) -> float:
    """Context-parallel ranks pass keys and values around a ring, during attention: what exceeds it."""
    p = setup.parallel
    if p.cp == 1:
        return 0.0
    near = group_of(p.cp, p.tp, setup.device).domains == 1
    nbytes = BF16 * tokens * shape.kv_channels / min(p.tp, shape.heads)
    return max(0.0, (p.cp - 1) * send(nbytes, setup.device, near=near) - core)


def _dense(shape: ModelShape, setup: LayerSetup, tokens: float) -> dict[str, Terms]:
    p, device = setup.parallel, setup.device
    mine = tokens / p.cp
    return {
        "mlp": {
            "products": product(2 * mine * shape.dense / p.tp, BF16 * shape.dense / p.tp, device, fp8=setup.fp8),
            "activations": moved(BF16 * mine * 4 * shape.dense / (3 * shape.hidden) / p.tp, device),
            "tensor-parallel collectives": _sequence_collectives(shape, setup, mine),
        }
    }


def _experts(shape: ModelShape, setup: LayerSetup, tokens: float) -> dict[str, Terms]:
    """Router, dispatch, routed and shared experts, combination. The rank with the most tokens is waited for."""
    p, device = setup.parallel, setup.device
    kept = tokens / (p.tp * p.cp)
    experts = shape.experts / p.ep
    # The ep * etp ranks of a group bring kept tokens each; etp ranks compute the same ones, each a slice of an expert.
    rows = kept * shape.top_k * p.etp * (setup.imbalance if p.ep > 1 else 1.0)
    flops = 2 * padded(rows, experts) * shape.expert / p.etp + 2 * kept * shape.router
    weights = BF16 * experts * shape.expert / p.etp
    # permuted and combined inputs and outputs, gate and up, and their product
    channels = 6 * shape.hidden + 4 * shape.expert_ffn / p.etp
    moe = {
        "products": product(flops, weights, device, fp8=setup.fp8),
        "activations": moved(BF16 * rows * channels, device),
        "all-to-all": 2 * setup.imbalance * dispatch(shape, setup, kept),
    }
    if p.etp > 1 and setup.dispatcher == "alltoall":
        group = group_of(p.etp, 1, device)
        moe["expert-tensor-parallel collectives"] = 2 * all_gather(BF16 * rows * shape.hidden, group, device)
    return {"moe": moe} | ({"shared_experts": _shared(shape, setup, tokens)} if shape.shared else {})


def _shared(shape: ModelShape, setup: LayerSetup, tokens: float) -> Terms:
    p = setup.parallel
    mine, elements = tokens / p.cp, shape.shared / p.tp
    return {
        "products": product(2 * mine * elements, BF16 * elements, setup.device, fp8=setup.fp8),
        "tensor-parallel collectives": _sequence_collectives(shape, setup, mine),
    }


def dispatch(shape: ModelShape, setup: LayerSetup, tokens: float) -> float:
    """Seconds to send the tokens that a rank keeps to their experts, or back.

    "alltoall" sends a token once for each of its experts, to one of an expert's tensor-parallel ranks. "flex" (DeepEP)
    sends it once to each domain, where it is forwarded over NVLink to each rank of its experts. "allgather" gives every
    rank all tokens.
    """
    p, device = setup.parallel, setup.device
    row = BF16 * shape.hidden
    if setup.dispatcher == "alltoall":
        return all_to_all(tokens * row * shape.top_k, group_of(p.ep, p.etp, device), device) if p.ep > 1 else 0.0
    if p.ep * p.etp == 1:
        return 0.0
    group = group_of(p.ep * p.etp, 1, device)
    if setup.dispatcher == "allgather":
        return all_gather(tokens * row * p.ep * p.etp, group, device)
    domains = group.domains
    reached = domains * (1 - (1 - 1 / domains) ** shape.top_k)  # domains with an expert of a token, on average
    ranks = p.etp * p.ep * (1 - (1 - 1 / p.ep) ** shape.top_k)
    far = tokens * row * reached * (domains - 1) / domains
    near = tokens * row * ranks
    return _overlapped(far, near, group.local, device)


def _overlapped(far: float, near: float, local: int, device: Device) -> float:
    over_network = send(far, device, near=False) if far else 0.0
    within = send(near * (local - 1) / local, device, near=True) if local > 1 else 0.0
    return max(over_network, within)


def _again(modules: Mapping[str, Terms], setup: LayerSetup) -> Terms:
    """What backward computes again."""
    if setup.recompute == "none":
        return {}
    if setup.recompute == "full":
        return _sum(modules.values())
    again = setup.again | ({"shared_experts"} if "moe" in setup.again else set())
    return _sum([terms for name, terms in modules.items() if name in again])


_BACKWARD = {  # seconds of a backward in units of the forward
    "products": 2.0,  # the gradients of inputs and of weights
    "attention": ATTENTION_BACKWARD,
    "activations": 2.0,
    "tensor-parallel collectives": 1.5,  # also the input again, for the weights' gradient
    "context-parallel exchange": 2.0,  # keys and values, and their gradients
    "all-to-all": 1.0,
    "expert-tensor-parallel collectives": 1.0,
}


def _scaled(modules: Mapping[str, Terms], adapters: bool) -> Terms:
    total = _sum(modules.values())
    factors = _BACKWARD | ({"products": 1.0} if adapters else {})
    return {name: value * factors[name] for name, value in total.items()}


def _with_host(terms: Terms, host: float) -> Terms:
    """The device waits for the host's launches where these take longer."""
    excess = host - sum(terms.values())
    return terms | {"host": excess} if excess > 0 else terms


def _sum(many: Iterable[Mapping[str, float]]) -> Terms:
    total: Terms = {}
    for terms in many:
        for name, value in terms.items():
            if value:
                total[name] = total.get(name, 0.0) + value
    return total
