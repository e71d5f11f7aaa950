"""Table entries for model parts that several families share.

`hf` and `megatron` are name prefixes that end in a dot ("model.layers.{i}.", "decoder.layers.{i}."), or names of
linears and norms. Dimensions are those of `settings`; an entry that some models lack names a dimension that is 0 there.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

from megatron_bridge.families.base import SCORE, Entry, Precision, Split, Where

LAYER, DECODER = "model.layers.{i}.", "decoder.layers.{i}."  # prefixes of a decoder layer: Hugging Face, Megatron
DRAFT, DRAFT_LAYER = "mtp.layers.{j}.", "mtp.layers.{j}.transformer_layer."  # Megatron's prefixes of a draft layer


class _Layers(TypedDict, total=False):
    """The layers that have an entry, and its fusion group."""

    where: Where
    fused: str


class _Options(_Layers, total=False):
    """Also the dimensions that an entry depends on."""

    given: str
    unless: str


def linear(hf: str, megatron: str, shape: tuple[str, str], split: Split, **options: Unpack[_Options]) -> Entry:
    """The weight of a parallel linear."""
    return Entry(
        hf=(hf + ".weight",), megatron=megatron + ".weight", shapes=(shape,), split=split, linear=True, **options
    )


def bias(hf: str, megatron: str, size: str, *, given: str, **options: Unpack[_Layers]) -> Entry:
    """The bias of a linear whose outputs are not sharded. The module `biases` adds it where megatron builds none."""
    return Entry(hf=(hf + ".bias",), megatron=megatron + ".bias", shapes=((size,),), given=given, **options)


def norm(hf: str, megatron: str, size: str, *, stored: str | None = None, **options: Unpack[_Options]) -> Entry:
    """An RMSNorm. `stored`: its name in checkpoints where that differs."""
    return Entry(hf=(hf + ".weight",), megatron=megatron + ".weight", shapes=((size,),), stored=stored, **options)


def swiglu(hf: str, megatron: str, width: str, **options: Unpack[_Options]) -> tuple[Entry, Entry]:
    """gate_proj and up_proj, which Megatron holds as one linear, and down_proj."""
    fc1 = Entry(
        hf=(hf + ".gate_proj.weight", hf + ".up_proj.weight"),
        megatron=megatron + ".linear_fc1.weight",
        shapes=((width, "hidden"), (width, "hidden")),
        split=Split.GATE_UP,
        linear=True,
        **options,
    )
    return fc1, linear(hf + ".down_proj", megatron + ".linear_fc2", ("hidden", width), Split.ROW, **options)


def embedding() -> Entry:
    """The token embedding; each draft layer of a Hugging Face checkpoint repeats it."""
    return Entry(
        hf=("model.embed_tokens.weight",),
        megatron="embedding.word_embeddings.weight",
        shapes=(("vocab", "hidden"),),
        split=Split.VOCAB,
        where=Where.TOP,
        copies=(LAYER + "embed_tokens.weight",),
    )


def output() -> tuple[Entry, Entry, Entry]:
    """The last norm, the vocabulary head unless it is tied to the embedding, and the scalar head."""
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
    """Grouped-query attention with the layer norms before and after it."""
    theirs, ours = hf + "self_attn.", megatron + "self_attention."
    projections = tuple(f"{theirs}{x}_proj" for x in "qkv")
    return (
        # Checkpoints store the local spec's two layer norms under the names of TransformerEngine's fused linears, the
        # second one before experts too, where no such linear exists (sharded_state_dict_keys_map).
        norm(
            hf + "input_layernorm",
            megatron + "input_layernorm",
            "hidden",
            stored=ours + "linear_qkv.layer_norm_weight",
            where=where,
        ),
        Entry(
            hf=tuple(name + ".weight" for name in projections),
            megatron=ours + "linear_qkv.weight",
            shapes=(("q_out", "hidden"), ("kv_out", "hidden"), ("kv_out", "hidden")),
            split=Split.QKV,
            linear=True,
            where=where,
        ),
        Entry(
            hf=tuple(name + ".bias" for name in projections),
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
    """Router and routed experts; selection bias and shared experts where the model has them."""
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
    """A draft layer in DeepSeek-V3's layout: two norms and a projection, `layer`, and a norm."""
    return (
        norm(LAYER + "enorm", DRAFT + "enorm", "hidden", where=Where.MTP),
        norm(LAYER + "hnorm", DRAFT + "hnorm", "hidden", where=Where.MTP),
        # the input is the normed embedding, then the normed hidden state, in Hugging Face and Megatron alike
        linear(LAYER + "eh_proj", DRAFT + "eh_proj", ("hidden", "twice_hidden"), Split.COLUMN, where=Where.MTP),
        *layer,
        norm(LAYER + "shared_head.norm", DRAFT + "final_layernorm", "hidden", where=Where.MTP),
    )
