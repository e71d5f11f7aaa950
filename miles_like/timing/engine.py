"""Seconds of one decode step of one rollout server, and of its prefills.

Letters: B running requests of a server, c tokens of context that each has, H hidden size, E experts, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles_like.device_table import Device
from miles_like.timing.rates.calibration import ENGINE_REQUEST, ENGINE_STEP, IMBALANCE, ONE_SHOT
from miles_like.timing.rates.links import Group, all_reduce, group_of, link, ring_rate, send
from miles_like.timing.rates.roofline import attention, moved, product
from miles_like.timing.shape import ModelShape

Terms = dict[str, float]
BF16 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Speculative decoding with the model's draft layer, applied `tokens` times a step. acceptance: probability that a
    draft is accepted if all before it were."""

    tokens: int
    acceptance: float

    @property
    def tokens_per_step(self) -> float:
        """Accepted drafts and the token that the model samples itself (Leviathan et al., arXiv:2211.17192, equation
        1)."""
        if self.acceptance >= 1:
            return self.tokens + 1.0
        return (1 - self.acceptance ** (self.tokens + 1)) / (1 - self.acceptance)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The rollout's servers. ep: ranks over which whole experts are distributed; 1: each expert is sliced over `tp`.
    dp: data-parallel replicas of attention within a server."""

    device: Device
    servers: int
    tp: int
    ep: int = 1
    dp: int = 1
    deepep: bool = False
    replicated_dense: bool = False
    """Every rank holds the dense layers' MLP whole."""
    weight_bytes: float = BF16
    """Of an element of a linear outside of routed experts, with its scales."""
    expert_bytes: float = BF16
    cache_bytes: float = BF16
    fp8: bool = False
    """Products are in FP8."""
    cache_tokens: float = float("inf")
    """Tokens that a server's cache holds."""
    max_running: int = 1024
    drafts: Drafts | None = None

    @property
    def attention_tp(self) -> int:
        return self.tp // self.dp

    @property
    def gpus(self) -> int:
        return self.servers * self.tp


def cache_tokens(shape: ModelShape, engine: EngineSetup, nbytes: float) -> float:
    """Tokens that a server's cache holds in `nbytes` of each of its devices."""
    shards = min(engine.attention_tp, shape.kv_heads)
    a_token = shape.layers * shape.cached * engine.cache_bytes / shards
    return max(0.0, nbytes) / a_token * engine.dp


def decode_step(shape: ModelShape, engine: EngineSetup, running: float, context: float) -> Terms:
    """Seconds of one step of a server, by term; it samples a token of every running request, with drafts
    `tokens_per_step` of them. running: B; context: c, on average."""
    rows = running * (1 + engine.drafts.tokens if engine.drafts else 1)
    terms = _layers(shape, engine, rows, shape.layers, shape.sparse)
    terms["KV cache"] = _cache(shape, engine, running, rows, context)
    terms["head"] = _linear(shape.hidden * shape.vocab / engine.tp, rows, engine, BF16)
    terms["communication"] = _communication(shape, engine, rows, shape.layers)
    if engine.drafts is not None:
        terms["drafts"] = engine.drafts.tokens * _draft(shape, engine, running)
    terms["engine's host"] = ENGINE_STEP + ENGINE_REQUEST * running / engine.dp
    return terms


def touched(shape: ModelShape, rows: float) -> float:
    """Experts of a layer that at least one of `rows` tokens chooses, each choosing K of E at random:
    E (1 - (1 - K / E)^rows)."""
    return shape.experts * (1 - (1 - shape.top_k / shape.experts) ** rows) if shape.experts else 0.0


def _layers(shape: ModelShape, engine: EngineSetup, rows: float, layers: int, sparse: int) -> Terms:
    """Products of all layers, each at least as long as its weights take to read."""
    own = rows / engine.dp
    weights = (shape.attention - shape.latent) / engine.attention_tp + shape.latent
    dense = shape.dense / (1 if engine.replicated_dense else engine.tp)
    shared = shape.shared / (1 if engine.deepep else engine.tp)
    attending = _linear(weights, own, engine, engine.weight_bytes)
    mlp = _linear(dense, own if engine.replicated_dense else rows, engine, engine.weight_bytes)
    terms = {"weights": layers * attending + (layers - sparse) * mlp}
    if sparse:
        more = _linear(shared, own if engine.deepep else rows, engine, engine.weight_bytes)
        terms["weights"] += sparse * (more + _linear(shape.router, own, engine, BF16))
        terms["experts"] = sparse * _routed(shape, engine, rows)
    return terms


