"""Bytes that the operations of one transformer layer keep and use, for one micro-batch on one rank.

A layer is a list of `Op`: what autograd keeps from an operation's forward until its backward, and what is alive beside
that during each of the two. The largest sum along the list is the layer's peak. The operations are those of
megatron-core 0.16.1's `TransformerLayer.forward` with sequence parallelism (arXiv:2205.05198, section 4.2), `MoELayer`
and its dispatchers; core attention keeps queries, keys, values, outputs and one number per row and head
(arXiv:2205.14135). Weights' gradients exist in the parameters' dtype until they are added to the FP32 buffers, those
of all local experts of a matrix at once (`GroupedLinear.backward`).

Letters: s rows of this rank below the embedding, S = tp * s rows that its matrices see, T rows of its experts, H hidden
size, F width of a feed-forward part on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_bridge.config import TrainerConfig
from miles_like.planning.memory.weights import ModelWeights

_FP32 = 4
_PADDED = 64  # rows to whose multiples LocalGroupedMLP pads each expert's: half of them on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation. module: Megatron's name in `recompute_modules` under which what it keeps is dropped."""

    keeps: int = 0
    forward: int = 0  # alive during its forward beside what is kept
    backward: int = 0  # the same in its backward: gradients and temporaries
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """The rows of one micro-batch on one rank.

    imbalance: rows of the busiest rank's experts over the average.
    """

    rows: int  # s
    tp: int
    cp: int
    width: int  # bytes of an element
    imbalance: float = 1.0

    @property
    def gathered(self) -> int:
        return self.rows * self.tp

    @classmethod
    def of(cls, config: TrainerConfig, tokens: int, *, token_multiple: int = 1, imbalance: float = 1.0) -> Pack:
        """tokens: of a whole micro-batch, before context parallelism divides it."""
        layout = config.parallel
        rows = -(-tokens // (layout.cp * layout.tp))
        rows = -(-rows // token_multiple) * token_multiple
        width = 2 if config.params_dtype == "bfloat16" else _FP32
        return cls(rows=rows, tp=layout.tp, cp=layout.cp, width=width, imbalance=imbalance)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Bytes that one layer holds for one micro-batch."""

    keeps: int  # until its backward, by the mode of recomputation
    whole: int  # without any recomputation
    forward: int  # peak of a forward that keeps everything
    backward: int  # peak of the backward, with what is kept

    @property
    def work(self) -> int:
        """Bytes that the layer needs in its backward pass, after a recomputed forward, in addition to `keeps`."""
        return max(self.forward, self.backward) - self.keeps


def layer_cost(ops: Sequence[Op], recompute: str, modules: Iterable[str], hidden: int) -> LayerCost:
    """The cost of a layer of these operations. recompute, modules: train.recompute and train.recompute_modules. hidden:
    bytes of the layer's input, which is kept in every mode."""
    whole = sum(op.keeps for op in ops)
    dropped = set(modules) if recompute == "selective" else set()
    keeps = hidden if recompute == "full" else sum(op.keeps for op in ops if op.module not in dropped)
    forward = backward = so_far = 0
    for op in ops:
        so_far += op.keeps
        forward = max(forward, so_far + op.forward)
        backward = max(backward, so_far + op.backward)
    return LayerCost(keeps=keeps, whole=whole, forward=max(forward, keeps), backward=max(backward, keeps))


class LayerOps:
    """The operations of a model's layers in one layout. local: megatron's local modules, not TransformerEngine's; cpu:
    of CPU ranks."""

    def __init__(self, weights: ModelWeights, pack: Pack, *, local: bool, cpu: bool = False) -> None:
        self.dims, self.config, self.pack = weights.dims, weights.config, pack
        self.latent = "kv_lora" in self.dims
        self.heads = weights.hf["num_attention_heads"] // pack.tp
        self.local, self.cpu = local, cpu
        self.hidden = pack.rows * self.dims["hidden"] * pack.width
        self.gathered = pack.gathered * self.dims["hidden"] * pack.width

    def _rows(self, columns: int) -> int:
        """Bytes of [S, columns]."""
        return self.pack.gathered * columns * self.pack.width

    def _matrix(self, outputs: int, inputs: int) -> int:
        """Bytes of a weight's gradient."""
        return outputs * inputs * self.pack.width

    def layer(self, moe: bool) -> list[Op]:
        attention = self._latent_attention() if self.latent else self._grouped_attention()
        return [*attention, *(self._experts() if moe else self._mlp(self.dims["dense_ffn"], "mlp"))]

    def _norm(self) -> Op:
        """Keeps its input. TransformerEngine's kernel has no temporaries; the local one computes in FP32."""
        return Op(keeps=self.hidden, forward=self.hidden, backward=(5 if self.local else 2) * self.hidden)

    def _column(self, outputs: int, *, keeps: int, inputs: int | None = None, gathers: bool = True) -> Op:
        """A column-parallel linear with `outputs` on this rank: it keeps its input of s rows; backward has the gradient
        of the gathered input and, after the reduce-scatter, of the rows."""
        width = self.dims["hidden"] if inputs is None else inputs
        whole = self._rows(width) if gathers and self.pack.tp > 1 else 0
        out = self._rows(outputs)
        rows = self.pack.rows * width * self.pack.width
        return Op(keeps=keeps, forward=out, backward=out + whole + rows + self._matrix(outputs, width))

    def _row(self, inputs: int, *, keeps: int, module: str = "") -> Op:
        """A row-parallel linear with `inputs` on this rank."""
        whole = self.gathered if self.pack.tp > 1 else 0
        back = self.gathered + self._rows(inputs) + self._matrix(self.dims["hidden"], inputs)
        return Op(keeps=keeps, forward=whole + self.hidden, backward=back, module=module)

    def _core(self, query: int, key: int, value: int, out: int) -> Op:
        """Core attention of q, k, v and output of these widths on this rank. It keeps the numbers per row and head, and
        its output, which the next linear keeps too. Keys and values of the other context-parallel ranks pass in a ring;
        the local module gathers and keeps them."""
        pair, others = self._rows(key) + self._rows(value), self.pack.cp - 1
        read = self._rows(query) + pair + (others * pair if self.local else 0)
        ring = 0 if self.local else others * pair
        numbers = self.pack.gathered * self.heads * _FP32
        module = "mla_up_proj" if self.latent else ""
        out_rows = self._rows(out)
        pieces = out_rows if self.local else 0  # outputs of the samples, before they are put in order
        if self.cpu:  # packed_causal_attention computes in FP32 there
            read, pieces = (n * _FP32 // self.pack.width for n in (read, pieces))
        return Op(keeps=read + numbers + pieces, forward=out_rows + ring, backward=out_rows + read, module=module)

    def _grouped_attention(self) -> Iterator[Op]:
        d, tp = self.dims, self.pack.tp
        query, key = d["q_out"] // tp, d["kv_out"] // tp
        qkv = query + 2 * key
        yield self._norm()
        yield self._column(qkv, keeps=self.hidden)
        normed = self._rows(query) if d["qk_norm"] else 0  # the norm's input, a contiguous copy
        # keys and values are views of the product's output, which therefore stays
        angles = 2 * self._rows(query + key) if self.local else 0  # packed_rope.py: sines and cosines for each head
        kept = self._rows(qkv) + normed + angles
        yield Op(keeps=kept, forward=2 * self._rows(query), backward=3 * self._rows(query))
        # the local modules repeat keys and values for every query head
        repeated = query if self.local else key
        yield self._core(query, repeated, repeated if self.local else 0, query)
        yield self._row(query, keeps=self._rows(query))

    def _latent_attention(self) -> Iterator[Op]:
        d, tp, rows, width = self.dims, self.pack.tp, self.pack.rows, self.pack.width
        query, up, out = d["q_out"] // tp, d["kv_out"] // tp, d["o_in"] // tp
        down = rows * width * (d["q_lora"] + d["kv_down"])
        yield self._norm()
        matrices = self._matrix(d["q_lora"] + d["kv_down"], d["hidden"])
        yield Op(keeps=self.hidden, forward=down, backward=down + self.hidden + matrices)
        yield Op(keeps=2 * down, forward=down, backward=(5 if self.local else 2) * down)  # the two norms of latents
        inputs = d["q_lora"] or d["hidden"]
        yield self._column(query, keeps=0, inputs=inputs)
        yield self._column(up, keeps=0, inputs=d["kv_lora"])
        # queries and keys are assembled from their rotated and other channels
        assembled = 2 * self._rows(query) + self._rows(up)
        yield Op(forward=self._rows(query) + assembled, backward=assembled)
        yield self._core(query, query, out, out)
        yield self._row(out, keeps=self._rows(out))

    def _mlp(self, ffn: int, module: str) -> Iterator[Op]:
        """A dense SwiGLU, divided over tensor-parallel ranks."""
        width = ffn // self.pack.tp
        yield self._norm()
        yield from self._swiglu(width, module, keeps=self.hidden)

    def _swiglu(self, width: int, module: str, *, keeps: int) -> Iterator[Op]:
        both, one = self._rows(2 * width), self._rows(width)
        extra = 0 if self.config.kernels.swiglu_fusion else 2 * one  # the gate's activation and its product
        yield self._column(2 * width, keeps=keeps)
        yield Op(keeps=both + extra, forward=one, backward=3 * one + both, module=module)
        yield self._row(width, keeps=one, module=module)

    def _experts(self) -> Iterator[Op]:
        """Pre-norm, shared experts, router, dispatch, routed experts, combination: the order of `MoELayer.forward`."""
        d, pack = self.dims, self.pack
        yield self._norm()
        yield Op(keeps=self.hidden)  # the norm's output, which all parts read
        if d.get("shared_ffn"):
            yield from self._swiglu(d["shared_ffn"] // pack.tp, "moe", keeps=0)
        shared = self.hidden if d.get("shared_ffn") else 0  # its output waits for that of the routed experts
        scores = pack.rows * d["experts"] * _FP32
        router = 2 * pack.rows * d["hidden"] * _FP32  # the input and its gradient in FP32
        map_ = pack.rows * d["experts"]
        yield Op(
            keeps=3 * scores + map_,
            forward=router // 2 + scores + shared,
            backward=router + 2 * scores + d["experts"] * d["hidden"] * _FP32,
            module="moe",
        )
        yield from _waiting(self._routed(), shared)

    def _routed(self) -> Iterator[Op]:
        d, pack, layout = self.dims, self.pack, self.config.parallel
        dispatcher = self.config.kernels.dispatcher
        own = pack.rows * d["top_k"]  # rows that this rank sends, one per choice
        rows = math.ceil(own * (pack.imbalance if layout.ep > 1 else 1.0))  # that it receives
        line = d["hidden"] * pack.width
        rows *= layout.etp  # each of an expert's tensor-parallel ranks computes a slice of all its tokens
        gathered = rows * line
        sliced = layout.etp > 1 and dispatcher == "alltoall"  # its tokens are gathered after they are sent
        # local variables of MoELayer.forward, and of the dispatcher until its rows are sorted
        held = self._sent_and_received(own, rows // layout.etp)
        unsorted = gathered if sliced else 0
        sorted_ = gathered if dispatcher != "alltoall" or d["experts"] // layout.ep > 1 else 0
        padded = rows + (_PADDED // 2 * d["experts"] // layout.ep if self.local and pack.width == 2 else 0)
        copies = padded * line - gathered if padded > rows else 0
        width, local = d["moe_ffn"] // layout.etp, d["experts"] // layout.ep
        both, one = padded * 2 * width * pack.width, padded * width * pack.width
        line_rows = padded * line
        index = own * 8
        yield Op(keeps=index, forward=held + unsorted + sorted_, backward=gathered + sorted_, module="moe")
        yield Op(
            keeps=line_rows,
            forward=held + both + copies,
            backward=both + line_rows + local * self._matrix(2 * width, d["hidden"]),
            module="moe",
        )
        # FP32 as the routing weights: the weighted gradient, both halves and their gradients, silu(gate), the product;
        # a compiled kernel needs less
        wide = padded * width * _FP32
        yield Op(keeps=both, forward=held + one + wide, backward=one + 7 * wide, module="moe")
        yield Op(
            keeps=one,
            forward=held + 2 * line_rows,
            backward=line_rows + one + local * self._matrix(d["hidden"], width),
            module="moe",
        )
        # the reduce-scatter is in the router's FP32: all rows, and this rank's
        back = (rows + rows // layout.etp) * d["hidden"] * _FP32 if sliced else 0
        yield Op(forward=held + 2 * gathered + back + self.hidden, backward=2 * gathered + back, module="moe")

    def _sent_and_received(self, own: int, rows: int) -> int:
        """Bytes of hidden states that a dispatcher sends and receives; own, rows: one per choice of an expert."""
        d, pack, layout = self.dims, self.pack, self.config.parallel
        line = d["hidden"] * pack.width
        match self.config.kernels.dispatcher:
            case "alltoall":
                return own * line + (rows * line if layout.ep > 1 else 0)
            case "allgather":  # every rank's
                return pack.rows * layout.ep * layout.etp * line
            case "flex":  # a row once to each rank, for all of its experts there
                hit = layout.ep * (1 - (1 - 1 / layout.ep) ** d["top_k"])
                return math.ceil(pack.rows * layout.etp * hit * pack.imbalance) * line


def _waiting(ops: Iterable[Op], more: int) -> Iterator[Op]:
    """Operations while something else is alive in forward."""
    for op in ops:
        yield Op(keeps=op.keeps, forward=op.forward + more, backward=op.backward, module=op.module)
