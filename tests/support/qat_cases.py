"""Models, formats and layouts under which the laws of quantization-aware training hold."""

from __future__ import annotations

from typing import Any

from tests.support.layouts import EXPERTS, ROUTED
from tests.support.tiny_models import tiny, tiny_qwen

_SIZED = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
_MLA = tiny(
    **_SIZED, **ROUTED, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
)  # kv_a_proj has 40 rows: its last blocks are cut short
MODELS: dict[str, dict[str, Any]] = {
    "mla": _MLA,
    "mtp": _MLA | {"num_nextn_predict_layers": 1},
    "gqa": tiny_qwen(**_SIZED, num_experts=EXPERTS, head_dim=32, mlp_only_layers=[0]),
    "four layers": _MLA | {"num_hidden_layers": 4},
    # inputs that divide into groups of 128 on two ranks too
    "wide": tiny(
        **_SIZED | {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256},
        **ROUTED,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=64,
    ),
}
_BLOCKS = {"block": [16, 16]}
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"format": "fp8", **_BLOCKS},
    "fp8 of experts": {"format": "fp8", "block": [32, 16], "scope": "experts"},
    "fp8-ue8m0": {"format": "fp8-ue8m0", **_BLOCKS},
    "int4": {"format": "int4"},
    "int4 of all": {"format": "int4", "scope": "all"},
    "mxfp8": {"format": "mxfp8"},
    "mxfp4": {"format": "mxfp4"},
    "mxfp4 of all": {"format": "mxfp4", "scope": "all"},
    "nvfp4": {"format": "nvfp4"},
}
FULL = {"recompute": "full"}
MTP = {"mtp_coefficient": 0.3}
OVERLAPPED = {"kernels": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
LORA = {"lora": {"rank": 4, "alpha": 6.0, "targets": ["attention", "experts", "shared_experts", "mlp"]}}
BF16 = {"dtype": "bfloat16"}
Case = tuple[str, dict[str, Any], tuple[str, ...]]  # model, settings, formats
EVERY, SCOPES, SOME = tuple(f for f in FORMATS if " " not in f), tuple(FORMATS), ("fp8", "int4", "nvfp4")
ONE: dict[str, Case] = {
    "bf16, recomputed": ("gqa", BF16 | FULL, EVERY),
    "fp32, without distributed optimizer": ("mtp", MTP | {"distributed_optimizer": False}, SOME),
    "LoRA": ("mla", BF16 | LORA, SOME),
}
TWO: dict[str, Case] = {
    "TP2": ("gqa", BF16 | {"tp": 2}, SCOPES),
    "TP2 and ETP2, recomputed": ("mla", BF16 | FULL | {"tp": 2, "etp": 2}, EVERY),
    "ETP2, fp32": ("mla", {"dp": 2, "etp": 2}, EVERY),
    "EP2 without distributed optimizer": ("mla", BF16 | {"dp": 2, "ep": 2, "distributed_optimizer": False}, EVERY),
    "PP2, recomputed": ("mtp", BF16 | FULL | MTP | {"pp": 2}, EVERY),
    "PP2xVPP2": ("four layers", BF16 | {"pp": 2, "vpp": 2}, SOME),
    "EP2, weights gathered late": ("mla", BF16 | OVERLAPPED | {"dp": 2, "ep": 2}, (*SOME, "fp8-ue8m0")),
    "LoRA, TP2 and ETP2": ("mla", BF16 | LORA | {"tp": 2, "etp": 2}, SOME),
}
# Of both, in `make test`: formats of blocks and packed ones, and ranks that share a matrix, and that have whole ones.
QUICK = (
    "bf16, recomputed: fp8",
    "fp32, without distributed optimizer: int4",
    "TP2: fp8 of experts",
    "TP2 and ETP2, recomputed: nvfp4",
)
