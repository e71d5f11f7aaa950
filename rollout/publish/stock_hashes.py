"""The stored tensors that each parameter of a stock SGLang server consists of, and the hash the server reports for it.

For SGLang 0.5.23 with one tensor- and pipeline-parallel rank and without quantization. A stacked parameter is the
concatenation of its parts' rows (`stacked_params_mapping` and `cached_a_proj` of models/qwen3_moe.py,
models/glm4_moe.py and models/deepseek_common/deepseek_weight_loader.py). Parameters of routed experts have the experts
as first axis (layers/moe/fused_moe_triton). On a CPU the hash is the first 8 bytes of SHA-256 over a tensor's bytes
(managers/mm_utils.py, `tensor_hash`); on CUDA it is a different function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor

_STACKED: Mapping[str, tuple[str, ...]] = {
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_EXPERTS: Mapping[str, tuple[str, ...]] = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


def stored_parts(served: str, names: Container[str]) -> tuple[tuple[str, ...], ...]:
    """Stored names of the parts of the server's parameter `served`: one tuple per expert if it has an axis of experts,
    else one tuple. Empty if it is not known how the parameter consists of `names`."""
    if served in names:
        return ((served,),)
    module, _, leaf = served.rpartition(".")
    parent, _, last = module.rpartition(".")
    if leaf in _EXPERTS:
        experts, e = [], 0
        while f"{module}.{e}.down_proj.weight" in names:
            experts.append(tuple(f"{module}.{e}.{part}.weight" for part in _EXPERTS[leaf]))
            e += 1
        return tuple(experts)
    parts = tuple(f"{parent}.{part}.{leaf}" for part in _STACKED.get(last, ()))
    return (parts,) if parts and all(n in names for n in parts) else ()


def stock_checksum(parts: tuple[tuple[str, ...], ...], read: Callable[[str], Tensor]) -> str:
    """The hash, 16 hex digits, of the parameter with these `stored_parts`. read: stored name -> tensor."""
    digest = hashlib.sha256()  # the bytes of a stacked tensor are the concatenated bytes of its parts
    for name in (name for rows in parts for name in rows):
        digest.update(read(name).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
