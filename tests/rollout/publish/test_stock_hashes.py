"""Tensors of a stock server named by the stored tensors that they are made of, and hashed as it hashes them. Whether a
real server has these: tests/sglang_cpu."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from rollout.publish.stock_hashes import stock_checksum, stored_parts

LAYER = "model.layers.1."


def stored() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    names = [f"self_attn.{x}_proj.weight" for x in "qkvo"] + ["self_attn.q_a_proj.weight"]
    names += ["self_attn.kv_a_proj_with_mqa.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.gate.weight"]
    names += [f"mlp.experts.{e}.{x}_proj.weight" for e in range(3) for x in ("gate", "up", "down")]
    return {LAYER + n: torch.randn(4, 6, generator=g).to(torch.bfloat16) for n in names}


def test_a_served_tensor_is_hashed_as_its_stacked_parts() -> None:
    weights = stored()

    def of(*names: str) -> Tensor:
        return torch.cat([weights[f"{LAYER}{n}.weight"] for n in names])

    experts = [of(f"mlp.experts.{e}.gate_proj", f"mlp.experts.{e}.up_proj") for e in range(3)]
    for served, wanted in {
        "self_attn.qkv_proj.weight": of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.fused_qkv_a_proj_with_mqa.weight": of("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        "mlp.gate_up_proj.weight": of("mlp.gate_proj", "mlp.up_proj"),
        "mlp.gate.weight": of("mlp.gate"),
        "mlp.experts.w13_weight": torch.stack(experts),
        "mlp.experts.w2_weight": torch.stack([of(f"mlp.experts.{e}.down_proj") for e in range(3)]),
    }.items():
        parts = stored_parts(LAYER + served, weights)
        digest = hashlib.sha256(wanted.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        assert stock_checksum(parts, weights.__getitem__) == digest, served


def test_a_tensor_that_is_made_in_no_known_way_is_not_hashed() -> None:
    weights = stored()
    del weights[f"{LAYER}self_attn.v_proj.weight"]
    for served in ("self_attn.qkv_proj.weight", "self_attn.attn_mqa.k_scale", "mlp.shared_experts.w13_weight"):
        assert stored_parts(LAYER + served, weights) == ()
