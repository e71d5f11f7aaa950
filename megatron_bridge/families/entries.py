"""Lines of the families' tables, for parts that several families have.

`hf` and `megatron` are name prefixes that end in a point ("model.layers.{i}.", "decoder.layers.{i}."), or names of
linears and norms. Dimensions are those of `settings`; a line that some models lack names the dimension that is then 0.
"""

from __future__ import annotations

from typing import Any

from megatron_bridge.families.base import SCORE, Entry, Precision, Split, Where

LAYER, DECODER = "model.layers.{i}.", "decoder.layers.{i}."  # of a decoder layer, on both sides
DRAFT, DRAFT_LAYER = "mtp.layers.{j}.", "mtp.layers.{j}.transformer_layer."  # Megatron's side of a draft layer


def linear(hf: str, megatron: str, shape: tuple[str, str], split: Split, **more: Any) -> Entry:
    """The weight of a parallel linear."""
    return Entry(hf=(hf + ".weight",), megatron=megatron + ".weight", shapes=(shape,), split=split, linear=True, **more)


def bias(hf: str, megatron: str, size: str, *, given: str, **more: Any) -> Entry:
    """The bias of a linear whose outputs are whole on every rank. Where megatron builds none, `biases` adds it."""
    return Entry(hf=(hf + ".bias",), megatron=megatron + ".bias", shapes=((size,),), given=given, **more)


def norm(hf: str, megatron: str, size: str, *, stored: str | None = None, **more: Any) -> Entry:
    """An RMSNorm. `stored`: its name in checkpoints, where that differs."""
    return Entry(hf=(hf + ".weight",), megatron=megatron + ".weight", shapes=((size,),), stored=stored, **more)


def swiglu(hf: str, megatron: str, width: str, **more: Any) -> tuple[Entry, Entry]:
    """gate_proj and up_proj, which Megatron holds as one linear, and down_proj."""
    fc1 = Entry(
        hf=(hf + ".gate_proj.weight", hf + ".up_proj.weight"),
        megatron=megatron + ".linear_fc1.weight",
        shapes=((width, "hidden"), (width, "hidden")),
        split=Split.GATE_UP,
        linear=True,
        **more,
    )
    return fc1, linear(hf + ".down_proj", megatron + ".linear_fc2", ("hidden", width), Split.ROW, **more)


def embedding() -> Entry:
    """The token embedding, which each draft layer of a checkpoint holds again."""
    return Entry(
        hf=("model.embed_tokens.weight",),
        megatron="embedding.word_embeddings.weight",
        shapes=(("vocab", "hidden"),),
        split=Split.VOCAB,
        where=Where.TOP,
        copies=(LAYER + "embed_tokens.weight",),
    )


def output() -> tuple[Entry, Entry, Entry]:
    """The last norm; the head where it is not the embedding, or one number a token instead of it."""
    head = Entry(
        hf=("lm_head.weight",),
        megatron="output_layer.weight",
        shapes=(("vocab", "hidden"),),
        split=Split.VOCAB,
        where=Where.TOP,
        unless="no_lm_head",
        copies=(LAYER + "shared_head.head.weight",),
    )
    score = Entry(
        hf=(SCORE,),
        megatron="output_layer.weight",
        shapes=(("score", "hidden"),),
        where=Where.TOP,
        stored=SCORE,
        given="score",
    )
    return norm("model.norm", "decoder.final_layernorm", "hidden", where=Where.TOP), head, score


def grouped_attention(hf: str, megatron: str, where: Where = Where.EVERY) -> tuple[Entry, ...]:
    """Grouped-query attention between its layer's norm and the next."""
    theirs, ours = hf + "self_attn.", megatron + "self_attention."
    parts = tuple(f"{theirs}{x}_proj" for x in "qkv")
    return (
        # In checkpoints the local spec's two layer norms carry the names that TransformerEngine's fused linears give
        # them, the second one before experts too, where no such linear exists (sharded_state_dict_keys_map).
        norm(
            hf + "input_layernorm",
            megatron + "input_layernorm",
            "hidden",
            stored=ours + "linear_qkv.layer_norm_weight",
            where=where,
        ),
        Entry(
            hf=tuple(part + ".weight" for part in parts),
            megatron=ours + "linear_qkv.weight",
            shapes=(("q_out", "hidden"), ("kv_out", "hidden"), ("kv_out", "hidden")),
            split=Split.QKV,
            linear=True,
            where=where,
        ),
        Entry(
            hf=tuple(part + ".bias" for part in parts),
            megatron=ours + "linear_qkv.bias",
            shapes=(("q_out",), ("kv_out",), ("kv_out",)),
            split=Split.QKV,
            where=where,
            given="qkv_bias",
        ),
        norm(theirs + "q_norm", ours + "q_layernorm", "head", given="qk_norm", where=where),
        norm(theirs + "k_norm", ours + "k_layernorm", "head", given="qk_norm", where=where),
        linear(theirs + "o_proj", ours + "linear_proj", ("hidden", "q_out"), Split.ROW, where=where),
        bias(theirs + "o_proj", ours + "linear_proj", "hidden", given="o_bias", where=where),
        norm(
            hf + "post_attention_layernorm",
            megatron + "pre_mlp_layernorm",
            "hidden",
            stored=megatron + "mlp.linear_fc1.layer_norm_weight",
            where=where,
        ),
    )


def experts(hf: str, megatron: str, where: Where = Where.MOE) -> tuple[Entry, ...]:
    """Router, routed experts and, where there are any, selection bias and shared experts."""
    return (
        Entry(
            hf=(hf + "mlp.gate.weight",),
            megatron=megatron + "mlp.router.weight",
            shapes=(("experts", "hidden"),),
            where=where,
        ),
        Entry(
            hf=(hf + "mlp.gate.e_score_correction_bias",),
            megatron=megatron + "mlp.router.expert_bias",
            shapes=(("experts",),),
            where=where,
            precision=Precision.FP32,
            given="router_bias",
        ),
        *swiglu(hf + "mlp.experts.{e}", megatron + "mlp.experts.local_experts.{e}", "moe_ffn", where=where),
        *swiglu(
            hf + "mlp.shared_experts", megatron + "mlp.shared_experts", "shared_ffn", where=where, given="shared_ffn"
        ),
    )


def draft(*layer: Entry) -> tuple[Entry, ...]:
    """A draft layer (DeepSeek-V3's, which others took over): two norms and a projection, `layer`, and a norm."""
    return (
        norm(LAYER + "enorm", DRAFT + "enorm", "hidden", where=Where.MTP),
        norm(LAYER + "hnorm", DRAFT + "hnorm", "hidden", where=Where.MTP),
        # on both sides the input is the normed embedding, then the normed hidden state
        linear(LAYER + "eh_proj", DRAFT + "eh_proj", ("hidden", "twice_hidden"), Split.COLUMN, where=Where.MTP),
        *layer,
        norm(LAYER + "shared_head.norm", DRAFT + "final_layernorm", "hidden", where=Where.MTP),
    )
