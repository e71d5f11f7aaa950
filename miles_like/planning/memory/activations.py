"""The most that a rank's training passes need beside its state: activations by recomputation and schedule, the head.

A rank of pipeline stage p of P holds the activations of at most P - p micro-batches at a time (1F1B, arXiv:2104.04473,
section 2.2), with virtual stages of more chunks: `get_pp_rank_microbatches` of megatron-core 0.16.1. The peak is in a
backward: everything that is kept, and what the layer at work needs beyond that.

Letters as in `layer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_bridge.config import ParallelConfig
from megatron_bridge.plan.resolve import Resolved
from miles_like.planning.memory.layer import LayerCost, LayerOps, Op, Pack, layer_cost
from miles_like.planning.memory.parts import MIB
from miles_like.planning.memory.weights import ModelWeights, StageWeights
from quant.spec import QuantFormat

_FP32 = 4
_INT64 = 8
_TABLES = 32
ROUNDING_ELEMENTS = 1 << 26  # weights that fake_quant.py rounds in one call, on a GPU in one tile of codec.py
CPU_TILE = 1 << 18  # CPU_ELEMENTS of tiles.py, of one thread
_COPIES = 4  # bytes for each: two BF16 copies
_TEMPORARIES = 12  # bytes for each of a tile: codes, levels and products in FP32
_IN_PLACE = 4  # the same of INT4: all three are one


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The micro-batches of one optimizer step of a rank."""

    tokens: int  # of a micro-batch, before context parallelism
    micro_batches: int
    longest: int  # tokens of a sample


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPeak:
    """Bytes of one rank beyond its state, at the moment of their largest sum."""

    activations: int
    logits: int  # of the head: hidden states of all rows, blocks of logits, gradients
    communication: int  # buffers that stay from the first step on
    left: int  # of activations, after the step; a rank drops it when it sleeps
    tables: int  # of rotary angles, from the first step on; counted among the activations


def chunks_in_flight(layout: ParallelConfig, stage: int, micro_batches: int) -> int:
    """Forward passes of a chunk (of the whole stage without virtual stages) whose backward has not begun, at most."""
    warmup = layout.pp - stage - 1
    if layout.vpp > 1:
        warmup = 2 * warmup + (layout.vpp - 1) * layout.pp
    return min(warmup + 1, micro_batches * layout.vpp)


