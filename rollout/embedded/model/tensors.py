"""Hugging Face names and shapes of a model's weights. All families use the same names for the same modules."""

from __future__ import annotations

from rollout.embedded.families.architecture import Architecture, GroupedAttention, LatentAttention, Moe

Shapes = dict[str, tuple[int, ...]]


def expected_tensors(arch: Architecture) -> Shapes:
    """Hugging Face name -> shape [out, in] of every weight of the model."""
    out: Shapes = {
        "model.embed_tokens.weight": (arch.vocab, arch.hidden),
        "model.norm.weight": (arch.hidden,),
    }
    if not arch.tied:
        out["lm_head.weight"] = (arch.vocab, arch.hidden)
    a, moe_layers = arch.attention, set(arch.moe_layers)
    attention = _latent(a, arch.hidden) if isinstance(a, LatentAttention) else _grouped(a, arch.hidden)
    dense = _mlp("", arch.hidden, arch.dense_ffn)
    moe = _moe(arch.moe, arch.hidden) if arch.moe is not None else {}
    for i in range(arch.layers):
        p = f"model.layers.{i}."
        out[p + "input_layernorm.weight"] = (arch.hidden,)
        out[p + "post_attention_layernorm.weight"] = (arch.hidden,)
        out |= {p + "self_attn." + n: s for n, s in attention.items()}
        out |= {p + "mlp." + n: s for n, s in (moe if i in moe_layers else dense).items()}
    return out


def _latent(a: LatentAttention, hidden: int) -> Shapes:
    q = a.heads * (a.nope + a.rope.dim)
    out: Shapes = {
        "kv_a_proj_with_mqa.weight": (a.cache_width, hidden),
        "kv_a_layernorm.weight": (a.kv_lora,),
        "kv_b_proj.weight": (a.heads * (a.nope + a.v_dim), a.kv_lora),
        "o_proj.weight": (hidden, a.out_dim),
    }
    if a.bias:
        out |= {"kv_a_proj_with_mqa.bias": (a.cache_width,), "o_proj.bias": (hidden,)}
        out |= {"q_a_proj.bias": (a.q_lora,)} if a.q_lora is not None else {}
    if a.q_lora is None:
        return out | {"q_proj.weight": (q, hidden)}
    return out | {
        "q_a_proj.weight": (a.q_lora, hidden),
        "q_a_layernorm.weight": (a.q_lora,),
        "q_b_proj.weight": (q, a.q_lora),
    }


def _grouped(a: GroupedAttention, hidden: int) -> Shapes:
    rows = {"q_proj": a.heads * a.head, "k_proj": a.kv_heads * a.head, "v_proj": a.kv_heads * a.head}
    out: Shapes = {f"{name}.weight": (n, hidden) for name, n in rows.items()}
    out["o_proj.weight"] = (hidden, a.out_dim)
    if a.qkv_bias:
        out |= {f"{name}.bias": (n,) for name, n in rows.items()}
    if a.out_bias:
        out["o_proj.bias"] = (hidden,)
    if a.qk_norm:
        out |= {"q_norm.weight": (a.head,), "k_norm.weight": (a.head,)}
    return out


def _moe(m: Moe, hidden: int) -> Shapes:
    out: Shapes = {"gate.weight": (m.experts, hidden)}
    if m.selection_bias:
        out["gate.e_score_correction_bias"] = (m.experts,)
    for e in range(m.experts):
        out |= _mlp(f"experts.{e}.", hidden, m.ffn)
    if m.shared_ffn:
        out |= _mlp("shared_experts.", hidden, m.shared_ffn)
    return out


def _mlp(prefix: str, hidden: int, ffn: int) -> Shapes:
    return {
        prefix + "gate_proj.weight": (ffn, hidden),
        prefix + "up_proj.weight": (ffn, hidden),
        prefix + "down_proj.weight": (hidden, ffn),
    }
