"""What the installed release of TransformerEngine has of the things that this project relies on, and which of
megatron-core's optional imports of it succeed. For a process of `process.init_te`."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import torch

# name that megatron-core 0.16.1 binds to None, or not at all, where TransformerEngine lacks what it imports for it
OPTIONAL = (
    "te_general_gemm",
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
    "fused_apply_rotary_pos_emb",
    "fused_apply_rotary_pos_emb_thd",
    "fused_topk_with_score_function",
    "te_parallel_cross_entropy",
    "Fp8Padding",
    "Fp8Unpadding",
    "SplitAlongDim",
    "Float8Tensor",
    "cpu_offload",
    "get_cpu_offload_context",
)


def _modules() -> dict[str, torch.nn.Module]:
    import transformer_engine.pytorch as te

    how: dict[str, Any] = {"device": "cpu", "params_dtype": torch.float32, "bias": False}
    return {
        "Linear": te.Linear(16, 32, **how),
        "LayerNormLinear": te.LayerNormLinear(16, 32, normalization="RMSNorm", **how),
        "GroupedLinear": te.GroupedLinear(2, 16, 32, **how),
        "RMSNorm": te.RMSNorm(16, device="cpu", dtype=torch.float32),
    }


def _loads_none(module: torch.nn.Module) -> bool:
    """Whether `None` is taken for every extra state."""
    state = {k: None if k.endswith("_extra_state") else v for k, v in module.state_dict().items()}
    module.load_state_dict(state)
    return True


def _recipes() -> dict[str, list[Any]]:
    """Recipe -> its class, rows that a product's operand is a multiple of, block of a quantizer's scales."""
    from megatron.core.fp8_utils import get_fp8_align_size, get_fp8_recipe
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformer_engine.pytorch.constants import MXFP8_BLOCK_SCALING_SIZE, DType
    from transformer_engine.pytorch.tensor import Float8BlockQuantizer

    block = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True).block_len
    blocks = {"delayed": 16, "tensorwise": 16, "blockwise": block, "mxfp8": MXFP8_BLOCK_SCALING_SIZE}
    out: dict[str, list[Any]] = {}
    for name, size in blocks.items():
        config = TransformerConfig(
            num_layers=1, hidden_size=16, num_attention_heads=1, bf16=True, fp8="e4m3", fp8_recipe=name
        )
        made = next(c for c in type(get_fp8_recipe(config)).__mro__ if c.__module__.startswith("transformer_engine"))
        out[name] = [made.__name__, get_fp8_align_size(config.fp8_recipe), size]
    return out


def facts() -> dict[str, Any]:
    """JSON values."""
    import megatron.core.extensions.transformer_engine as extensions
    import megatron.core.optimizer as optimizers
    import transformer_engine.pytorch as te

    modules = _modules()
    sources = Path(inspect.getfile(importlib.import_module("transformer_engine.pytorch"))).parent
    return {
        "version": importlib.import_module("transformer_engine").__version__,
        "parameters": {name: [n for n, _ in m.named_parameters()] for name, m in modules.items()},
        "extra states": [name for name, m in modules.items() if "_extra_state" in m.state_dict()],
        "loads None": [name for name, m in modules.items() if _loads_none(m)],
        "fuse_wgrad_accumulation": [n for n, m in modules.items() if hasattr(m, "fuse_wgrad_accumulation")],
        "quantized tensors": issubclass(te.QuantizedTensor, torch.Tensor),
        "recipes": _recipes(),
        "adam": f"{optimizers.Adam.__module__.partition('.')[0]}.{optimizers.Adam.__name__}",
        "optional": [name for name in OPTIONAL if getattr(extensions, name, None) is not None],
        "variables": [
            name
            for name in ("NVTE_ALLOW_NONDETERMINISTIC_ALGO",)
            if any(name in path.read_text() for path in sources.rglob("*.py"))
        ],
    }