class TrainingPasses:
    """The passes of the ranks of one configuration."""

    def __init__(
        self, weights: ModelWeights, resolved: Resolved, step: StepShape, *, gpus: bool, imbalance: float = 1.0
    ) -> None:
        self.weights, self.config, self.step = weights, weights.config, step
        self.pack = Pack.of(self.config, step.tokens, token_multiple=resolved.token_multiple, imbalance=imbalance)
        self.ops = LayerOps(weights, self.pack, local=resolved.spec == "local", cpu=not gpus)
        modules = resolved.transformer.get("recompute_modules") or ()
        mode = self.config.recompute
        self.costs: Mapping[bool, LayerCost] = {
            moe: layer_cost(self.ops.layer(moe), mode, modules, self.ops.hidden) for moe in self._kinds()
        }

    def _kinds(self) -> set[bool]:
        layers: int = self.weights.dims["layers"]
        return {layer in self.weights.moe_layers for layer in range(layers)}

    def peak(self, stage: StageWeights) -> TrainingPeak:
        """The largest need of the stage's ranks in a training step."""
        if not self.config.trains:
            return self._forward_only(stage)
        layout, hidden = self.config.parallel, self.ops.hidden
        first, last = stage.stage == 0, stage.stage == layout.pp - 1
        costs = [self.costs[layer in self.weights.moe_layers] for chunk in stage.layers for layer in chunk]
        per_chunk = len(costs) // layout.vpp
        of_chunks = [costs[v * per_chunk : (v + 1) * per_chunk] for v in range(layout.vpp)]
        whole = max(sum(c.keeps for c in chunk) for chunk in of_chunks) + (0 if last else hidden)
        flying = chunks_in_flight(layout, stage.stage, self.step.micro_batches)
        held = (flying - 1) * whole + self._inputs(stage) + self._angles(stage)
        # the gradient that comes in and the one that goes out, and the activations of the next micro-batch
        passed = 3 * hidden if layout.pp > 1 else hidden
        moments = [(held + passed + n, 0) for n in self._backward(of_chunks[-1])]
        if last:
            kept = sum(c.keeps for c in of_chunks[-1])
            moments += self._head_moments(held + kept)
        if first:
            moments.append((held + passed + self._embedding(), 0))
        moments.append((self._rounding(stage), 0))
        activations, logits = max(moments, key=sum)
        return TrainingPeak(
            activations=activations,
            logits=logits,
            communication=self._buffers(),
            left=self._left(stage),
            tables=self._angles(stage),
        )

    def _left(self, stage: StageWeights) -> int:
        """Megatron's dispatcher of a layer keeps the routing weights of its last pass, and so the graph back to the
        input of the recomputed layer, with its gradient."""
        if self.config.recompute == "none":
            return 0
        sparse = self._sparse(stage)
        received = int(stage.stage > 0 and sparse > 0)  # the gradient that is sent to the stage before
        return (2 * sparse + received) * self.ops.hidden

    def _angles(self, stage: StageWeights) -> int:
        """Tables of rotary angles in FP32: `RotaryEmbedding.forward` keeps the last 32 of different modules and
        lengths; counted for one length. Latent attention has a module in each layer."""
        d, layers = self.weights.dims, sum(map(len, stage.layers))
        tables, columns = (layers, d["kv_down"] - d["kv_lora"]) if self.ops.latent else (len(stage.layers), d["head"])
        return min(tables, _TABLES) * self.step.longest * columns * _FP32

    def _sparse(self, stage: StageWeights) -> int:
        return sum(layer in self.weights.moe_layers for chunk in stage.layers for layer in chunk)

    def _backward(self, costs: Sequence[LayerCost]) -> list[int]:
        """What one micro-batch's backward through a chunk holds while each layer works, from the last to the first."""
        kept = [c.keeps for c in costs]
        return [sum(kept[: i + 1]) + cost.work for i, cost in enumerate(costs)]

    def _head_moments(self, held: int) -> list[tuple[int, int]]:
        """(activations, logits) while the head, and then each draft layer, runs backward."""
        depths = len(self.weights.tensors.draft_layers)
        rows = self.ops.gathered  # hidden states that the head gathers, kept for each depth
        vocab = 1 if self.config.head == "scalar" else self.weights.dims["vocab"] // self.pack.tp
        weight = vocab * self.weights.dims["hidden"] * self.pack.width
        block = min(self.config.logprob_memory_mib * MIB, self.pack.gathered * vocab * 8)
        # in backward the gradient of the gathered states in FP32 and a product of a block, then its cast
        back = self.pack.gathered * self.weights.dims["hidden"] * _FP32 + rows
        heads = (1 + depths) * rows + max(back + weight + block, back + rows)
        draft = self.costs[True in self.costs]
        kept = depths * (draft.keeps + 3 * self.ops.hidden)  # the norms' and the projection's inputs
        moments = [(held + self.ops.hidden + kept, heads)]
        if depths:
            moments.append((held + kept + draft.work, depths * rows))
        return moments

    def _embedding(self) -> int:
        """The gathered gradient and that of the table."""
        vocab = self.weights.dims["vocab"] // self.pack.tp
        return self.ops.gathered + vocab * self.weights.dims["hidden"] * self.pack.width

    def _forward_only(self, stage: StageWeights) -> TrainingPeak:
        """A pass without gradients: one operation at a time, with the one before that made its inputs, or the head."""
        works = [_alone(self.ops.layer(moe)) for moe in self.costs]
        last = stage.stage == self.config.parallel.pp - 1
        block = min(self.config.logprob_memory_mib * MIB, self.pack.gathered * self.weights.dims["vocab"] * 8)
        moments = [(2 * self.ops.hidden + self._inputs(stage) + max(works), 0)]
        if last:
            moments.append((self._inputs(stage), 2 * self.ops.gathered + block))
        moments.append((self._rounding(stage), 0))
        activations, logits = max(moments, key=sum)
        return TrainingPeak(
            activations=activations, logits=logits, communication=self._buffers(), left=0, tables=self._angles(stage)
        )

    def _inputs(self, stage: StageWeights) -> int:
        """The micro-batches of the step, all of which are on the device: ids, labels and positions of int64 as packed
        and as fed, masks, advantages and log-probabilities, and the rows of the routes."""
        tokens, rows = self.step.tokens, self.pack.gathered
        depths = len(self.weights.tensors.draft_layers)
        packed = tokens * (4 * _INT64 + 4 * _FP32)
        fed = rows * (2 * _INT64 + (1 + depths) * (_INT64 + 1))
        routes = self.pack.rows * self._sparse(stage) * self.weights.dims.get("top_k", 0) * 2
        return self.step.micro_batches * (packed + fed + routes)

    def _rounding(self, stage: StageWeights) -> int:
        rounded = [h for h in stage.held if h.rounded]
        together = min(sum(h.total for h in rounded), ROUNDING_ELEMENTS)
        # on a CPU the tiles, whose temporaries are in FP32, are small
        tile = min(max((h.elements for h in rounded), default=0), CPU_TILE) if self.ops.cpu else together
        spec = self.weights.spec
        in_place = spec is not None and spec.format is QuantFormat.INT4
        return _COPIES * together + (_IN_PLACE if in_place else _TEMPORARIES) * tile

    def _buffers(self) -> int:
        """The gathered input of a column-parallel linear, which megatron's own linears keep in one global buffer
        (`get_global_memory_buffer`), and TransformerEngine's as a temporary of the same size."""
        return self.ops.gathered if self.pack.tp > 1 else 0


def _alone(ops: Sequence[Op]) -> int:
    """The most that one operation has and uses, with the results of the one before, which are its inputs."""
    inputs = [0, *(op.keeps for op in ops)]
    return max(before + op.keeps + op.forward for before, op in zip(inputs, ops, strict=False))