def _linear(elements: float, rows: float, engine: EngineSetup, nbytes: float) -> float:
    return product(2 * elements * rows, nbytes * elements, engine.device, fp8=engine.fp8)


def _routed(shape: ModelShape, engine: EngineSetup, rows: float) -> float:
    """Each rank computes a tp-th of the chosen experts' elements, either way; with ep the busiest one is waited for."""
    uneven = IMBALANCE if engine.ep > 1 else 1.0
    elements = touched(shape, rows) * shape.expert / engine.tp
    flops = 2 * rows * shape.top_k * shape.expert / engine.tp
    return product(uneven * flops, uneven * engine.expert_bytes * elements, engine.device, fp8=engine.fp8)


def _cache(shape: ModelShape, engine: EngineSetup, running: float, rows: float, context: float) -> float:
    """Keys and values of the requests of a rank are read once a layer; attention computes with every row."""
    shards = min(engine.attention_tp, shape.kv_heads)
    own = running / engine.dp
    nbytes = own * context * shape.cached * engine.cache_bytes / shards
    flops = rows / engine.dp * context * shape.decode_core / engine.attention_tp
    return shape.layers * max(moved(nbytes, engine.device), attention(flops, engine.device))


def _communication(shape: ModelShape, engine: EngineSetup, rows: float, layers: int) -> float:
    """After attention and after the MLP: an all-reduce of the layer's outputs; with attention replicas a gather of
    their tokens and a scatter instead; with DeepEP a dispatch and a combination."""
    device, own = engine.device, rows / engine.dp
    whole = group_of(engine.tp, 1, device)
    attending = group_of(engine.attention_tp, 1, device)
    seconds = _reduce(BF16 * own * shape.hidden, attending, device)
    if engine.deepep:
        seconds += _low_latency(shape, engine, own)
    else:
        seconds += _reduce(BF16 * rows * shape.hidden, whole, device)
    return layers * seconds


def _reduce(nbytes: float, group: Group, device: Device) -> float:
    if group.size == 1:
        return 0.0
    if group.domains > 1:
        return all_reduce(nbytes, group, device)
    return ONE_SHOT + 2 * nbytes * (group.size - 1) / group.size / ring_rate(group, device)


def _low_latency(shape: ModelShape, engine: EngineSetup, rows: float) -> float:
    """DeepEP's low-latency kernels: every token goes to each of its experts over the network, FP8 out and BF16 back."""
    group = group_of(engine.ep, 1, engine.device)
    remote = (group.size - group.local) / group.size
    if not remote:
        return 2 * ONE_SHOT + rows * shape.top_k * shape.hidden * 3 / link(engine.device, near=True)
    one_way = rows * shape.top_k * shape.hidden * remote
    return send(one_way, engine.device, near=False) + send(BF16 * one_way, engine.device, near=False)


def _draft(shape: ModelShape, engine: EngineSetup, running: float) -> float:
    """One application of the draft layer: a layer of the last one's kind, its projection of 2 H to H, and the head."""
    terms = _layers(shape, engine, running, 1, int(shape.is_moe))
    terms["head"] = _linear(shape.hidden * shape.vocab / engine.tp, running, engine, BF16)
    terms["projection"] = _linear(2 * shape.hidden * shape.hidden / engine.tp, running, engine, engine.weight_bytes)
    terms["communication"] = _communication(shape, engine, running, 1)
    return sum(terms.values())


def prefill(shape: ModelShape, engine: EngineSetup, tokens: float, squares: float) -> Terms:
    """Seconds in which one server computes `tokens` of prompts; squares: the sum of their squared lengths."""
    device = engine.device
    own, per_rank = tokens / engine.dp, tokens / engine.tp
    active = shape.active - shape.hidden * shape.vocab  # only a prompt's last row goes through the head
    products = product(2 * active * per_rank, 0.0, device, fp8=engine.fp8)
    core = attention(squares * shape.core * shape.layers / engine.tp, device)
    whole = group_of(engine.tp, 1, device)
    moves = BF16 * own * shape.hidden
    reduced = 0.0 if engine.tp == 1 else 2 * shape.layers * 2 * moves * engine.dp / ring_rate(whole, device)
    return {"prefill": products + core + reduced}
