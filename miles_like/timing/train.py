"""Seconds of the trainer's passes over one rollout: the pipeline, gradients, optimizer.

Letters: m micro-batches of a rank, p pipeline stages, v virtual stages of a rank. A schedule of p stages takes
m + (p - 1) / v times the slowest stage's forward and backward of a micro-batch: the bubble is (p - 1) / (v m) of the
rest (Narayanan et al., arXiv:2104.04473, sections 2.2.1 and 2.2.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megatron_bridge.config import ParallelConfig
from miles_like.timing.layers import BF16, LayerSetup, LayerTime, layer_time
from miles_like.timing.phase import NOTHING, Phase, together
from miles_like.timing.rates.calibration import HOST, HOST_MEMORY
from miles_like.timing.rates.links import Group, all_gather, group_of, reduce_scatter, send
from miles_like.timing.rates.roofline import moved, product
from miles_like.timing.shape import ModelShape
from miles_like.timing.workload import Packs, Workload, packs_of

MASTER = 4  # bytes of a master weight, and of each of AdamW's two moments
UPDATE = 30  # bytes that AdamW reads and writes a parameter: gradient, master and moments, and the BF16 weight


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSetup:
    """How the trainer computes a rollout."""

    layer: LayerSetup
    pack_tokens: int
    """Tokens of a whole micro-batch, over its context-parallel ranks."""
    overlap_grads: bool = False
    overlap_params: bool = False
    gradient_bytes: int = 4
    offload: float = 0.0
    """Share of the optimizer's state and step on the host."""
    passes: float = 0.0
    """Forward passes over the samples before they are trained: log-probabilities of an old or a reference policy."""
    swaps: float = 0.0
    """How many of these passes are under other weights, which the host keeps and which replace the trained ones."""
    pass_tokens: int | None = None
    """Tokens of a micro-batch of such a pass; None: `pack_tokens`."""
    rounded: bool = False
    """Forward passes compute with rounded weights, which are made after each optimizer step."""
    fully_sharded: bool = False
    """Data-parallel ranks gather each layer's weights in each pass and scatter its gradients (ZeRO-3), instead of
    once an optimizer step."""
    loss_share: float = 1.0
    """Share of the tokens that have loss: only their logits are computed."""
    trained: float = 1.0
    """Share of the parameters that have gradients."""
    head_columns: int | None = None
    """Logits are computed and reduced in blocks of so many entries of the vocabulary, by separate kernels in FP32;
    None: in one piece."""
    head_sum_bytes: int = 2
    """Of an element of the gradient of the hidden states, to which each block adds."""

    @property
    def parallel(self) -> ParallelConfig:
        return self.layer.parallel


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers of one pipeline stage, those of multi-token prediction included, and the parameters that a rank of it
    holds."""

    dense: int
    moe: int
    others: float
    """Elements outside of routed experts."""
    experts: float


@dataclass(slots=True)
class Memo:
    """Intermediate results that layouts of one model on one device type share, for a search over many of them."""

    layers: dict[tuple[object, ...], LayerTime] = field(default_factory=dict)
    packs: dict[tuple[object, ...], Packs] = field(default_factory=dict)
    stages: dict[tuple[object, ...], tuple[Stage, ...]] = field(default_factory=dict)


def _stages(shape: ModelShape, layer: LayerSetup, memo: Memo) -> tuple[Stage, ...]:
    p = layer.parallel
    key = (p.tp, p.pp, p.vpp, p.ep, p.etp, p.first_stage_layers, p.last_stage_layers, layer.mtp)
    if key not in memo.stages:
        memo.stages[key] = stages_of(shape, p, layer.mtp)
    return memo.stages[key]


def stages_of(shape: ModelShape, p: ParallelConfig, mtp: int = 0) -> tuple[Stage, ...]:
    """The stages as megatron-core divides them: first and last as given, the others equally; with virtual stages,
    chunk c of stage s holds the (c p + s)-th share of the layers. `mtp` layers more on the last one are of the last
    layer's kind; they need the embedding there too."""
    out = []
    for s, layers in enumerate(stage_layers(shape.layers, p)):
        drafts = mtp if s == p.pp - 1 else 0
        layers += [shape.layers - 1] * drafts
        moe = sum(1 for i in layers if i in shape.moe_layers)
        others = len(layers) * ((shape.attention - shape.latent) / p.tp + shape.latent)
        others += (len(layers) - moe) * shape.dense / p.tp + moe * (shape.shared / p.tp + shape.router)
        ends = int(s == 0) + int(s == p.pp - 1 and not (shape.tied and p.pp == 1))
        ends += int(drafts > 0 and p.pp > 1)
        others += (ends * shape.vocab + 2 * drafts * shape.hidden) * shape.hidden / p.tp
        out.append(Stage(len(layers) - moe, moe, others, moe * shape.experts * shape.expert / (p.ep * p.etp)))
    return tuple(out)


