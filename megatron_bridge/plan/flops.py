"""Floating-point operations of a step, computed from a model's config.json and the lengths of its samples.

A multiply-add counts as two operations; norms, rotary embeddings, softmax, activations and the embedding lookup are
not counted, as in Megatron-LM and in PaLM's definition of model FLOPs (arXiv:2204.02311, appendix B).

Letters: n inputs of a sample, T their sum, R rows of the output head, H hidden size, V vocabulary, h heads, d_q and d_v
query/key and value size of a head, q and c the low ranks of MLA's queries and keys/values, r its rotary channels, g
key/value heads, E experts, K experts per token, F, M and S widths of a dense, a routed and all shared experts' SwiGLU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_bridge.families.base import HFConfig
from megatron_bridge.families.registry import family_of

BACKWARD = 2  # in units of forward passes: the gradients of inputs and of weights each cost as much as the forward


def forward_terms(
    hf: HFConfig, lengths: Sequence[int], *, head_rows: int | None = None, mtp_depths: int = 0
) -> dict[str, float]:
    """FLOPs of one forward, term by term. `lengths`: inputs of each sample; `head_rows`: loss tokens, the only
    rows whose logits the trainer computes (None: all); `mtp_depths`: multi-token prediction layers that are trained.

    attention: 2 T (H q + q h d_q + H (c + r) + c h (d_nope + d_v) + h d_v H) per layer for MLA (DeepSeek-V2, arXiv:
        2405.04434, section 2.1; H h d_q instead of the first two without a query rank), 2 T H (h d_q + 2 g d_q + h d_q)
        for grouped queries.
    core: scores and their product with the values, over the n (n + 1) / 2 causal pairs of a sample: sum over samples of
        n (n + 1) h (d_q + d_v) per layer. A kernel that does not skip the masked half executes up to twice that.
    dense: 6 T H F per dense layer (gate, up, down).
    experts: 6 T K H M per MoE layer; shared: 6 T H S; router: 2 T H E.
    head: 2 R H V.
    mtp: a depth is one more layer of the last layer's kind, its projection of 2 H to H (4 T H^2), and the head again
        (DeepSeek-V3, arXiv:2412.19437, section 2.2). Its input is one token shorter per depth; that is ignored.

    Raises ValueError for a model of no known family, and for a length below 1.
    """
    if min(lengths, default=1) < 1:
        raise ValueError(f"a sample of {min(lengths)} inputs: expected at least 1")
    family = family_of(hf)
    d, tokens, rows = family.dims(hf), sum(lengths), head_rows
    rows = tokens if rows is None else rows
    pairs = sum(n * (n + 1) for n in lengths)  # twice the causal pairs
    sparse = len(family.moe_layers(hf))
    dense = d["layers"] - sparse + (mtp_depths if not sparse else 0)
    sparse += mtp_depths if sparse else 0
    layers, hidden = dense + sparse, d["hidden"]
    out = {
        "attention": 2.0 * tokens * layers * _projections(d),
        "core": float(pairs * layers * (d["q_out"] + d.get("o_in", d["q_out"]))),
        "dense": 6.0 * tokens * dense * hidden * d["dense_ffn"],
        "head": 2.0 * rows * hidden * d["vocab"] * (1 + mtp_depths),
        "mtp_projection": 4.0 * tokens * hidden * hidden * mtp_depths,
    }
    if sparse:
        out |= {
            "experts": 6.0 * tokens * sparse * d["top_k"] * hidden * d["moe_ffn"],
            "shared": 6.0 * tokens * sparse * hidden * d.get("shared_ffn", 0),
            "router": 2.0 * tokens * sparse * hidden * d["experts"],
        }
    return out


def _projections(d: Mapping[str, int]) -> int:
    """Elements of a layer's attention matrices."""
    hidden = d["hidden"]
    if "kv_lora" not in d:
        return hidden * (2 * d["q_out"] + 2 * d["kv_out"])
    query = (hidden + d["q_out"]) * d["q_lora"] if d["q_lora"] else hidden * d["q_out"]
    return query + hidden * d["kv_down"] + d["kv_lora"] * d["kv_out"] + d["o_in"] * hidden


def forward_flops(hf: HFConfig, lengths: Sequence[int], *, head_rows: int | None = None, mtp_depths: int = 0) -> float:
    """The sum of `forward_terms`."""
    return sum(forward_terms(hf, lengths, head_rows=head_rows, mtp_depths=mtp_depths).values())


def train_flops(hf: HFConfig, lengths: Sequence[int], *, head_rows: int | None = None, mtp_depths: int = 0) -> float:
    """Model FLOPs of forward and backward: 3 times the forward. Divided by seconds and peak FLOP/s this is the MFU;
    recomputation does not count (full recomputation executes 4 times the forward)."""
    return (1 + BACKWARD) * forward_flops(hf, lengths, head_rows=head_rows, mtp_depths=mtp_depths)