def stage_layers(layers: int, p: ParallelConfig) -> list[list[int]]:
    """Numbers of the layers of each stage, without draft layers."""
    counts = list(_layer_counts(layers, p))
    per_stage: list[list[int]] = [[] for _ in range(p.pp)]
    first = 0
    for _ in range(p.vpp):
        for stage, count in enumerate(counts):
            per_stage[stage] += range(first, first + count // p.vpp)
            first += count // p.vpp
    return per_stage


def _layer_counts(layers: int, p: ParallelConfig) -> Iterator[int]:
    ends = [n for n in (p.first_stage_layers, p.last_stage_layers) if n is not None]
    between = max(1, p.pp - len(ends))
    for stage in range(p.pp):
        if stage == 0 and p.first_stage_layers is not None:
            yield p.first_stage_layers
        elif stage == p.pp - 1 and p.last_stage_layers is not None:
            yield p.last_stage_layers
        else:
            yield (layers - sum(ends)) // between


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one micro-batch on the slowest stage, by term."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]


def stage_time(
    shape: ModelShape, setup: TrainSetup, tokens: float, squares: float, memo: Memo | None = None
) -> StageTime:
    """tokens, squares: of a micro-batch."""
    memo = memo or Memo()
    slowest, longest = StageTime({}, {}), -1.0
    stages = _stages(shape, setup.layer, memo)
    for number, stage in enumerate(stages):
        forward: dict[str, float] = {}
        backward: dict[str, float] = {}
        for count, moe in ((stage.dense, False), (stage.moe, True)):
            if count:
                layer = _layer(shape, setup.layer, tokens, squares, moe, memo)
                _add(forward, layer.forward, count)
                _add(backward, layer.backward, count)
        if number == len(stages) - 1:
            mtp, inputs = setup.layer.mtp, _inputs_of_draft(shape, setup.layer, tokens)
            head, head_backward = _head(shape, setup, tokens)
            _add(forward, {"head": (1 + mtp) * head, "products": mtp * inputs}, 1)
            again = float(setup.layer.recompute == "full")
            _add(backward, {"head": (1 + mtp) * head_backward, "products": (2 + again) * mtp * inputs}, 1)
        seconds = sum(forward.values()) + sum(backward.values())
        if seconds > longest:
            slowest, longest = StageTime(forward, backward), seconds
    return slowest


def _layer(shape: ModelShape, setup: LayerSetup, tokens: float, squares: float, moe: bool, memo: Memo) -> LayerTime:
    p = setup.parallel
    sizes, chosen = (p.tp, p.cp, p.ep, p.etp), (setup.recompute, setup.again, setup.dispatcher)
    key = (moe, tokens, squares, sizes, chosen, setup.separate, setup.attention_rate)
    if key not in memo.layers:
        memo.layers[key] = layer_time(shape, setup, tokens, squares, moe=moe)
    return memo.layers[key]


def _packs(load: Workload, capacity: int, p: ParallelConfig, memo: Memo) -> Packs:
    key = (capacity, p.dp, p.micro_multiple)
    if key not in memo.packs:
        memo.packs[key] = packs_of(load, capacity, p.dp, multiple=p.micro_multiple)
    return memo.packs[key]


def _add(total: dict[str, float], terms: Mapping[str, float], factor: float) -> None:
    for name, value in terms.items():
        total[name] = total.get(name, 0.0) + factor * value


def _inputs_of_draft(shape: ModelShape, layer: LayerSetup, tokens: float) -> float:
    """A depth's projection of hidden states beside embeddings to hidden states."""
    p, elements = layer.parallel, 2 * shape.hidden * shape.hidden / layer.parallel.tp
    return product(2 * tokens / p.cp * elements, BF16 * elements, layer.device)


# Bytes an element of logits that are reduced block by block in FP32: (forward) the product's result, its cast, the
# temperature, maximum, difference, exponential, its sum, its product with the logits, their sum; (backward) again the
# first three, difference, exponential, product with the gradient, temperature, and for each of two products a cast and
# its operand.
BLOCKS = (2 + 6 + 8 + 4 + 8 + 8 + 4 + 12 + 4, 2 + 6 + 8 + 8 + 8 + 8 + 8 + 2 * (6 + 2))


def _head(shape: ModelShape, setup: TrainSetup, tokens: float) -> tuple[float, float]:
    """Logits of the rows with loss, and their log-softmax in FP32: forward, and backward with the logits again, block
    by block."""
    p, device = setup.parallel, setup.layer.device
    rows, columns = setup.loss_share * tokens / p.cp, shape.vocab / p.tp
    logits = product(2 * rows * shape.hidden * columns, BF16 * shape.hidden * columns, device)
    if setup.head_columns is None:
        head = logits + moved(rows * columns * (BF16 + 3 * MASTER), device)
        return head, 3 * head
    # each block adds its product to the gradient of the hidden states
    sums = (BF16 + 2 * setup.head_sum_bytes) * shape.hidden / min(setup.head_columns, columns)
    forward, backward = (moved(rows * columns * x, device) for x in (BLOCKS[0], BLOCKS[1] + sums))
    return logits + forward, 3 * logits + backward


def train_time(shape: ModelShape, setup: TrainSetup, load: Workload, memo: Memo | None = None) -> Phase:
    """Seconds of all optimizer steps of one rollout, by term. memo: of other layouts of this model, device and load."""
    memo = memo or Memo()
    p = setup.parallel
    packs = _packs(load, setup.pack_tokens, p, memo)
    micro = stage_time(shape, setup, packs.tokens, packs.squares, memo)
    both = dict(micro.forward)
    _add(both, micro.backward, 1)
    terms = {name: packs.count * value for name, value in both.items()}
    terms |= _pipeline(shape, p, setup, packs, sum(both.values()))
    if setup.fully_sharded:
        terms["parameters and gradients"] = packs.count * _fully_sharded(shape, setup, sum(both.values()), memo)
    else:
        terms["parameters and gradients"] = _data_parallel(shape, setup, micro, memo)
    terms |= _optimizer(shape, setup, memo)
    return Phase({k: v for k, v in terms.items() if v > 0}).times(load.steps_per_rollout)


def _pipeline(shape: ModelShape, p: ParallelConfig, setup: TrainSetup, packs: Packs, micro: float) -> dict[str, float]:
    """Bubble, and what the sends between stages add: they overlap with an interleaved schedule only."""
    if p.pp == 1:
        return {}
    near = group_of(p.pp, p.tp * p.cp * p.dp, setup.layer.device).domains == 1
    nbytes = BF16 * packs.tokens / (p.tp * p.cp) * shape.hidden
    sends = 2 * send(nbytes, setup.layer.device, near=near)
    rounds = packs.count if p.vpp == 1 else 0
    return {"bubble": (p.pp - 1) / p.vpp * micro, "pipeline sends": (rounds + p.pp - 1) * sends}


def _data_groups(p: ParallelConfig, setup: TrainSetup) -> tuple[Group, Group]:
    """Ranks that share the parameters outside of experts, and those that share experts."""
    device = setup.layer.device
    ranks = p.tp * p.cp * p.dp
    return group_of(p.cp * p.dp, p.tp, device), group_of(max(1, ranks // (p.ep * p.etp)), p.ep * p.etp, device)


def _data_parallel(shape: ModelShape, setup: TrainSetup, micro: StageTime, memo: Memo) -> float:
    """Gradients are scattered and updated weights gathered once an optimizer step. With overlap, what takes longer than
    the last micro-batch's backward, and than the first one's forward, remains."""
    device = setup.layer.device
    dense, expert = _data_groups(setup.parallel, setup)
    scatter = gather = 0.0
    for stage in _stages(shape, setup.layer, memo):
        parts = ((stage.others, dense), (stage.experts, expert))
        scatter = max(
            scatter, sum(reduce_scatter(setup.gradient_bytes * setup.trained * n, g, device) for n, g in parts)
        )
        gather = max(gather, sum(all_gather(BF16 * setup.trained * n, g, device) for n, g in parts))
    if setup.overlap_grads:
        scatter = max(0.0, scatter - sum(micro.backward.values()))
    if setup.overlap_params:
        gather = max(0.0, gather - sum(micro.forward.values()))
    return scatter + gather


def _fully_sharded(shape: ModelShape, setup: TrainSetup, micro: float, memo: Memo) -> float:
    """Two gathers of all weights and one scatter of all gradients in a micro-batch, during its computation: what takes
    longer than it. Before it a rank rounds its share of the weights, after it it copies each whole weight out of the
    gathered buffer; gradients are copied into FP32 and their share is added up (FSDP2, torch/distributed/fsdp/
    _fully_shard/_fsdp_collectives.py)."""
    device = setup.layer.device
    dense, expert = _data_groups(setup.parallel, setup)
    seconds = copied = 0.0
    for stage in _stages(shape, setup.layer, memo):
        for n, group in ((stage.others, dense), (stage.experts, expert)):
            seconds += 2 * all_gather(BF16 * n, group, device)
            seconds += reduce_scatter(setup.gradient_bytes * setup.trained * n, group, device)
            copied += 2 * n * (2 * BF16 + (MASTER + BF16) / group.size)
            copied += setup.trained * n * (BF16 + setup.gradient_bytes + 3 * MASTER / group.size)
    return max(0.0, seconds - micro) + moved(copied, device)


def parameters_of_rank(shape: ModelShape, setup: TrainSetup, memo: Memo | None = None) -> tuple[float, float]:
    """Elements that a rank of the largest stage holds, and those whose optimizer state it holds."""
    memo = memo or Memo()
    dense, expert = _data_groups(setup.parallel, setup)
    held = owned = 0.0
    for stage in _stages(shape, setup.layer, memo):
        held = max(held, stage.others + stage.experts)
        owned = max(owned, setup.trained * (stage.others / dense.size + stage.experts / expert.size))
    return held, owned


def _optimizer(shape: ModelShape, setup: TrainSetup, memo: Memo) -> dict[str, float]:
    """AdamW on the device, and on the host, where gradients and weights cross the host's link during the update."""
    device = setup.layer.device
    held, owned = parameters_of_rank(shape, setup, memo)
    terms = {"optimizer": moved((1 - setup.offload) * owned * UPDATE, device)}
    if setup.offload:
        copies = setup.offload * owned * (setup.gradient_bytes + BF16) / (HOST * device.host)
        update = setup.offload * owned * UPDATE / (HOST_MEMORY / device.node_gpus)
        terms["optimizer on the host"] = max(copies, update)
    if setup.rounded:
        terms["rounding of weights"] = moved(held * 3 * BF16, device)
    return terms


def passes_time(shape: ModelShape, setup: TrainSetup, load: Workload, memo: Memo | None = None) -> Phase:
    """Seconds of the forward passes before training, including the copies of weights that are swapped in."""
    if not setup.passes:
        return NOTHING
    p, device = setup.parallel, setup.layer.device
    memo = memo or Memo()
    packs = _packs(load, setup.pass_tokens or setup.pack_tokens, p, memo)
    micro = stage_time(shape, setup, packs.tokens, packs.squares, memo)
    rounds = packs.count * load.steps_per_rollout
    terms = {name: rounds * value for name, value in micro.forward.items()}
    if p.pp > 1:
        terms["bubble"] = (p.pp - 1) / p.vpp * sum(micro.forward.values())
    held, _ = parameters_of_rank(shape, setup, memo)
    # the trained weights go to the host, the others come, the trained ones come back
    swap = Phase({"swapped weights": 3 * BF16 * held / (HOST * device.host)}).times(setup.swaps)
    return together([Phase(terms).times(setup.passes), swap])


def sleep_time(shape: ModelShape, setup: TrainSetup, *, rate: float | None = None, memo: Memo | None = None) -> Phase:
    """A trainer's sleep and wake: weights, masters and moments that are on the device go to the host and come back;
    gradients are dropped. rate: bytes/s of these copies, if not the host link's."""
    held, owned = parameters_of_rank(shape, setup, memo)
    nbytes = BF16 * held + 3 * MASTER * owned * (1 - setup.offload)
    return Phase({"sleep and wake of the trainer": 2 * nbytes / (rate or HOST * setup.layer.device.host)})
